"""XAttention's antidiagonal scoring (arXiv 2503.16428): blocks are ranked by sampled antidiagonals of the scores.

Every ``stride`` queries and keys are laid side by side, the queries in reverse, so that one product sums the scores along an
antidiagonal of a ``stride x stride`` tile. The softmax of these sums, added up by block, is a block's mass; each row keeps
its heaviest blocks up to ``top_p`` of its mass (the original's threshold), its own and the document's first in any case.
Deviations: blocks of 64 instead of 128 tokens; fp64 sums, so that ranks and layouts agree.

Every rank needs all keys: they are gathered once per call, ``seq_len * kv_heads * head_dim`` in the dtype of k.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from ..block_lists import BlockListIndex
from ..budget import MASS_UNIT_BITS
from ..comm import Collective
from ..config import BLOCK
from .estimation import Estimation
from .rows import RowTables, gather_blocks, rounded, row_lists, row_slabs, tables_of, without_padding
from .select import row_top_p


def xattention_steps(call: Estimation) -> Generator[Collective, Tensor, BlockListIndex]:
    """The row lists of a rank; one collective, the keys."""
    tables = tables_of(call)
    batch, seq, heads, _ = call.q.shape
    stride, kv_heads = call.config.xattention_stride, call.k.shape[2]
    keys = yield from gather_blocks(without_padding(call.k, tables).unflatten(1, (-1, BLOCK)), call.layout)
    queries = without_padding(call.q, tables)
    kept = torch.empty((batch, heads, seq // BLOCK, keys.shape[1]), dtype=torch.bool, device=call.device)
    group = heads // kv_heads
    for sample in range(batch):
        for kv_head in range(kv_heads):
            mine = slice(kv_head * group, (kv_head + 1) * group)
            side = keys[sample, :, :, kv_head].double().reshape(-1, stride * keys.shape[-1])
            lines = queries[sample, :, mine].transpose(0, 1).unflatten(1, (-1, stride)).flip(2).flatten(2)
            kept[sample, mine] = _choose(call, tables, lines, side)
    return row_lists(call, kept, tables)


def _choose(call: Estimation, tables: RowTables, queries: Tensor, keys: Tensor) -> Tensor:
    """Bool ``[group, rows, n]`` of the heads that share a key head.

    Args:
        call: the call.
        tables: its tables.
        queries: ``[group, rows * 64 / stride, stride * dim]``.
        keys: fp64 ``[n * 64 / stride, stride * dim]``.
    """
    stride, share = call.config.xattention_stride, call.config.slash_share
    lines = BLOCK // stride
    group, rows, blocks = queries.shape[0], tables.blocks.numel(), tables.real.numel()
    kept = torch.zeros((group, rows, blocks), dtype=torch.bool, device=call.device)
    if share == 1:
        return kept.fill_(True)
    for slab in row_slabs(rows, group * lines * keys.shape[0]):
        # Blocks ascend in every layout: nothing beyond the slab's last row is reached. Known on the host.
        end = call.row_blocks[slab.stop - 1] + 1
        slab_lines = slice(slab.start * lines, slab.stop * lines)
        score = torch.matmul(queries[:, slab_lines].double(), keys[: end * lines].T)
        score = rounded(score.mul_(call.scale / stride))
        score.masked_fill_(~_reach(tables, slab, end, stride), float("-inf"))
        mass = score.softmax(-1).view(group, -1, lines, end, lines).sum((2, 4))
        units = mass.mul_(2.0**MASS_UNIT_BITS).round_().to(torch.int64)
        kept[:, slab, :end] = row_top_p(units, tables.forced[slab, :end], share)
    return kept


def _reach(tables: RowTables, slab: slice, end: int, stride: int) -> Tensor:
    """Bool ``[slab rows * lines, end * lines]``: which antidiagonals a strided row sees, its own among them."""
    lines = BLOCK // stride
    inside = torch.arange(lines, device=tables.blocks.device)
    blocks = tables.blocks[slab]
    row = (blocks[:, None] * lines + inside).flatten()[:, None]
    column = torch.arange(end * lines, device=row.device)[None, :]
    start = tables.doc_start[blocks].repeat_interleave(lines)[:, None] * lines
    full = (inside[None, :] * stride < tables.real[:end, None]).flatten()[None, :]
    return ((column <= row) & (column >= start) & full) | (column == row)
