"""Packed sequences (``thd``): Megatron's cumulative lengths as documents, and where it puts their tokens.

The lengths lie on the device. They are read to the host once per batch, for all layers and passes: what was read is
remembered by the ``PackedSeqParams`` object, as long as nobody writes into its tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_mtraining.config import BLOCK
from megatron_mtraining.documents import Documents

from .conversion import Placement
from .errors import RefusedError


@dataclass(frozen=True)
class Packing:
    """The documents of a packed sequence.

    Attributes:
        documents: where they begin and how many real tokens they have.
        bounds: cumulative lengths with padding, which is what the sequence is dealt by.
    """

    documents: Documents
    bounds: tuple[int, ...]


LENGTHS = ("cu_seqlens_q", "cu_seqlens_q_padded", "cu_seqlens_kv", "cu_seqlens_kv_padded")
"""The cumulative lengths of a ``PackedSeqParams``."""

_read: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What was read of each ``PackedSeqParams``: the number of tokens and the tensors' versions it holds for, and the packing."""


def packing_of(packed: PackedSeqParams, num_tokens: int) -> Packing:
    """The documents that Megatron's cumulative lengths describe. Waits for the device at the first call of a batch.

    Tokens past the last document (padding of the whole sequence) form a document of their own; empty documents, with
    which some data sets fill up the lengths, are left out.

    Args:
        packed: ``cu_seqlens_q`` int32 ``[documents + 1]``, of real lengths, and ``cu_seqlens_q_padded`` if documents are
            padded.
        num_tokens: of all context-parallel ranks together.

    Raises:
        RefusedError: for another format, or documents that do not begin at multiples of 64 tokens.
    """
    if packed.qkv_format != "thd":
        raise RefusedError(f"packed_seq_params.qkv_format {packed.qkv_format}: use thd")
    given = {name: x for name in LENGTHS if (x := getattr(packed, name)) is not None}
    holds_for = (num_tokens, [(name, id(x), x._version) for name, x in given.items()])
    remembered = _read.get(packed)
    if remembered is None or remembered[0] != holds_for:
        remembered = (holds_for, read_packing(*_lengths_on_host(given), num_tokens=num_tokens))
        _read[packed] = remembered
    packing: Packing = remembered[1]
    return packing


def _lengths_on_host(given: dict[str, Tensor]) -> list[list[int]]:
    """The lengths of the queries, real ones before padded ones. Those of the keys must be the same.

    Raises:
        RefusedError: for lengths of other dimensions, none at all, or keys with lengths of their own.
    """
    for name, x in given.items():
        if x.dim() != 1:
            raise RefusedError(f"packed_seq_params.{name} of shape {tuple(x.shape)}: must have one dimension")
    if not any(name.startswith("cu_seqlens_q") for name in given):
        raise RefusedError("packed_seq_params.cu_seqlens_q None: must be given, documents are told apart by it")
    for name, keys in given.items():
        queries = given.get(name.replace("_kv", "_q"))
        if keys is not queries and (queries is None or keys.tolist() != queries.tolist()):
            raise RefusedError(
                f"packed_seq_params.{name}: other documents than cu_seqlens_q; only self-attention is built"
            )
    return [given[name].tolist() for name in LENGTHS[:2] if name in given]


def read_packing(real: list[int], padded: list[int] | None = None, *, num_tokens: int) -> Packing:
    """:func:`packing_of` for lengths on the host.

    Raises:
        RefusedError: as there.
    """
    padded = real if padded is None else padded
    if len(real) != len(padded):
        raise RefusedError(
            f"packed_seq_params: cu_seqlens_q has {len(real)} entries, cu_seqlens_q_padded {len(padded)}"
        )
    kept = [i for i in range(1, len(padded)) if padded[i] > padded[i - 1] or real[i] > real[i - 1]]
    real = real[:1] + [real[i] for i in kept]
    bounds = padded[:1] + [padded[i] for i in kept]
    tail = num_tokens - bounds[-1]
    if tail >= BLOCK and bounds[-1] % BLOCK == 0:
        real, bounds = [*real, real[-1] + tail], [*bounds, num_tokens]
    try:
        return Packing(Documents.from_cu_seqlens(real, num_tokens, bounds), tuple(bounds))
    except ValueError as error:
        raise RefusedError(f"packed_seq_params: {error}") from error


@lru_cache(maxsize=8)
def placed_by_document(bounds: tuple[int, ...], num_tokens: int, cp_size: int) -> Placement:
    """Where Megatron (by ``thd_get_partitioned_indices``) puts the tokens: every document in zigzag by itself.

    Args:
        bounds: cumulative padded lengths of the documents, which begin at multiples of 64.
        num_tokens: of the sequence.
        cp_size: context-parallel ranks.

    Raises:
        RefusedError: if a document's length is no multiple of ``2 * cp_size``, or the documents do not fill the sequence.
    """
    lengths = [end - begin for begin, end in pairwise(bounds)]
    for length in lengths:
        if length % (2 * cp_size):
            raise RefusedError(
                f"packed_seq_params: a document of {length} tokens (with padding) on {cp_size} context-parallel ranks: "
                f"Megatron's layout needs a multiple of {2 * cp_size}"
            )
    if bounds[-1] != num_tokens:
        raise RefusedError(
            f"packed_seq_params: the documents end at token {bounds[-1]}, the sequence at {num_tokens}: Megatron's layout "
            "needs documents that fill the sequence"
        )
    unit = math.gcd(BLOCK, *(length // (2 * cp_size) for length in lengths))
    parts: list[list[Tensor]] = [[] for _ in range(cp_size)]
    for begin, length in zip(bounds, lengths, strict=False):
        chunks = torch.arange(begin // unit, (begin + length) // unit).view(2 * cp_size, -1)
        for rank in range(cp_size):
            parts[rank] += [chunks[rank], chunks[2 * cp_size - 1 - rank]]
    return Placement(unit, torch.stack([torch.cat(part) for part in parts]))
