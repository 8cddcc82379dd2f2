"""How much work an index gives each rank in each step of a ring, for any layout, in seconds even at 4M tokens.

Slash lines depend on the distance of two blocks alone, so the work between two runs of consecutive blocks is a second
difference of a twice summed table, and a layout that repeats itself needs one period of it; one of many short runs is
counted by convolutions. All counts are exact integers; a test compares them with
:func:`megatron_mtraining.metrics.pair_counts`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..bitmap import count_bits
from ..config import BLOCK
from ..index import VerticalSlashIndex
from ..layout import Layout


@dataclass(frozen=True)
class IndexProfile:
    """What balance and cost depend on, of an index of one document.

    Attributes:
        seq_len: global sequence length in tokens.
        slash: int64 ``[heads, n]``, 1 where a head keeps that block distance.
        columns: int64 ``[heads, n]``, kept columns of each key block.
    """

    seq_len: int
    slash: np.ndarray
    columns: np.ndarray

    @classmethod
    def of(cls, index: VerticalSlashIndex) -> IndexProfile:
        """The profile of an index; heads of all samples together.

        Raises:
            ValueError: for packed documents.
        """
        if len(index.documents.starts) > 1:
            raise ValueError(f"index has {len(index.documents.starts)} documents: the simulator takes one")
        slash = index.slash_bits().flatten(0, 1).cpu().numpy().astype(np.int64)
        columns = count_bits(index.column_words).flatten(0, 1).cpu().numpy()
        return cls(index.seq_len, slash, columns)

    @classmethod
    def dense(cls, seq_len: int, heads: int) -> IndexProfile:
        """Dense causal attention."""
        blocks = seq_len // BLOCK
        return cls(seq_len, np.ones((heads, blocks), np.int64), np.zeros((heads, blocks), np.int64))

    @property
    def heads(self) -> int:
        """Query heads of all samples."""
        return self.slash.shape[0]

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence."""
        return self.slash.shape[1]

    def column_rows(self) -> np.ndarray:
        """int64 ``[n]``: kept (row block, column) pairs of each row block, summed over the heads."""
        size = 2 * self.num_blocks
        rows = np.zeros(self.num_blocks, np.int64)
        for slash, columns in zip(self.slash, self.columns, strict=True):
            if not columns.any():
                continue
            later = slash.astype(np.float64)
            later[0] = 0
            covered = np.fft.irfft(np.fft.rfft(later, size) * np.fft.rfft(columns, size), size)[: self.num_blocks]
            # Rounded: the transforms leave errors far below one half on integers.
            rows += np.cumsum(columns) - columns - np.rint(covered).astype(np.int64)
        return rows

    def head_pairs(self) -> np.ndarray:
        """int64 ``[heads]``: query-key pairs of each head."""
        rows = self.num_blocks - np.arange(self.num_blocks)
        blocks = (self.slash * rows).sum(1)
        columns = [IndexProfile(self.seq_len, s[None], c[None]).column_rows().sum()
                   for s, c in zip(self.slash, self.columns, strict=True)]  # fmt: skip
        return blocks * BLOCK * BLOCK + np.array(columns) * BLOCK

    def density(self) -> float:
        """Pairs over those of the causal half matrix."""
        return float(self.head_pairs().mean() / (self.seq_len**2 / 2))


@dataclass(frozen=True)
class RankWork:
    """Query-key pairs by rank.

    Attributes:
        slash: int64 ``[cp_size, cp_size]``, ``[query rank, key rank]``.
        columns: int64 ``[cp_size]``, by query rank: they are attended in one go.
    """

    slash: np.ndarray
    columns: np.ndarray

    @classmethod
    def of(cls, profile: IndexProfile, layout: Layout, column_rows: np.ndarray | None = None) -> RankWork:
        """The work of a profile in a layout; ``column_rows`` spares their computation where it was done before."""
        owner = (layout.inverse("cpu").long() // layout.local_blocks).numpy()
        rows = profile.column_rows() if column_rows is None else column_rows
        columns = np.bincount(owner, rows, layout.cp_size).round().astype(np.int64) * BLOCK
        return cls(_slash_pairs(profile.slash.sum(0), owner, layout.cp_size) * BLOCK * BLOCK, columns)

    def by_step(self, chunks: np.ndarray) -> np.ndarray:
        """int64 ``[cp_size, steps]``: slash pairs of each step, given its chunk: ``chunks [cp_size, steps]``."""
        return np.take_along_axis(self.slash, chunks, axis=1)


def _period(owner: np.ndarray, cp_size: int) -> int:
    """Smallest multiple of ``cp_size`` after which the owners repeat; the whole length if there is none."""
    blocks = owner.size
    for period in range(cp_size, blocks // 2 + 1, cp_size):
        # The second period is compared first: most candidates fail there.
        repeats = blocks % period == 0 and (owner[period : 2 * period] == owner[:period]).all()
        if repeats and (owner.reshape(-1, period) == owner[:period]).all():
            return period
    return blocks


def _slash_pairs(lines: np.ndarray, owner: np.ndarray, cp_size: int) -> np.ndarray:
    """int64 ``[query rank, key rank]``: block pairs, given how many heads keep each distance."""
    offset, residues = _folded(lines, owner, cp_size)
    # Rotated stripes of many ranks hardly repeat and have short runs: 2**32 pairs of runs with 1,024 ranks.
    many = _run_starts(residues).size ** 2 > 2 * cp_size * residues.size
    return (_by_transforms if many else _by_runs)(offset, residues, cp_size)


def _folded(lines: np.ndarray, owner: np.ndarray, cp_size: int) -> tuple[np.ndarray, np.ndarray]:
    """One period of a layout: ``(pairs of a row and a key, int64 [2 * period - 1], by the difference of their residues from
    1 - period; the rank of each residue)``.
    """
    period = _period(owner, cp_size)
    repeats = owner.size // period
    by_residue = lines.reshape(repeats, period)
    # Rows and keys of one residue: at d = residue + m * period there are repeats - m pairs of them; one less if the key's
    # residue is the larger.
    pairs = (by_residue * (repeats - np.arange(repeats))[:, None]).sum(0)
    return np.concatenate(((pairs - by_residue.sum(0))[1:], pairs)), owner[:period]


def _run_starts(owner: np.ndarray) -> np.ndarray:
    """Where runs of one rank begin."""
    return np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])


