"""Problems of the operator benchmark: random tensors and an index of a wanted density."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megatron_mtraining import VerticalSlashIndex
from megatron_mtraining.config import BLOCK

SLASH_SHARE = 0.03
"""Share of the distances that the reference pattern keeps."""
COLUMN_SHARE = 0.0125
"""Share of the positions that the reference pattern keeps as columns."""

CountAndIndex = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """One shape: bf16, batch 1.

    Attributes:
        density: wanted density; ``None`` for the reference pattern (3% of the distances, 1.25% of the columns).
        device: where tensors and index are made.
    """

    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    density: float | None = None
    device: str = "cuda"

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, dout ``[1, seq_len, heads, head_dim]``."""
        shapes = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        q, k, v, dout = (
            torch.randn(1, self.seq_len, h, self.head_dim, device=self.device, dtype=torch.bfloat16) for h in shapes
        )
        return q, k, v, dout

    def index(self) -> VerticalSlashIndex:
        """The kept lines: half of the distances are the nearest, the rest lie in runs of 1 to 4; columns at random."""
        if self.density is None:
            return self._pattern(1.0)
        if self.density >= 1:
            return VerticalSlashIndex.from_lines(
                [[range(self.seq_len // BLOCK)] * self.heads],
                [[[]] * self.heads],
                seq_len=self.seq_len,
                device=self.device,
            )
        low, high = 0.0, 1 / SLASH_SHARE  # multiples of the reference pattern
        for _ in range(16):
            middle = (low + high) / 2
            low, high = (middle, high) if self._expected_density(middle) < self.density else (low, middle)
        return self._pattern(high)

    def _pattern(self, multiple: float) -> VerticalSlashIndex:
        """The reference pattern with this many times its lines, with the same random numbers every time."""
        generator = random.Random(0)
        slash, columns = [], []
        for _ in range(self.heads):
            slash.append(self._distances(multiple, generator))
            columns.append(generator.sample(range(self.seq_len), self._columns(multiple)))
        return VerticalSlashIndex.from_lines([slash], [columns], seq_len=self.seq_len, device=self.device)

    def _columns(self, multiple: float) -> int:
        return min(round(COLUMN_SHARE * multiple * self.seq_len), self.seq_len)

    def _distances(self, multiple: float, generator: random.Random) -> list[int]:
        blocks = self.seq_len // BLOCK
        count = min(max(2, round(SLASH_SHARE * multiple * blocks)), blocks)
        kept = set(range((count + 1) // 2))
        while len(kept) < count:
            start = generator.randrange(blocks)
            kept.update(range(start, min(start + generator.randint(1, 4), blocks)))
        return sorted(kept)[:count]

    def _expected_density(self, multiple: float) -> float:
        """Density of one head's distances with as many columns, averaged over where these lie."""
        blocks = self.seq_len // BLOCK
        kept = set(self._distances(multiple, random.Random(0)))
        slash = sum(blocks - distance for distance in kept)
        # A column in block c meets the blocks - 1 - c later rows, without those at a kept distance.
        covered = list(accumulate(int(distance in kept) for distance in range(1, blocks)))
        later = sum(reach - covered[reach - 1] for reach in range(1, blocks))
        columns = self._columns(multiple) / blocks * later
        return (BLOCK * BLOCK * slash + BLOCK * columns) / (self.seq_len**2 / 2)


@dataclass(frozen=True)
class BlockLists:
    """Which blocks of ``block`` tokens hold a slash block of an index: what kernels with such tiles have to work off.

    Attributes:
        active: bool ``[heads, blocks, blocks]``, by query block and key block.
    """

    active: Tensor
    block: int = 128

    @classmethod
    def of(cls, index: VerticalSlashIndex) -> BlockLists:
        """The lists of one sample. A pair of 128-blocks at distance d holds the distances 2 d - 1, 2 d, 2 d + 1."""
        bits = index.slash_bits()[0]
        blocks = bits.shape[-1] // 2
        near = torch.nn.functional.pad(bits, (1, 1))[:, : 2 * blocks + 2]
        active = (near[:, :-2:2] | near[:, 1:-1:2] | near[:, 2::2])[:, :blocks]
        row = torch.arange(blocks, device=bits.device)
        distance = row[:, None] - row[None, :]
        return cls(active[:, distance.clamp(min=0)] & (distance >= 0))

    @property
    def pairs(self) -> float:
        """Query-key pairs of all heads."""
        return float(self.active.sum()) * self.block**2

    def of_rows(self) -> tuple[CountAndIndex, CountAndIndex]:
        """Key blocks of each query block: (diagonal, others), each (count ``[1, heads, blocks]``, blocks ``[..., blocks]``)."""
        return self._split(self.active)

    def of_rows_together(self) -> CountAndIndex:
        """Key blocks of each query block, the diagonal among them."""
        return self._compact(self.active)

    def of_keys(self) -> tuple[CountAndIndex, CountAndIndex]:
        """Query blocks of each key block, in the same form."""
        return self._split(self.active.transpose(1, 2))

    @staticmethod
    def _split(active: Tensor) -> tuple[CountAndIndex, CountAndIndex]:
        on_diagonal = torch.eye(active.shape[-1], dtype=torch.bool, device=active.device)
        diagonal, others = (BlockLists._compact(active & part) for part in (on_diagonal, ~on_diagonal))
        return diagonal, others

    @staticmethod
    def _compact(active: Tensor) -> CountAndIndex:
        order = torch.argsort(active.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
        return active.sum(-1).to(torch.int32)[None], order[None].contiguous()
