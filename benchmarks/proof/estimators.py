"""Index estimators that the study compares besides the policies of the library (docs/proof.md).

All of them look at a few probe rows; they differ in which rows, and in how lines are chosen from what the rows attend:

- rows: the last ``count`` (the paper), or ``count`` spread over the sequence, each standing for the rows around it;
- choice: ``independent`` (vertical and slash lines each up to p of the mass, the paper), ``token`` (the authors' code: token
  diagonals up to p, each covered by two block diagonals), or ``joint`` (lines of both kinds by mass per pair until their
  union holds p).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.proof.mass import attention_rows
from megatron_mtraining import VerticalSlashIndex
from megatron_mtraining.bitmap import pack_bits
from megatron_mtraining.config import BLOCK
from megatron_mtraining.documents import Documents

SEARCH_STEPS = 14
ALTERNATIONS = 2


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
        p: fp32 ``[heads, rows, n, 64]``, attention of each row.
        by_distance: fp32 ``[heads, rows, n]``, the same by block distance.
        row_block: int64 ``[rows]``.
        reach: fp32 ``[n]``: rows that a slash line's estimate rests on, by distance.
    """

    p: Tensor
    by_distance: Tensor
    row_block: Tensor
    reach: Tensor

    @classmethod
    def make(cls, q: Tensor, k: Tensor, rows: Tensor, scale: float) -> ProbeView:
        """Scores the rows; ``q [1, seq, heads, dim]``, ``k [1, seq, kv_heads, dim]``."""
        p = attention_rows(q, k, rows, scale).unflatten(2, (-1, BLOCK))
        row_block = rows // BLOCK
        place = row_block[:, None] - torch.arange(p.shape[2], device=q.device)[None, :]
        seen = place >= 0
        by_distance = p.sum(3).gather(2, place.clamp(min=0).expand(p.shape[0], -1, -1)) * seen
        return cls(p, by_distance, row_block, seen.sum(0).float())

    @property
    def blocks(self) -> int:
        """Blocks of the sequence."""
        return self.p.shape[2]


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
    columns = view.p.sum(1).clone()
    columns[:, -1] = 0
    return to_index(top_share(view.by_distance.sum(1), share), top_share(columns.flatten(1), share))


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


def joint(view: ProbeView, share: float) -> VerticalSlashIndex:
    """Lines of both kinds by estimated mass per computed pair, until their union holds ``share`` of the probe's mass.

    A line's mass over the whole sequence is its mean over the probe rows that reach it, times the rows that do. The bar,
    mass per pair, is found per head by bisection; under a bar columns are chosen first (a sink would otherwise look like a
    slash line in every row), then slash lines by what the columns leave, then columns by what those leave.
    """
    heads, rows, n, _ = view.p.shape
    total = view.p.sum((1, 2, 3))
    low, high = torch.full((heads, 1), -16.0, device=view.p.device), torch.ones(heads, 1, device=view.p.device)
    slash, columns = _lines_over(view, torch.exp2(low))
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        slash, columns = _lines_over(view, torch.exp2(middle))
        enough = (_held(view, slash, columns) >= share * total)[:, None]
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return to_index(*(x if x.dim() == 2 else x.flatten(1) for x in _lines_over(view, torch.exp2(low))))


def _lines_over(view: ProbeView, bar: Tensor) -> tuple[Tensor, Tensor]:
    """Slash ``[heads, n]`` and columns ``[heads, n, 64]`` whose mass per pair reaches ``bar [heads, 1]``."""
    covered = torch.zeros_like(view.by_distance, dtype=torch.bool)
    # A row's share is mass per pair for a column; a block pair of a slash line costs 64 pairs a row.
    reach = view.reach.clamp(min=1)
    below = _rows_below(view)
    columns = _column_mass(view, covered) / below >= bar[..., None]
    slash = torch.zeros(covered.shape[0], view.blocks, dtype=torch.bool, device=bar.device)
    for _ in range(ALTERNATIONS):
        left = view.p.sum(3) - torch.einsum("hrjc,hjc->hrj", view.p, columns.to(view.p.dtype))
        slash = _by_distance(view, left).sum(1) / reach / BLOCK >= bar
        slash[:, 0] = True
        covered = _covered(view, slash)
        columns = _column_mass(view, covered) / below >= bar[..., None]
    return slash, columns


def _rows_below(view: ProbeView) -> Tensor:
    """fp32 ``[n, 1]``: probe rows in later blocks than each; infinite where there is none, so that no column is kept."""
    later = (view.row_block[:, None] > torch.arange(view.blocks, device=view.p.device)).sum(0).float()
    return torch.where(later > 0, later, torch.inf)[:, None]


def _column_mass(view: ProbeView, covered: Tensor) -> Tensor:
    """fp32 ``[heads, n, 64]``: mass of each column in later row blocks outside the ``covered [heads, rows, n]`` pairs."""
    earlier = torch.arange(view.blocks, device=view.p.device)[None, :] < view.row_block[:, None]
    return torch.einsum("hrjc,hrj->hjc", view.p, (earlier & ~covered).to(view.p.dtype))


def _by_distance(view: ProbeView, by_block: Tensor) -> Tensor:
    """``[heads, rows, n]`` by key block, turned to block distances."""
    place = view.row_block[:, None] - torch.arange(view.blocks, device=by_block.device)[None, :]
    return by_block.gather(2, place.clamp(min=0).expand(by_block.shape[0], -1, -1)) * (place >= 0)


def _covered(view: ProbeView, slash: Tensor) -> Tensor:
    """Bool ``[heads, rows, n]``: key blocks that a row reaches by a kept distance."""
    distance = view.row_block[:, None] - torch.arange(view.blocks, device=slash.device)[None, :]
    return slash[:, distance.clamp(min=0)] & (distance >= 0)


def _held(view: ProbeView, slash: Tensor, columns: Tensor) -> Tensor:
    """fp32 ``[heads]``: the probe's mass in the union of the lines."""
    covered = _covered(view, slash)
    return (view.p.sum(3) * covered).sum((1, 2)) + (_column_mass(view, covered) * columns).sum((1, 2))
