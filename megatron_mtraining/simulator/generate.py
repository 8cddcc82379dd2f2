"""Made-up indices of a wanted density: near distances, runs of distances further off, and vertical lines.

Heads of trained models keep mostly that (paper, section 2): a band along the diagonal, stripes at some distances, and some
columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..config import BLOCK
from .work import IndexProfile


@dataclass(frozen=True)
class Pattern:
    """How lines are drawn, for every head anew.

    Attributes:
        density: pairs over those of the causal half matrix.
        vertical: share of the key positions that are kept as columns.
        band: share of the kept distances that are the nearest ones; the rest are runs.
        longest_run: a run has 1 to this many consecutive distances.
        spread: standard deviation of the logarithm of a head's density; 0: all heads alike.
    """

    density: float = 0.05
    vertical: float = 0.005
    band: float = 0.5
    longest_run: int = 4
    spread: float = 0.0

    def __post_init__(self) -> None:
        for name, low, high in (("density", 0, 1), ("vertical", 0, 1), ("band", 0, 1), ("spread", 0, 3)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name}={getattr(self, name)}: must be from {low} to {high}")
        if self.longest_run < 1:
            raise ValueError(f"longest_run={self.longest_run}: must be at least 1")


def make_profile(pattern: Pattern, seq_len: int, heads: int, seed: int = 0) -> IndexProfile:
    """Draws the lines of ``heads`` heads: the columns, and as many distances as reach the density.

    Raises:
        ValueError: if the columns alone exceed the density.
    """
    random = np.random.default_rng(seed)
    blocks = seq_len // BLOCK
    slash = np.zeros((heads, blocks), np.int64)
    columns = random.binomial(BLOCK, pattern.vertical, (heads, blocks))
    for head in range(heads):
        density = min(pattern.density * float(np.exp(random.normal(0, pattern.spread))), 1.0)
        left = density - pattern.vertical * (1 - density)
        if left <= 0:
            raise ValueError(f"vertical={pattern.vertical}: these columns alone exceed density={pattern.density}")
        slash[head] = _distances(pattern, blocks, left * blocks**2 / 2, random)
    return IndexProfile(seq_len, slash, columns)


def _distances(pattern: Pattern, blocks: int, pairs: float, random: np.random.Generator) -> np.ndarray:
    """Distances that make up about ``pairs`` block pairs: a share of them from 0 on, the others in runs."""
    kept = np.zeros(blocks, np.int64)
    kept[0] = 1
    rows = blocks - np.arange(blocks)
    # Lines in all, if half of them cover all rows and half of them, on average, half the rows.
    lines = pairs / blocks / (pattern.band + (1 - pattern.band) / 2)
    kept[: max(1, min(round(lines * pattern.band), blocks))] = 1
    missing = pairs - float((kept * rows).sum())
    while missing > 0:
        first = int(random.integers(0, blocks))
        run = np.arange(first, min(first + int(random.integers(1, pattern.longest_run + 1)), blocks))
        missing -= float((rows[run] * (1 - kept[run])).sum())
        kept[run] = 1
    return kept
