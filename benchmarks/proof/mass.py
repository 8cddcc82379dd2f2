"""The true attention of one layer, summed over the rows of each block, and what an index keeps of it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mtraining import VerticalSlashIndex
from megatron_mtraining.config import BLOCK

ROWS = 4  # row blocks that are worked off at a time


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """fp32 ``[heads, seq, dim]`` from ``[1, seq, kv_heads, dim]``."""
    return x[0].float().permute(1, 0, 2).repeat_interleave(heads // x.shape[2], 0)


def attention_rows(q: Tensor, k: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Causal softmax attention of some rows, fp32 ``[heads, rows, seq]``.

    Args:
        q: ``[1, seq, heads, dim]``.
        k: ``[1, seq, kv_heads, dim]``.
        rows: int64 ``[rows]``, their positions.
        scale: softmax scale.
    """
    heads, seq = q.shape[2], q.shape[1]
    queries, keys = expand_heads(q[:, rows], heads), expand_heads(k, heads)
    future = torch.arange(seq, device=q.device)[None, :] > rows[:, None]
    return (queries @ keys.transpose(1, 2) * scale).masked_fill_(future, float("-inf")).softmax(-1)


def block_row_mass(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """fp32 ``[heads, n, seq]``: attention of each row block's rows, summed, by key position; ``seq`` a multiple of 64."""
    seq = q.shape[1]
    table = torch.empty(q.shape[2], seq // BLOCK, seq, device=q.device)
    for first in range(0, seq // BLOCK, ROWS):
        last = min(first + ROWS, seq // BLOCK)
        rows = torch.arange(first * BLOCK, last * BLOCK, device=q.device)
        table[:, first:last] = attention_rows(q, k, rows, scale).unflatten(1, (-1, BLOCK)).sum(2)
    return table


def block_gradient_mass(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float) -> Tensor:
    """The same of ``|dL/dS|``, S the scaled scores; ``v`` like ``k``, ``dout [1, seq, heads, dim]``."""
    seq, heads = q.shape[1], q.shape[2]
    values, upstream = expand_heads(v, heads), expand_heads(dout, heads)
    table = torch.empty(heads, seq // BLOCK, seq, device=q.device)
    for first in range(0, seq // BLOCK, ROWS):
        last = min(first + ROWS, seq // BLOCK)
        rows = torch.arange(first * BLOCK, last * BLOCK, device=q.device)
        p = attention_rows(q, k, rows, scale)
        dp = upstream[:, rows] @ values.transpose(1, 2)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        table[:, first:last] = ds.abs().unflatten(1, (-1, BLOCK)).sum(2)
    return table


def kept_share(index: object, mass: Tensor) -> Tensor:
    """fp32 ``[heads]``: share of ``mass [heads, n, seq]`` that an index of one sample keeps."""
    blocks = mass.unflatten(2, (-1, BLOCK))
    by_block = blocks.sum(3)
    if not isinstance(index, VerticalSlashIndex):
        kept = index.block_bits()[0]  # type: ignore[attr-defined]
        return (by_block * kept).sum((1, 2)) / by_block.sum((1, 2))
    kept = slash_blocks(index.slash_bits()[0])
    held = (by_block * kept).sum((1, 2))
    columns = index.column_bits()[0].unflatten(1, (-1, BLOCK))
    earlier = torch.ones_like(kept[0]).tril(-1)
    by_column = torch.einsum("hijc,hjc->hij", blocks, columns.to(blocks.dtype))
    held = held + (by_column * (earlier & ~kept)).sum((1, 2))
    return held / by_block.sum((1, 2))


def slash_blocks(bits: Tensor) -> Tensor:
    """Bool ``[heads, n, n]``: the block pairs whose distance is kept; ``bits [heads, n]`` by distance."""
    block = torch.arange(bits.shape[1], device=bits.device)
    distance = block[:, None] - block[None, :]
    return bits[:, distance.clamp(min=0)] & (distance >= 0)


def densities(index: object, heads: int) -> Tensor:
    """fp64 ``[heads]``: kept pairs over those of the causal half, by head."""
    pairs, seq = index.pairs()[0], index.seq_len  # type: ignore[attr-defined]
    return pairs.double() / (seq**2 / 2)
