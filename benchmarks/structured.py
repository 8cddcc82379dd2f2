"""Made-up queries and keys whose attention looks like a trained model's: a band, lines at some distances, columns.

Rotary position in the same vector of every key, weighted by frequency in the queries of each head, gives scores that depend
on the distance alone; some keys carry a vector that queries look for, which gives columns; noise stands for content.
"""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 1e6
"""Of the rotary frequencies."""
COLUMN_DIMS = 16
"""Last dimensions, of the lowest frequencies, that columns use: position hardly turns them."""


def rotary(positions: Tensor, dim: int) -> Tensor:
    """fp32 ``[seq, dim]``: the unit vector of every frequency, turned by position; frequency ``f`` in ``2 f, 2 f + 1``."""
    frequency = BASE ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angle = positions.double()[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin()), -1).flatten(1).float()


def head_weights(heads: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """What each head gives each frequency, fp32 ``[heads, dim // 2]``, summing to the score at distance 0; and what it gives
    columns, fp32 ``[heads]``. Of four heads one looks for columns, two for a band, one for some distances.
    """
    count = dim // 2 - COLUMN_DIMS // 2
    weights, columns = torch.zeros(heads, dim // 2), torch.full((heads,), 2.0)
    for head in range(heads):
        weights[head, :count] = 1.0
        total = 18 + 6 * float(torch.rand((), generator=generator))
        if head % 4 == 0:
            total, columns[head] = 5.0, total - 6
        elif head % 4 == 3:  # few frequencies: lines that come again
            weights[head, :count] = 0.02
            chosen = torch.randint(count // 3, 2 * count // 3, (3,), generator=generator)
            weights[head].index_add_(0, chosen, torch.ones(3))
        weights[head] *= total / weights[head].sum()
    return weights, columns


def structured_tensors(
    seq_len: int, heads: int, kv_heads: int, dim: int, device: str, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout ``[1, seq_len, heads, dim]``, bf16; scores are those of scale ``dim ** -0.5``."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.Generator(device).manual_seed(seed)

    def normal(count: int) -> Tensor:
        return torch.randn(1, seq_len, count, dim, device=device, generator=made)

    turned = rotary(torch.arange(seq_len, device=device), dim)[None, :, None]
    weights, strength = (x.to(device) for x in head_weights(heads, dim, generator))
    weights = weights.repeat_interleave(2, 1)
    # A key's vector and a query's share the factor that the softmax scale takes away.
    size = dim**0.25
    q = 0.8 * normal(heads) + size * turned * weights
    k = 0.8 * normal(kv_heads) + size * turned
    columns = torch.rand(seq_len, generator=generator) < 0.002
    columns[:4] = True
    q[..., -COLUMN_DIMS:] = size * (strength[:, None] / COLUMN_DIMS) + 0.2 * q[..., -COLUMN_DIMS:]
    k[..., -COLUMN_DIMS:] = (
        size * columns.to(device).float()[:, None, None] + 0.2 * normal(kv_heads)[..., -COLUMN_DIMS:]
    )
    return tuple(x.bfloat16() for x in (q, k, normal(kv_heads), normal(heads)))  # type: ignore[return-value]
