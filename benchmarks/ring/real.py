"""Rings on real ranks, over NCCL (one rank: no ring): index, forward and backward of one call, and what was hidden.

A call estimates its index and then attends under the made-up one: that of random tensors would keep nearly everything.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.problems import Problem
from benchmarks.ring import megatron_dense
from benchmarks.ring.cases import Case, Row, case_index, describe, in_pairs
from benchmarks.ring.gathered import GatheredRanks
from benchmarks.timing import QUEUE_CYCLES, measure
from megatron_mtraining import VerticalSlashIndex, estimate_index
from megatron_mtraining.attention import attention_on_groups
from megatron_mtraining.comm import RingGroups
from megatron_mtraining.metrics import imbalance_degrees
from megatron_mtraining.ring_profile import PassTimes, profile_ring
from megatron_mtraining.simulator.timeline import Ring

WALL = ("index", "forward", "backward", "call")


def ring_groups(inner_size: int) -> RingGroups:
    """The groups of a ring over the whole world, one communicator a channel; collective."""
    size, rank = dist.get_world_size(), dist.get_rank()
    everyone = list(range(size))
    if inner_size == size:
        return RingGroups(dist.group.WORLD, inner_grad=dist.new_group(everyone))
    made = []
    for lists in (
        [everyone[i : i + inner_size] for i in range(0, size, inner_size)],
        [everyone[i::inner_size] for i in range(inner_size)],
    ):
        for _ in range(2):
            groups = [(ranks, dist.new_group(ranks)) for ranks in lists]
            made.append(next(group for ranks, group in groups if rank in ranks))
    return RingGroups(dist.group.WORLD, made[0], made[2], made[1], made[3])


@dataclass
class RealRank:
    """One rank's calls of one case."""

    problem: Problem
    case: Case
    ring: Ring
    groups: RingGroups
    index: VerticalSlashIndex
    tensors: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.config = self.case.config(self.ring)
        self.layout = self.case.layout_of(self.problem.seq_len, self.ring)
        torch.manual_seed(0)  # the same sequence on all ranks
        rank = dist.get_rank()
        self.tensors = [self.layout.shard(x, rank).contiguous() for x in self.problem.tensors()]
        self.leaves = [x.requires_grad_() for x in self.tensors[:3]]

    def estimate(self) -> None:
        """The call's index; dense attention needs none."""
        if not self.case.dense:
            q, k = (x.detach() for x in self.leaves[:2])
            estimate_index(q, k, config=self.config, layout=self.layout, cp_group=self.groups.cp)

    def attend(self) -> Tensor:
        """Forward."""
        out: Tensor = attention_on_groups(
            *self.leaves, config=self.config, groups=self.groups, layout=self.layout, index=self.index
        )
        return out

    def wall_times(self) -> dict[str, float]:
        """Milliseconds of one call behind other work, as in a model whose launches run ahead of the device."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(2 * QUEUE_CYCLES)
        events[0].record()
        self.estimate()
        events[1].record()
        out = self.attend()
        events[2].record()
        torch.autograd.grad(out, self.leaves, self.tensors[3])
        events[3].record()
        torch.cuda.synchronize()
        spans = ((0, 1), (1, 2), (2, 3), (0, 3))
        return {name: events[a].elapsed_time(events[b]) for name, (a, b) in zip(WALL, spans, strict=True)}

    def profiled(self) -> list[PassTimes]:
        """The passes of one call without index."""
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(2 * QUEUE_CYCLES)
        with profile_ring() as profile:
            torch.autograd.grad(self.attend(), self.leaves, self.tensors[3])
        return profile.read()


def slowest(mine: dict[str, float]) -> dict[str, float]:
    """The largest of every value over the ranks."""
    ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return {name: max(r[name] for r in ranks) for name in mine}


def pass_row(found: list[PassTimes]) -> Row:
    """What the profile says of one phase, over all ranks: the slowest of each value, the least hidden."""
    mine = {
        name: statistics.median(getattr(p, name) for p in found) for name in ("exposed_ms", "transfer_ms", "tail_ms")
    }
    hidden = statistics.median(p.hidden for p in found)
    compute = [statistics.median(p.launches[i].compute_ms for p in found) for i in range(len(found[0].launches))]
    ranks: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, {"hidden": hidden, "compute": compute})
    table = torch.tensor([r["compute"] for r in ranks])
    return (
        {name: round(value, 3) for name, value in slowest(mine).items()}
        | {"hidden": round(min(r["hidden"] for r in ranks), 3)}
        | {f"time_{name}": round(value, 3) for name, value in imbalance_degrees(table).items()}
        | {"per_launch_ms": [[round(x, 3) for x in r["compute"]] for r in ranks]}
    )


def real_rows(
    problem: Problem, case: Case, ring: Ring, groups: RingGroups, index: VerticalSlashIndex, repeats: int
) -> list[Row]:
    """Rows of a case (those of the slowest rank): index, forward, backward, and the call of all three."""
    rank = RealRank(problem, case, ring, groups, case_index(problem, case, index))
    few = 2 if case.dense else repeats
    wall = [rank.wall_times() for _ in range(few + 1)][1:]
    passes = [times for _ in range(few) for times in rank.profiled()]
    median = slowest({name: statistics.median(times[name] for times in wall) for name in WALL})
    common = describe(problem, case.name, ring, rank.index) | in_pairs(rank.index, rank.layout, ring)
    rows = []
    for name in WALL:
        if case.dense and name == "index":
            continue
        row = common | {"pass": name, "ms": round(median[name], 3)}
        if name in ("forward", "backward"):
            row |= pass_row([p for p in passes if p.phase == name])
        rows.append(row)
    return rows


def dense_rows(problem: Problem, ring: Ring) -> list[Row]:
    """Dense attention on the same ranks: cuDNN with gathered keys (one rank: all of it), and Transformer Engine's ring."""
    torch.manual_seed(0)
    ranks = GatheredRanks(problem.tensors(), dist.group.WORLD)
    found = {}
    for phase, run in (("forward", ranks.forward), ("backward", ranks.backward)):
        dist.barrier()
        # One number of repeats on all ranks: they call each other.
        found[phase] = measure(run, repeats=2, budget_ms=float("inf"), queued=True).ms
    found["call"] = sum(found.values())
    del ranks
    rows = dense_row(
        "cuDNN dense, one rank" if ring.cp_size == 1 else "cuDNN dense, gathered keys", problem, ring, found
    )
    if megatron_dense.installed():
        torch.cuda.empty_cache()
        times = megatron_dense.measured(problem.tensors(), dist.group.WORLD)
        rows += dense_row("Transformer Engine dense, p2p", problem, ring, times)
    return rows


def dense_row(name: str, problem: Problem, ring: Ring, times: dict[str, float]) -> list[Row]:
    """Rows of a dense implementation, the slowest rank's."""
    common = {
        "case": name, "seq_len": problem.seq_len, "heads": problem.heads, "kv_heads": problem.kv_heads,
        "head_dim": problem.head_dim, "cp_size": ring.cp_size, "inner_size": ring.inner_size, "density": 1.0,
    }  # fmt: skip
    return [common | {"pass": phase, "ms": round(ms, 3)} for phase, ms in slowest(times).items()]
