"""What is compared: ways to run the ring, the indices they run under, and what is said of each in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.problems import Problem
from megatron_mtraining import Layout, MTrainingConfig, VerticalSlashIndex
from megatron_mtraining.block_lists import Index
from megatron_mtraining.config import BLOCK
from megatron_mtraining.launches import chunks_per_launch
from megatron_mtraining.metrics import imbalance_degrees, pair_counts
from megatron_mtraining.simulator import IndexProfile, Pattern, RankWork, make_profile
from megatron_mtraining.simulator.timeline import Ring, chunk_table
from megatron_mtraining.simulator.work import to_index

Row = dict[str, object]

PATTERNS = ("reference", "bands")
"""reference: that of bench_ops (3% of the distances, 1.25% of the columns); bands: 5% density, half of the distances a
band, runs of 1 to 4, 0.5% of the positions as columns (the pattern that the balance figures are stated for)."""


@dataclass(frozen=True)
class Case:
    """One way to run the ring.

    Attributes:
        layout: striped or zigzag.
        hierarchical: inner rings of a node's ranks and outer rings; else one ring over all.
        rotated: stripes dealt turned within the nodes.
        dense: every distance on.
        chunks: most chunks a launch; ``None``: the automatic choice.
    """

    name: str
    layout: str = "striped"
    hierarchical: bool = False
    rotated: bool = False
    dense: bool = False
    chunks: int | None = None

    def config(self, ring: Ring) -> MTrainingConfig:
        """The attention's options on a cluster."""
        return MTrainingConfig(
            layout=self.layout,
            dense=self.dense,
            chunks_per_launch=self.most(ring),
            stripe_rotation=ring.node_size if self.rotated else 1,
        )

    def ring(self, cp_size: int, node_size: int) -> Ring:
        """The ranks' places."""
        return Ring(cp_size, node_size if self.hierarchical else cp_size, node_size)

    def most(self, ring: Ring) -> int | None:
        """Most chunks a launch: one in a flat ring over several nodes, as in the product (``RingCall.plan``)."""
        return 1 if ring.inner_size == ring.cp_size > ring.node_size else self.chunks

    def layout_of(self, seq_len: int, ring: Ring) -> Layout:
        """The placement of a sequence."""
        return Layout.from_config(self.config(ring), seq_len, ring.cp_size)

    def launched(self, ring: Ring, local_seq_len: int, backward: bool) -> int:
        """Most chunks a launch in figures."""
        most = self.most(ring)
        return chunks_per_launch(local_seq_len, backward) if most is None else most


def comparison(nodes: int, with_dense: bool) -> list[Case]:
    """The rings to compare; ours first. A single node has no hierarchy."""
    if nodes == 1:
        found = [
            Case("striped"),
            Case("zigzag", "zigzag"),
            Case("striped, one chunk a launch", chunks=1),
        ]
    else:
        found = [
            Case("striped, rotated, hierarchical", hierarchical=True, rotated=True),
            Case("striped, hierarchical", hierarchical=True),
            Case("striped, flat"),
            Case("zigzag, flat", "zigzag"),
            Case("zigzag, hierarchical", "zigzag", hierarchical=True),
            Case("striped, rotated, hierarchical, one chunk a launch", hierarchical=True, rotated=True, chunks=1),
        ]
    if with_dense:
        found += [
            Case("dense, striped", hierarchical=nodes > 1, dense=True),
            Case("dense, zigzag", "zigzag", hierarchical=nodes > 1, dense=True),
        ]
    return found


def pattern_index(problem: Problem, pattern: str, spread: float = 0.0) -> VerticalSlashIndex:
    """A made-up index; ``spread`` (pattern bands): deviation of the logarithm of the heads' densities."""
    if pattern == "reference":
        return problem.index()
    return to_index(make_profile(Pattern(spread=spread), problem.seq_len, problem.heads), problem.device)


def case_index(problem: Problem, case: Case, index: VerticalSlashIndex) -> VerticalSlashIndex:
    """The index that a case runs under: the given one, or everything."""
    if not case.dense:
        return index
    return VerticalSlashIndex.dense(1, problem.heads, index.documents, torch.device(problem.device))


@lru_cache(maxsize=4)
def counts(index: Index, layout: Layout) -> tuple[Tensor, Tensor]:
    """Pairs on slash lines (or row lists) ``[query rank, key rank]`` and of columns ``[query rank]``, int64.

    Of lines by the simulator's way of counting, many times as fast as :func:`pair_counts` and equal to it (test).
    """
    if isinstance(index, VerticalSlashIndex):
        work = RankWork.of(IndexProfile.of(index), layout)
        return torch.from_numpy(work.slash), torch.from_numpy(work.columns)
    blocks, columns = pair_counts(index, layout)
    return blocks * BLOCK * BLOCK, columns.sum(1) * BLOCK


def slash_table(index: Index, layout: Layout, ring: Ring) -> tuple[Tensor, Tensor]:
    """Pairs on slash lines (or row lists) by rank and forward step, fp64 ``[cp_size, steps]``; and all columns' pairs
    by rank, ``[cp_size]``: they are worked off in one launch, at the end.
    """
    slash, columns = counts(index, layout)
    chunks = torch.from_numpy(chunk_table(ring, ring.plan(False, 1)))
    return slash.gather(1, chunks).double(), columns.double()


def in_pairs(index: Index, layout: Layout, ring: Ring) -> dict[str, float]:
    """Imbalance degrees of the pairs: of the slash lines by step, ``total`` of all pairs."""
    slash, columns = slash_table(index, layout, ring)
    whole = slash.sum(1) + columns
    degrees = imbalance_degrees(slash) | {"total": float(whole.max() / whole.mean())}
    return {f"pairs_{name}": round(value, 3) for name, value in degrees.items()}


def describe(problem: Problem, name: str, ring: Ring, index: Index) -> Row:
    """What every row says first."""
    return {
        "case": name, "seq_len": problem.seq_len, "heads": problem.heads, "kv_heads": problem.kv_heads,
        "head_dim": problem.head_dim, "cp_size": ring.cp_size, "inner_size": ring.inner_size,
        "density": round(float(index.density()), 4),
    }  # fmt: skip
