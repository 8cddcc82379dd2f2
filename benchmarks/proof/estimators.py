"""Index estimators that the study compares besides the policies of the library (docs/proof.md).

All of them look at a few probe rows; they differ in which rows, and in how lines are chosen from what the rows attend:

- rows: the last ``count`` (the paper), or ``count`` spread over the sequence, each standing for the rows around it;
- choice: ``independent`` (vertical and slash lines each up to p of the mass, the paper), ``token`` (the authors' code: token
  diagonals up to p, each covered by two block diagonals), or ``joint`` (lines of both kinds by mass per pair until their
  union holds p).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.proof.mass import attention_rows
from megatron_mtraining import VerticalSlashIndex
from megatron_mtraining.bitmap import pack_bits
from megatron_mtraining.config import BLOCK
from megatron_mtraining.documents import Documents

PROBES = 256
SEARCH_STEPS = 7
LOWEST_BAR = -16.0  # log2 of mass per pair


def last_rows(seq: int, count: int, device: torch.device) -> Tensor:
    """The last ``count`` positions."""
    return torch.arange(seq - count, seq, device=device)


def spread_rows(seq: int, count: int, device: torch.device) -> Tensor:
    """``count`` positions, evenly spread and shifted so that they fall on every place within a block; the last is one."""
    rows = ((torch.arange(count, device=device, dtype=torch.float64) + 1) * seq / count).round().long() - 1
    return rows


@dataclass(frozen=True)
class ProbeView:
    """What the probe rows attend, prepared for choosing lines.

    Attributes:
        p: ``[heads, n, rows, 64]``, attention of each row by key block, in the dtype of q (fp32 at least on the CPU).
        by_block: fp32 ``[heads, rows, n]``, its sums over blocks.
        row_block: int64 ``[rows]``.
    """

    p: Tensor
    by_block: Tensor
    row_block: Tensor

    @classmethod
    def make(cls, q: Tensor, k: Tensor, rows: Tensor, scale: float) -> ProbeView:
        """Scores the rows; ``q [1, seq, heads, dim]``, ``k [1, seq, kv_heads, dim]``."""
        p = attention_rows(q, k, rows, scale).unflatten(2, (-1, BLOCK))
        by_block = p.sum(3)
        return cls(p.transpose(1, 2).to(q.dtype, memory_format=torch.contiguous_format), by_block, rows // BLOCK)

    @property
    def blocks(self) -> int:
        """Blocks of the sequence."""
        return self.p.shape[1]

    @cached_property
    def distance(self) -> Tensor:
        """int64 ``[rows, n]``: block distance of each row to each key block; negative: the future."""
        return self.row_block[:, None] - torch.arange(self.blocks, device=self.p.device)[None, :]

    @cached_property
    def slash_rows(self) -> Tensor:
        """fp32 ``[n]``: probe rows that a slash line's estimate rests on, by distance."""
        return (self.distance >= 0).sum(0).float().clamp(min=1)

    @cached_property
    def column_rows(self) -> Tensor:
        """fp32 ``[n, 1]``: probe rows in later blocks; infinite where there is none, so that no column is kept."""
        later = (self.distance > 0).sum(0).float()
        return torch.where(later > 0, later, torch.inf)[:, None]

    def slash_mass(self, by_block: Tensor) -> Tensor:
        """fp32 ``[heads, n]``: ``by_block [heads, rows, n]`` summed by block distance."""
        place = self.distance  # symmetric: the block at a distance, and the distance of a block
        turned = by_block.gather(2, place.clamp(min=0).expand(by_block.shape[0], -1, -1))
        return (turned * (place >= 0)).sum(1)

    def column_mass(self, uncovered: Tensor) -> Tensor:
        """fp32 ``[heads, n, 64]``: mass of each column in the ``uncovered [heads or 1, rows, n]`` pairs."""
        weights = uncovered.expand(self.p.shape[0], -1, -1).transpose(1, 2).to(self.p.dtype)[:, :, None]
        return torch.matmul(weights, self.p).squeeze(2).float()

    def mass_in(self, columns: Tensor) -> Tensor:
        """fp32 ``[heads, rows, n]``: mass of each row in the ``columns [heads, n, 64]`` of each block."""
        return torch.matmul(self.p, columns.to(self.p.dtype)[..., None]).squeeze(3).transpose(1, 2).float()

    def uncovered(self, slash: Tensor) -> Tensor:
        """Bool ``[heads, rows, n]``: earlier key blocks that a row does not reach by a distance of ``slash [heads, n]``."""
        return ~slash[:, self.distance.clamp(min=0)] & (self.distance > 0)


