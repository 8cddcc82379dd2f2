"""What the reference operators share: block views, the pairs of blocks that an index keeps, the merge of partial results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...bitmap import unpack_bits
from ...config import BLOCK

PAIRS_PER_SLAB = 512
"""Block pairs worked off at a time: bounds the temporaries to a few tens of MB."""


def accumulator_dtype(x: Tensor) -> torch.dtype:
    """fp64 for fp64 inputs, otherwise fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def query_blocks(x: Tensor) -> Tensor:
    """``[batch, blocks * 64, heads, dim]`` -> ``[batch * heads * blocks, 64, dim]`` in the accumulation type."""
    return x.to(accumulator_dtype(x)).unflatten(1, (-1, BLOCK)).permute(0, 3, 1, 2, 4).flatten(0, 2).contiguous()


def query_rows(x: Tensor) -> Tensor:
    """``[batch, heads, blocks * 64]`` -> ``[batch * heads * blocks, 64]``."""
    return x.unflatten(2, (-1, BLOCK)).flatten(0, 2).contiguous()


def key_blocks(x: Tensor) -> Tensor:
    """``[chunks, batch, blocks * 64, heads, dim]`` -> ``[batch * heads * chunks * blocks, 64, dim]``, accumulation type."""
    return x.to(accumulator_dtype(x)).unflatten(2, (-1, BLOCK)).permute(1, 4, 0, 2, 3, 5).flatten(0, 3).contiguous()


def write_query_blocks(blocks: Tensor, out: Tensor, add: bool) -> None:
    """Writes (or adds) the blocks of :func:`query_blocks` to ``out [batch, blocks * 64, heads, dim]``, rounding once."""
    batch, seq, heads, _ = out.shape
    rows = blocks.unflatten(0, (batch, heads, seq // BLOCK)).permute(0, 2, 3, 1, 4).flatten(1, 2)
    out.add_(rows) if add else out.copy_(rows)


def write_key_blocks(blocks: Tensor, out: Tensor) -> None:
    """Writes the blocks of :func:`key_blocks` to ``out [chunks, batch, blocks * 64, heads, dim]``."""
    chunks, batch, seq, heads, _ = out.shape
    out.copy_(blocks.unflatten(0, (batch, heads, chunks, seq // BLOCK)).permute(2, 0, 3, 4, 1, 5).flatten(2, 3))


def local_block_table(kv_blocks: Tensor, num_blocks: int) -> Tensor:
    """int64 ``[num_blocks]``: where a global block lies among the flattened ``kv_blocks``, -1 where it does not."""
    table = torch.full((num_blocks,), -1, dtype=torch.int64, device=kv_blocks.device)
    flat = kv_blocks.flatten().long()
    table[flat] = torch.arange(flat.numel(), device=kv_blocks.device)
    return table


@dataclass(frozen=True)
class BlockPairs:
    """Pairs of one distance: flat indices into the query blocks and into the key blocks, no index twice."""

    distance: int
    query: Tensor
    key: Tensor


def kept_block_pairs(
    slash_words: Tensor, doc_start: Tensor, q_blocks: Tensor, kv_blocks: Tensor, kv_heads: int, per_group_head: bool
) -> Iterator[BlockPairs]:
    """The kept block pairs between ``q_blocks [Lq]`` and ``kv_blocks [C, Lk]``, distance by distance.

    ``slash_words`` are lines (3-D) or row lists (4-D: ``[batch, heads, Lq, words]``, bit ``j``: global key block ``j``).
    Within one item every query block occurs at most once; with ``per_group_head`` also every key block (one query head of
    each group at a time), so that gradients can be accumulated by plain indexing, in a fixed order.
    """
    batch, heads = slash_words.shape[:2]
    num_blocks, kv_count = doc_start.numel(), kv_blocks.numel()
    if not kv_count or not q_blocks.numel():
        return
    group = heads // kv_heads
    bits = unpack_bits(slash_words, num_blocks).flatten(0, 1)
    rows = q_blocks.long()
    start = doc_start.long()[rows]
    where = local_block_table(kv_blocks, num_blocks)
    head = torch.arange(batch * heads, device=bits.device)
    kv_base = (head // heads * kv_heads + head % heads // group) * kv_count
    subsets = [head[g::group] for g in range(group)] if per_group_head else [head]
    for distance in range(int((rows - start).max()) + 1):
        local = where[(rows - distance).clamp(min=0)]
        reach = ((rows - distance >= start) & (local >= 0)).nonzero().flatten()
        if not reach.numel():
            continue
        for subset in subsets:
            if slash_words.dim() == 4:
                kept = bits[subset[:, None], reach[None, :], (rows[reach] - distance)[None, :]].nonzero()
            else:
                kept = bits[subset[:, None], (start[reach] + distance)[None, :]].nonzero()
            which, row = subset[kept[:, 0]], reach[kept[:, 1]]
            for part in range(0, which.numel(), PAIRS_PER_SLAB):
                h, r = which[part : part + PAIRS_PER_SLAB], row[part : part + PAIRS_PER_SLAB]
                yield BlockPairs(distance, h * rows.numel() + r, kv_base[h] + local[r])


def block_scores(q: Tensor, k: Tensor, scale: float, distance: int) -> Tensor:
    """Scaled scores of pairs of blocks ``[pairs, 64, dim]``; on the diagonal the future is ``-inf``."""
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    if distance == 0:
        future = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(future, float("-inf"))
    return scores


def merge_rows(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two partial attention results over disjoint keys.

    Args:
        out_a, out_b: ``[..., dim]``; 0 where the lse is ``-inf``.
        lse_a, lse_b: ``[...]``, natural log; ``-inf`` for a row without keys.

    Returns:
        The merged ``(out, lse)``. Gaps of any size between the two lse are safe: both weights are at most 1.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    empty = lse == float("-inf")
    weight_a = torch.exp(lse_a - lse).masked_fill_(empty, 0.0)
    weight_b = torch.exp(lse_b - lse).masked_fill_(empty, 0.0)
    return out_a * weight_a[..., None] + out_b * weight_b[..., None], lse
