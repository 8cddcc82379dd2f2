"""Head-parallel (tensor-parallel) sparse attention: whole heads on each rank, for its imbalance.

Every rank has the whole sequence of its heads. Consecutive heads go to a rank; where there are more ranks than key heads, a
key head is on several of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.problems import Problem
from benchmarks.ring.cases import Row
from benchmarks.timing import measure
from megatron_mtraining import MTrainingConfig, VerticalSlashIndex, mtraining_attention
from megatron_mtraining.simulator import head_parallel_imbalance


def of_heads(index: VerticalSlashIndex, heads: slice) -> VerticalSlashIndex:
    """The index of some heads."""
    return VerticalSlashIndex(
        index.slash_words[:, heads].contiguous(), index.column_words[:, heads].contiguous(), index.documents,
        index.column_capacity,
    )  # fmt: skip


def share_of(tensors: tuple[Tensor, ...], rank: int, ranks: int) -> tuple[Tensor, ...]:
    """q, k, v, dout of a rank's heads."""
    q, k, v, dout = tensors
    heads, group = q.shape[2] // ranks, q.shape[2] // k.shape[2]
    first, last = rank * heads, (rank + 1) * heads
    keys = slice(first // group, (last - 1) // group + 1)
    return tuple(x.contiguous() for x in (q[:, :, first:last], k[:, :, keys], v[:, :, keys], dout[:, :, first:last]))


def head_times(tensors: tuple[Tensor, ...], index: VerticalSlashIndex, ranks: int) -> dict[str, list[float]]:
    """Milliseconds of each rank's passes, one rank after another on this device."""
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    heads = tensors[0].shape[2] // ranks
    for rank in range(ranks):
        q, k, v, dout = share_of(tensors, rank, ranks)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        own = of_heads(index, slice(rank * heads, (rank + 1) * heads))
        kept: list[Tensor] = []

        def forward(leaves: list[Tensor] = leaves, own: VerticalSlashIndex = own, kept: list[Tensor] = kept) -> None:
            kept[:] = [mtraining_attention(*leaves, config=MTrainingConfig(), index=own)]

        def backward(leaves: list[Tensor] = leaves, dout: Tensor = dout, kept: list[Tensor] = kept) -> object:
            return torch.autograd.grad(kept[0], leaves, dout, retain_graph=True)

        runs: tuple[tuple[str, Callable[[], object]], ...] = (("forward", forward), ("backward", backward))
        for phase, run in runs:
            found[phase].append(measure(run, repeats=2, queued=True).ms)
    return found


def pair_rows(index: VerticalSlashIndex, sizes: tuple[int, ...], name: str) -> list[Row]:
    """Imbalance in pairs alone, a row for each number of ranks that divides the heads. Needs no GPU."""
    pairs = index.pairs()[0].cpu().numpy()
    return [
        {"case": name, "density": round(float(index.density()), 4), "tp_size": ranks,
         "pairs_total": round(head_parallel_imbalance(pairs, ranks), 3)}
        for ranks in sizes
        if pairs.shape[-1] % ranks == 0
    ]  # fmt: skip


def head_rows(
    problem: Problem, tensors: tuple[Tensor, ...], index: VerticalSlashIndex, ranks: int, name: str
) -> list[Row]:
    """A row a phase: imbalance in pairs and in time. There is no traffic inside attention."""
    pairs = index.pairs()[0]
    rows: list[Row] = []
    for phase, times in head_times(tensors, index, ranks).items():
        mean = sum(times) / ranks
        rows.append({
            "case": name, "seq_len": problem.seq_len, "heads": problem.heads, "kv_heads": problem.kv_heads,
            "head_dim": problem.head_dim, "cp_size": 1, "tp_size": ranks, "density": round(float(index.density()), 4),
            "pairs_total": round(head_parallel_imbalance(pairs.cpu().numpy(), ranks), 3), "pass": phase,
            "compute_ms": round(mean, 3), "slowest_ms": round(max(times), 3), "time_total": round(max(times) / mean, 3),
            "per_rank_ms": [round(x, 3) for x in times],
        })  # fmt: skip
    return rows