def _by_transforms(offset: np.ndarray, owner: np.ndarray, cp_size: int) -> np.ndarray:
    """The table of :func:`_slash_pairs` from what :func:`_folded` gives: a convolution for each key rank."""
    period = owner.size
    size = 2 * period
    spectrum, by_rank = np.fft.rfft(offset, size), np.argsort(owner, kind="stable")
    first = np.searchsorted(owner[by_rank], np.arange(cp_size))
    table = np.empty((cp_size, cp_size), np.int64)
    for rank in range(cp_size):
        met = np.fft.irfft(np.fft.rfft(owner == rank, size) * spectrum, size)[period - 1 : size - 1]
        # Rounded: the transforms leave errors far below one half on integers.
        table[:, rank] = np.rint(np.add.reduceat(met[by_rank], first))
    return table


def _by_runs(offset: np.ndarray, owner: np.ndarray, cp_size: int) -> np.ndarray:
    """The same, by pairs of runs of residues of one rank."""
    period, starts = owner.size, _run_starts(owner)
    twice = np.concatenate(([0, 0], np.cumsum(np.cumsum(offset))))
    ends = np.r_[starts[1:], period]
    origin = period - 1  # place of difference 0 in `offset`

    def summed(difference: np.ndarray) -> np.ndarray:
        return twice[difference + origin + 1]

    table = np.zeros((cp_size, cp_size), np.int64)
    for first in range(0, starts.size, cp_size):
        a, b = starts[first : first + cp_size, None], ends[first : first + cp_size, None]
        for other in range(0, starts.size, cp_size):
            c, d = starts[other : other + cp_size], ends[other : other + cp_size]
            found = summed(b - c) - summed(a - c) - summed(b - d) + summed(a - d)
            rows, keys = owner[a], owner[c]
            if np.unique(rows).size == rows.size and np.unique(keys).size == keys.size:
                table[rows, keys] += found  # many times as fast as the general way
            else:
                np.add.at(table, (rows, keys), found)
    return table


def head_parallel_imbalance(pairs: np.ndarray, ranks: int) -> float:
    """Imbalance degree (max over mean) of tensor parallelism, which deals whole heads: consecutive ones to a rank.

    Args:
        pairs: ``[heads]`` (or ``[layers, heads]``: the layers wait for each other): work of each head.
        ranks: tensor-parallel ranks; must divide the heads.

    Raises:
        ValueError: if it does not.
    """
    pairs = np.atleast_2d(pairs)
    if ranks < 1 or pairs.shape[1] % ranks:
        raise ValueError(f"ranks={ranks}: must divide the {pairs.shape[1]} heads")
    work = pairs.reshape(pairs.shape[0], ranks, -1).sum(2)
    return float(work.max(1).sum() / work.mean(1).sum())


def to_index(profile: IndexProfile, device: torch.device | str = "cpu") -> VerticalSlashIndex:
    """An index of one sample with the profile's slash lines and as many columns a block, the first of each block."""
    slash = [[int(d) for d in np.flatnonzero(row)] for row in profile.slash]
    columns = [
        [int(block) * BLOCK + i for block in np.flatnonzero(row) for i in range(int(row[block]))]
        for row in profile.columns
    ]
    return VerticalSlashIndex.from_lines([slash], [columns], seq_len=profile.seq_len, device=device)
