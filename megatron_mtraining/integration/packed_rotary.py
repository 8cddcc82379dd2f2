"""The rotary embedding of packed sequences that are dealt in the attention's layout.

Megatron takes every document of a packed sequence to be dealt in zigzag by itself, and reads its length on the host in
every layer. The functions here read the layout instead, and do not wait for the device.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from . import runtime

ROPE = "megatron.core.models.common.embeddings.rope_utils"
PACKED_ROTARY = (ROPE, "_apply_rotary_pos_emb_thd")
FUSED_PACKED_ROTARY = (ROPE, "fused_apply_rotary_pos_emb_thd")


def positions_in_documents(token_position: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Positions within their documents, and where those begin, without waiting for the device.

    Args:
        token_position: int64 ``[tokens]``, positions in the packed sequence.
        cu_seqlens: ``[documents + 1]``, cumulative padded lengths; tokens past the last count from its end.

    Returns:
        Two int64 tensors ``[tokens]``.
    """
    cu_seqlens = cu_seqlens.long()
    begin = cu_seqlens[torch.searchsorted(cu_seqlens, token_position, right=True) - 1]
    return token_position - begin, begin


_in_documents: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Positions within documents by the tensor of cumulative lengths: every layer asks for the same, twice."""


def packed_angles(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_group: Any, max_seqlen: int | None) -> Tensor:
    """The rotary angles of this rank's tokens of a packed sequence; does not wait for the device.

    Args:
        t: ``[tokens, heads, head_dim]``, queries or keys in the attention's layout.
        cu_seqlens: ``[documents + 1]``, cumulative lengths with padding.
        freqs: ``[positions, 1, 1, dim]``: of the positions of a document, or of those of the whole sequence.
        cp_group: the context-parallel group.
        max_seqlen: length of the longest document, where Megatron says it: more angles are those of the whole sequence.

    Returns:
        ``[tokens, 1, 1, dim]``.
    """
    state = runtime.current()
    cp_size = cp_group.size()
    seq_len = t.shape[0] * cp_size
    layout = state.attention_layout(seq_len, cp_size) if cp_size > 1 else runtime.one_rank_layout(seq_len)
    holds_for = (cu_seqlens._version, layout, cp_group.rank())
    remembered = _in_documents.get(cu_seqlens)
    if remembered is None or remembered[0] != holds_for:
        position = layout.token_position(cp_group.rank()).to(cu_seqlens.device, non_blocking=True)
        remembered = (holds_for, positions_in_documents(position, cu_seqlens))
        _in_documents[cu_seqlens] = remembered
    position, begin = remembered[1]
    state.dealt["rotary"].add(seq_len)
    of_whole_sequence = freqs.shape[0] == seq_len if max_seqlen is None else freqs.shape[0] > max_seqlen
    if of_whole_sequence:
        position = position + begin
    # As in Megatron: padding past the longest document has no angle of its own, and no effect.
    return freqs[position.clamp(max=freqs.shape[0] - 1)]


def rotate_packed(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    *,
    cp_group: torch.distributed.ProcessGroup,
    max_seqlen: int | None = None,
    multi_latent_attention: bool | None = None,
    **how: Any,
) -> Tensor:
    """Replaces Megatron's ``_apply_rotary_pos_emb_thd``, which takes documents to be dealt in zigzag, one by one.

    Args:
        t, cu_seqlens, freqs, cp_group, max_seqlen: see :func:`packed_angles`.
        multi_latent_attention: the old name of ``mla_rotary_interleaved``.
        how: passed on to Megatron's rotation of plain sequences.

    Returns:
        ``t`` rotated.
    """
    rope = importlib.import_module(ROPE)
    if multi_latent_attention is not None:
        how["mla_rotary_interleaved"] = multi_latent_attention
    angles = packed_angles(t, cu_seqlens, freqs, cp_group, max_seqlen)
    rotated: Tensor = rope._apply_rotary_pos_emb_bshd(t.unsqueeze(1), angles, **how).squeeze(1)
    return rotated


def rotate_packed_fused(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
) -> Tensor:
    """Replaces Transformer Engine's fused rotation of packed sequences by its fused rotation of plain ones.

    Args:
        t, cu_seqlens, freqs: see :func:`packed_angles`.
        cp_size, cp_rank: context-parallel ranks and this one.
        interleaved: whether pairs of neighbours are rotated.
    """
    rope = importlib.import_module(ROPE)
    # The fused rotation counts positions from the documents' starts, however many angles it is given.
    angles = packed_angles(t, cu_seqlens, freqs, _Place(cp_rank, cp_size), max_seqlen=freqs.shape[0])
    rotated: Tensor = rope.fused_apply_rotary_pos_emb(t.unsqueeze(1), angles, interleaved=interleaved).squeeze(1)
    return rotated


class _Place:
    """A rank and a number of ranks, where Megatron gives no group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size
