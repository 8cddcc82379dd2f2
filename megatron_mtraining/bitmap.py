"""Bitmaps as rows of int64 words: bit ``k`` of a row is bit ``k % 64`` of word ``k // 64``."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 64


def pack_bits(bits: Tensor) -> Tensor:
    """Bool ``[..., length]`` -> int64 ``[..., ceil(length / 64)]``; missing bits are 0."""
    missing = -bits.shape[-1] % WORD
    if missing:
        bits = torch.nn.functional.pad(bits, (0, missing))
    shifts = torch.arange(WORD, device=bits.device)
    return (bits.unflatten(-1, (-1, WORD)).to(torch.int64) << shifts).sum(-1)


def unpack_bits(words: Tensor, length: int) -> Tensor:
    """int64 ``[..., words]`` -> bool ``[..., length]``."""
    shifts = torch.arange(WORD, device=words.device)
    return ((words[..., None] >> shifts) & 1).flatten(-2)[..., :length].to(torch.bool)


def count_bits(words: Tensor) -> Tensor:
    """Number of set bits of each int64 word, as int64 of the same shape."""
    # Masks after the arithmetic shifts clear the copies of the sign bit.
    pairs = words - ((words >> 1) & 0x5555555555555555)
    nibbles = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
    octets = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((octets * 0x0101010101010101) >> 56) & 0xFF
