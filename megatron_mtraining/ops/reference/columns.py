"""Reference of the operators on vertical lines: listing, gathering and scattering columns, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...bitmap import unpack_bits
from ...config import BLOCK
from .blocks import accumulator_dtype, local_block_table, query_blocks, query_rows, write_query_blocks


def list_columns(column_words: Tensor, blocks: Tensor, capacity: int, first: int) -> tuple[Tensor, Tensor]:
    """Kept positions of the given global blocks, slots ``first ... first + capacity - 1``; -1 beyond the count."""
    bits = unpack_bits(column_words[..., blocks.long()], blocks.numel() * BLOCK)
    positions = (blocks.long()[:, None] * BLOCK + torch.arange(BLOCK, device=blocks.device)).flatten()
    slot = bits.cumsum(-1) - 1 - first
    # Positions that are not listed go to one more slot, which is cut off.
    slot = torch.where(bits & (slot >= 0), slot.clamp(max=capacity), capacity)
    listed = torch.full((*bits.shape[:2], capacity + 1), -1, dtype=torch.int32, device=bits.device)
    listed.scatter_(-1, slot, positions.to(torch.int32).expand_as(slot))
    count = (bits.sum(-1) - first).clamp(0, capacity).to(torch.int32)
    return listed[..., :capacity].contiguous(), count


def _rows_in_chunks(column_list: Tensor, kv_blocks: Tensor) -> Tensor:
    """int64, shape of ``column_list``: token row among the flattened chunks, -1 for columns that are not there."""
    column = column_list.clamp(min=0).long()
    num_blocks = int(max(int(kv_blocks.max()) if kv_blocks.numel() else 0, int(column.max()) // BLOCK)) + 1
    block = local_block_table(kv_blocks, num_blocks)[column // BLOCK]
    return torch.where((column_list >= 0) & (block >= 0), block * BLOCK + column % BLOCK, -1)


def gather_columns_(
    k: Tensor, v: Tensor, kv_blocks: Tensor, column_list: Tensor, compact_k: Tensor, compact_v: Tensor
) -> None:
    """Fills the slots of ``compact_k``, ``compact_v`` whose column lies in these chunks; leaves the others."""
    if not column_list.numel() or not kv_blocks.numel():
        return
    row = _rows_in_chunks(column_list, kv_blocks)
    group = column_list.shape[1] // k.shape[3]
    sample, head, slot = (row >= 0).nonzero(as_tuple=True)
    row = row[sample, head, slot]
    seq = k.shape[2]
    for x, compact in ((k, compact_k), (v, compact_v)):
        compact[sample, head, slot] = x[row // seq, sample, row % seq, head // group]


def scatter_columns_(
    d_compact_k: Tensor, d_compact_v: Tensor, column_list: Tensor, kv_blocks: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Adds the gradients of the columns that lie in these chunks to ``dk``, ``dv``, query heads of a group in order."""
    if not column_list.numel() or not kv_blocks.numel():
        return
    rows = _rows_in_chunks(column_list, kv_blocks)
    heads = column_list.shape[1]
    group, seq = heads // dk.shape[3], dk.shape[2]
    for member in range(group):
        # One query head per key head: no row of dk occurs twice, so plain indexing adds.
        row = rows[:, member::group]
        sample, kv_head, slot = (row >= 0).nonzero(as_tuple=True)
        row = row[sample, kv_head, slot]
        for d_compact, grad in ((d_compact_k, dk), (d_compact_v, dv)):
            grad[row // seq, sample, row % seq, kv_head] += d_compact[sample, kv_head * group + member, slot]


@dataclass(frozen=True)
class ColumnWork:
    """One row block of one head and the compact slots that it attends."""

    sample: int
    head: int
    query: Tensor
    slots: Tensor


def column_work(column_list: Tensor, slash_words: Tensor, doc_start: Tensor, q_blocks: Tensor) -> Iterator[ColumnWork]:
    """The kept (row block, columns) of every head; ``query`` is the flat index of the row block, shape ``[1]``."""
    batch, heads, capacity = column_list.shape
    if not capacity:
        return
    num_blocks, lq = doc_start.numel(), q_blocks.numel()
    bits = unpack_bits(slash_words, num_blocks)
    rows, starts = q_blocks.long(), doc_start.long()
    column_block = column_list.clamp(min=0).long() // BLOCK
    column_start = starts[column_block]
    for local, row in enumerate(rows.tolist()):
        start = int(starts[row])
        if slash_words.dim() == 4:
            covered = bits[:, :, local].gather(-1, column_block)
        else:
            covered = bits.gather(-1, (start + row - column_block).clamp(0, num_blocks - 1))
        kept = (column_list >= 0) & (column_block < row) & (column_start == start) & ~covered
        for sample in range(batch):
            for head in range(heads):
                slots = kept[sample, head].nonzero().flatten()
                if slots.numel():
                    flat = torch.tensor([(sample * heads + head) * lq + local], device=rows.device)
                    yield ColumnWork(sample, head, flat, slots)


def vertical_backward_(
    q: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    compact_k: Tensor,
    compact_v: Tensor,
    column_list: Tensor,
    slash_words: Tensor,
    doc_start: Tensor,
    q_blocks: Tensor,
    scale: float,
    accumulate_dq: bool,
    deterministic: bool,
    arch: int,
    dq: Tensor,
    d_compact_k: Tensor,
    d_compact_v: Tensor,
) -> None:
    """Gradients of the compact columns, from the lse and delta of the whole row. Always deterministic."""
    dtype = accumulator_dtype(q)
    rows, drows = query_blocks(q), query_blocks(dout)
    row_lse, row_delta = query_rows(lse)[..., None], query_rows(delta)[..., None]
    grad_rows = torch.zeros_like(rows)
    d_compact_k.zero_()
    d_compact_v.zero_()
    for work in column_work(column_list, slash_words, doc_start, q_blocks):
        columns = compact_k[work.sample, work.head, work.slots].to(dtype)
        values = compact_v[work.sample, work.head, work.slots].to(dtype)
        row, drow = rows[work.query][0], drows[work.query][0]
        probs = (row @ columns.T).mul_(scale).sub_(row_lse[work.query][0]).exp_()
        dscores = (drow @ values.T).sub_(row_delta[work.query][0]).mul_(probs).mul_(scale)
        grad_rows[work.query] += dscores @ columns
        d_compact_k[work.sample, work.head, work.slots] += dscores.T @ row
        d_compact_v[work.sample, work.head, work.slots] += probs.T @ drow
    write_query_blocks(grad_rows, dq, add=accumulate_dq)
