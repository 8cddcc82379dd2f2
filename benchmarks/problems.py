"""Problems of the operator benchmark: random tensors and an index of a wanted density."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mtraining import VerticalSlashIndex
from megatron_mtraining.config import BLOCK

SLASH_SHARE = 0.03
"""Share of the distances that the reference pattern keeps."""
COLUMN_SHARE = 0.0125
"""Share of the positions that the reference pattern keeps as columns."""


@dataclass(frozen=True)
class Problem:
    """One shape: bf16, batch 1.

    Attributes:
        density: wanted density; ``None`` for the reference pattern (3% of the distances, 1.25% of the columns).
    """

    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    density: float | None = None

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, dout ``[1, seq_len, heads, head_dim]`` on the GPU."""
        shapes = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        q, k, v, dout = (
            torch.randn(1, self.seq_len, h, self.head_dim, device="cuda", dtype=torch.bfloat16) for h in shapes
        )
        return q, k, v, dout

    def index(self) -> VerticalSlashIndex:
        """The kept lines: half of the distances are the nearest, the rest lie in runs of 1 to 4; columns at random."""
        if self.density is None:
            return pattern(self, SLASH_SHARE, COLUMN_SHARE)
        if self.density >= 1:
            return pattern(self, 1.0, 0.0)
        low, high = 0.0, 20.0  # multiples of the reference pattern
        for _ in range(12):
            middle = (low + high) / 2
            found = float(pattern(self, SLASH_SHARE * middle, COLUMN_SHARE * middle).density())
            low, high = (middle, high) if found < self.density else (low, middle)
        return pattern(self, SLASH_SHARE * high, COLUMN_SHARE * high)


def pattern(problem: Problem, slash_share: float, column_share: float) -> VerticalSlashIndex:
    """The index with these shares of the distances and of the positions, with the same random numbers every time."""
    generator = random.Random(0)
    blocks = problem.seq_len // BLOCK
    slash, columns = [], []
    for _ in range(problem.heads):
        count = min(max(2, round(slash_share * blocks)), blocks)
        kept = set(range((count + 1) // 2)) if count < blocks else set(range(blocks))
        while len(kept) < count:
            start = generator.randrange(blocks)
            kept.update(range(start, min(start + generator.randint(1, 4), blocks)))
        slash.append(sorted(kept)[:blocks])
        columns.append(generator.sample(range(problem.seq_len), round(column_share * problem.seq_len)))
    return VerticalSlashIndex.from_lines([slash], [columns], seq_len=problem.seq_len, device="cuda")
