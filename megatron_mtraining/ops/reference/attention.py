"""Reference of the block-sparse attention operators: forward with merge, delta, backward of the slash part."""

from __future__ import annotations

import torch
from torch import Tensor

from ...config import BLOCK
from .blocks import (
    accumulator_dtype,
    block_scores,
    kept_block_pairs,
    key_blocks,
    merge_rows,
    query_blocks,
    query_rows,
    write_key_blocks,
    write_query_blocks,
)
from .columns import column_work


class OnlineSoftmax:
    """Running softmax-weighted sums of rows: maximum, sum and accumulator (the online softmax of FlashAttention)."""

    def __init__(self, rows: int, dim: int, like: Tensor) -> None:
        dtype = accumulator_dtype(like)
        self.maximum = torch.full((rows, BLOCK), float("-inf"), dtype=dtype, device=like.device)
        self.sum = torch.zeros((rows, BLOCK), dtype=dtype, device=like.device)
        self.accumulator = torch.zeros((rows, BLOCK, dim), dtype=dtype, device=like.device)

    def add(self, where: Tensor, scores: Tensor, v: Tensor) -> None:
        """Adds keys to the row blocks ``where`` (no block twice): ``scores [blocks, 64, keys]``, ``v [blocks, keys, dim]``.

        Every row of ``scores`` has at least one finite entry.
        """
        before = self.maximum[where]
        maximum = torch.maximum(before, scores.amax(-1))
        weights = scores.sub_(maximum[..., None]).exp_()
        decay = torch.exp(before - maximum)
        self.maximum[where] = maximum
        self.sum[where] = self.sum[where] * decay + weights.sum(-1)
        self.accumulator[where] = torch.baddbmm(self.accumulator[where] * decay[..., None], weights, v)

    def finish(self) -> tuple[Tensor, Tensor]:
        """``(out, lse)`` of the rows; 0 and ``-inf`` where no key was added."""
        out = self.accumulator / self.sum.masked_fill(self.sum == 0, 1.0)[..., None]
        return out, self.maximum + self.sum.log()


def attention_forward_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slash_words: Tensor,
    doc_start: Tensor,
    q_blocks: Tensor,
    kv_blocks: Tensor,
    compact_k: Tensor | None,
    compact_v: Tensor | None,
    column_list: Tensor | None,
    scale: float,
    accumulate: bool,
    arch: int,
    partial: Tensor | None,
    final: Tensor | None,
    lse: Tensor,
) -> None:
    """Attention over the kept blocks of these chunks and over compact columns, merged into ``(partial or final, lse)``."""
    batch, seq, heads, dim = q.shape
    rows = query_blocks(q)
    state = OnlineSoftmax(rows.shape[0], dim, q)
    keys, values = key_blocks(k), key_blocks(v)
    for pairs in kept_block_pairs(slash_words, doc_start, q_blocks, kv_blocks, k.shape[3], per_group_head=False):
        scores = block_scores(rows[pairs.query], keys[pairs.key], scale, pairs.distance)
        state.add(pairs.query, scores, values[pairs.key])
    if column_list is not None and compact_k is not None and compact_v is not None:
        for work in column_work(column_list, slash_words, doc_start, q_blocks):
            columns = compact_k[work.sample, work.head, work.slots].to(rows.dtype)
            weights = compact_v[work.sample, work.head, work.slots].to(rows.dtype)
            scores = (rows[work.query] @ columns.T).mul_(scale)
            state.add(work.query, scores, weights[None])
    out, new_lse = state.finish()
    if accumulate:
        assert partial is not None
        out, new_lse = merge_rows(query_blocks(partial), query_rows(lse), out, new_lse)
    lse.copy_(new_lse.view(batch, heads, seq))
    target = final if final is not None else partial
    assert target is not None
    write_query_blocks(out, target, add=False)


def attention_delta(out: Tensor, dout: Tensor) -> Tensor:
    """``rowsum(dout * out)`` as ``[batch, heads, seq]`` in the accumulation type."""
    dtype = accumulator_dtype(dout)
    return (out.to(dtype) * dout.to(dtype)).sum(-1).transpose(1, 2).contiguous()


def attention_backward_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    slash_words: Tensor,
    doc_start: Tensor,
    q_blocks: Tensor,
    kv_blocks: Tensor,
    scale: float,
    accumulate_dq: bool,
    deterministic: bool,
    arch: int,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Gradients of the kept blocks of these chunks, from the lse and delta of the whole row. Always deterministic."""
    rows, drows = query_blocks(q), query_blocks(dout)
    keys, values = key_blocks(k), key_blocks(v)
    row_lse, row_delta = query_rows(lse)[..., None], query_rows(delta)[..., None]
    grad_rows = torch.zeros_like(rows)
    grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
    for pairs in kept_block_pairs(slash_words, doc_start, q_blocks, kv_blocks, k.shape[3], per_group_head=True):
        row, drow, key = rows[pairs.query], drows[pairs.query], keys[pairs.key]
        probs = block_scores(row, key, scale, pairs.distance).sub_(row_lse[pairs.query]).exp_()
        dscores = torch.bmm(drow, values[pairs.key].transpose(1, 2)).sub_(row_delta[pairs.query])
        dscores.mul_(probs).mul_(scale)
        grad_rows[pairs.query] += torch.bmm(dscores, key)
        grad_keys[pairs.key] += torch.bmm(dscores.transpose(1, 2), row)
        grad_values[pairs.key] += torch.bmm(probs.transpose(1, 2), drow)
    write_query_blocks(grad_rows, dq, add=accumulate_dq)
    write_key_blocks(grad_keys, dk)
    write_key_blocks(grad_values, dv)
