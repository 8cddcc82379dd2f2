"""What the policies share that choose key blocks row by row: pooling, the reach of a row, and the finished row lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..block_lists import BlockListIndex, pack_rows
from ..comm import AllGather
from ..config import BLOCK, MTrainingConfig
from ..documents import Documents
from ..layout import Layout
from .estimation import Estimation, Steps

SCORE_UNIT = 2.0**24
"""Scores are rounded to its inverse, so that another order of summation does not choose other blocks."""

SLAB_ENTRIES = 1 << 24
"""Most scores that a policy holds at a time (128 MiB in fp64)."""


@dataclass(frozen=True)
class RowTables:
    """Tables of one rank's rows, on the device.

    Attributes:
        blocks: int64 ``[rows]``, global block of each row.
        doc_start: int64 ``[n]``, first block of each block's document.
        real: int64 ``[n]``, real (non-padding) tokens of each block.
        reach: bool ``[rows, n]``: key blocks of the row's document up to its own.
        forced: bool ``[rows, n]``: the part of the reach that is always kept.
        padded: whether some block is not full.
    """

    blocks: Tensor
    doc_start: Tensor
    real: Tensor
    reach: Tensor
    forced: Tensor
    padded: bool


@lru_cache(maxsize=32)
def row_tables(
    documents: Documents, layout: Layout, cp_rank: int, config: MTrainingConfig, device: torch.device
) -> RowTables:
    """The tables, made once per (documents, layout, config, device).

    The own block, ``local_blocks`` distances and the blocks of ``sink_tokens`` are forced; XAttention and FlexPrefill
    always keep a document's first block too.
    """
    rows, block = layout.block_position[cp_rank].long(), torch.arange(documents.num_blocks)
    start = documents.doc_start.long()
    real = torch.zeros(documents.num_blocks, dtype=torch.int64)
    for first, span, length in zip(documents.starts, documents.spans, documents.lengths, strict=True):
        real[first : first + span] = (length - BLOCK * torch.arange(span)).clamp(0, BLOCK)
    sinks = -(-config.sink_tokens // BLOCK)
    if config.index_policy in ("xattention", "flexprefill"):
        sinks = max(sinks, 1)
    distance = rows[:, None] - block[None, :]
    reach = (distance >= 0) & (block[None, :] >= start[rows][:, None])
    forced = reach & ((distance < config.local_blocks) | ((block - start)[None, :] < sinks))
    rows, start, real, reach, forced = (x.to(device) for x in (rows, start, real, reach, forced))
    return RowTables(rows, start, real, reach, forced, padded=sum(documents.lengths) < documents.num_blocks * BLOCK)


def tables_of(call: Estimation) -> RowTables:
    """The tables of a call."""
    return row_tables(call.documents, call.layout, call.cp_rank, call.config, call.device)


def without_padding(x: Tensor, tables: RowTables) -> Tensor:
    """``x [batch, rows * 64, ...]`` of this rank with zeros in place of padding tokens."""
    if not tables.padded:
        return x
    inside = torch.arange(BLOCK, device=x.device)
    real = (inside[None, :] < tables.real[tables.blocks][:, None]).flatten()
    return torch.where(real[None, :, None, None], x, 0)


def block_sums(x: Tensor, tables: RowTables) -> Tensor:
    """fp64 ``[batch, rows, heads, dim]``: sums over the real tokens of each block of ``x [batch, rows * 64, heads, dim]``."""
    blocks = without_padding(x, tables).unflatten(1, (-1, BLOCK))
    batch, rows, _, heads, dim = blocks.shape
    sums = torch.empty((batch, rows, heads, dim), dtype=torch.float64, device=x.device)
    # A part of the rows at a time: on CUDA the sum makes a copy of its input in fp64.
    for slab in row_slabs(rows, batch * BLOCK * heads * dim):
        sums[:, slab] = blocks[:, slab].sum(2, dtype=torch.float64)
    return sums


def block_means(x: Tensor, tables: RowTables) -> Tensor:
    """:func:`block_sums` over the number of real tokens; 0 for a block of padding."""
    return block_sums(x, tables) / tables.real[tables.blocks].clamp(min=1)[None, :, None, None]


def gather_blocks(x: Tensor, layout: Layout) -> Steps:
    """``[batch, local_blocks, ...]`` of all ranks as ``[batch, n, ...]`` in the order of the sequence."""
    gathered = yield AllGather(x)
    whole = gathered.transpose(0, 1).flatten(1, 2)
    return whole if layout.cp_size == 1 else whole[:, layout.inverse(x.device).long()]


def rounded(score: Tensor) -> Tensor:
    """``score`` rounded in place to multiples of 2**-24; a NaN (a model that has diverged) counts as 0."""
    return score.mul_(SCORE_UNIT).round_().div_(SCORE_UNIT).nan_to_num_(0.0)


def row_slabs(rows: int, entries_per_row: int) -> Iterator[slice]:
    """Slices of rows with at most ``SLAB_ENTRIES`` entries (at least one row)."""
    size = max(1, SLAB_ENTRIES // max(entries_per_row, 1))
    for first in range(0, rows, size):
        yield slice(first, min(first + size, rows))


def pooled_scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Scores of ``queries [batch, rows, heads, dim]`` and ``keys [batch, keys, kv_heads, dim]``, both fp64.

    Returns:
        fp64 ``[batch, heads, rows, keys]``.
    """
    batch, rows, heads, dim = queries.shape
    kv_heads = keys.shape[2]
    grouped = (
        queries.unflatten(2, (kv_heads, heads // kv_heads)).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)
    )
    score = torch.matmul(grouped, keys.permute(0, 2, 3, 1)).mul_(scale)
    return rounded(score).view(batch, heads, rows, -1)


def row_lists(call: Estimation, kept: Tensor, tables: RowTables) -> BlockListIndex:
    """The rank's index from bool ``[batch, heads, rows, n]``, with the forced blocks; may change ``kept``."""
    kept &= tables.reach
    kept |= tables.forced
    return BlockListIndex(pack_rows(kept), call.row_blocks, call.documents)