def top_share(mass: Tensor, share: float) -> Tensor:
    """Bool, shape of ``mass [heads, lines]``: the heaviest lines up to and including the one that crosses the share."""
    ordered, order = mass.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    keep = (before < share * ordered.sum(-1, keepdim=True)) & (ordered > 0)
    return torch.zeros_like(keep).scatter(-1, order, keep)


def to_index(slash: Tensor, columns: Tensor) -> VerticalSlashIndex:
    """The index of bool ``slash [heads, n]`` and ``columns [heads, seq]``; distance 0 is kept in any case."""
    documents = Documents.single(columns.shape[1])
    index = VerticalSlashIndex(pack_bits(slash)[None], pack_bits(columns)[None], documents, columns.shape[1])
    return index.keeping_diagonal()


def independent(view: ProbeView, share: float) -> VerticalSlashIndex:
    """Vertical and slash lines each up to ``share`` of the probe's mass (paper, section 3.1)."""
    columns = view.column_mass(view.distance[None] > 0)
    return to_index(top_share(view.slash_mass(view.by_block), share), top_share(columns.flatten(1), share))


def token_slash(q: Tensor, k: Tensor, share: float, scale: float, last_q: int = 64) -> VerticalSlashIndex:
    """As the authors' code ranks: token diagonals of the last rows, each covered by the two block diagonals it crosses."""
    seq = q.shape[1]
    rows = last_rows(seq, last_q, q.device)
    p = attention_rows(q, k, rows, scale)
    offset = rows[:, None] - torch.arange(seq, device=q.device)[None, :]
    diagonals = torch.zeros(p.shape[0], seq, device=q.device)
    diagonals.index_add_(1, offset.clamp(min=0).flatten(), (p * (offset >= 0)).flatten(1))
    chosen = top_share(diagonals, share).unflatten(1, (-1, BLOCK))
    near = chosen.any(2)
    far = torch.nn.functional.pad(chosen[..., 1:].any(2), (1, 0))[:, :-1]
    columns = p.sum(1)
    columns[:, -BLOCK:] = 0
    return to_index(near | far, top_share(columns, share))


def joint(view: ProbeView, share: float, steps: int = SEARCH_STEPS) -> VerticalSlashIndex:
    """Lines of both kinds by estimated mass per computed pair, until their union holds ``share`` of the probe's mass.

    A line's mass per pair is its mean over the probe rows that reach it, over the pairs that it costs in a row (64 for a
    slash line). The bar that lines must reach is found per head by bisection of its logarithm.
    """
    heads = view.p.shape[0]
    target = share * view.by_block.sum((1, 2))
    everything = view.column_mass(view.distance[None] > 0)
    low = torch.full((heads, 1), LOWEST_BAR, device=view.p.device)
    high = torch.zeros_like(low)
    slash, columns, _ = lines_over(view, everything, torch.exp2(low))
    for _ in range(steps):
        middle = (low + high) / 2
        found = lines_over(view, everything, torch.exp2(middle))
        enough = found[2] >= target
        low, high = (torch.where(enough[:, None], x, y) for x, y in ((middle, low), (high, middle)))
        slash = torch.where(enough[:, None], found[0], slash)
        columns = torch.where(enough[:, None, None], found[1], columns)
    return to_index(slash, columns.flatten(1))


def lines_over(view: ProbeView, everything: Tensor, bar: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The lines whose mass per pair reaches a bar.

    Columns come first (a sink would otherwise look like a slash line to every row), then slash lines by what the columns
    leave, then columns by what these leave.

    Args:
        view: the probes.
        everything: column mass with nothing covered.
        bar: ``[heads, 1]``.

    Returns:
        bool slash ``[heads, n]``, bool columns ``[heads, n, 64]`` and the probe's mass in their union, fp32 ``[heads]``.
    """
    columns = everything / view.column_rows >= bar[..., None]
    left = view.by_block - view.mass_in(columns) * (view.distance > 0)
    slash = view.slash_mass(left) / view.slash_rows / BLOCK >= bar
    slash[:, 0] = True
    uncovered = view.uncovered(slash)
    mass = view.column_mass(uncovered)
    columns = mass / view.column_rows >= bar[..., None]
    held = (view.by_block * ~uncovered).sum((1, 2)) + (mass * columns).sum((1, 2))
    return slash, columns, held
