"""One rank of a ring on real ranks, over NCCL (gloo on the CPU; one rank: no ring): its groups, its calls, their times.

A call estimates its index and then attends under the made-up one: that of random tensors would keep nearly everything.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.problems import Problem
from benchmarks.ring import hosts
from benchmarks.ring.cases import Case, Row
from benchmarks.ring.prediction import link_columns
from benchmarks.ring.throttle import Throttle, ThrottledProfile
from benchmarks.timing import Marks
from megatron_mtraining import VerticalSlashIndex, estimate_index
from megatron_mtraining.attention import attention_on_groups
from megatron_mtraining.comm import RingGroups
from megatron_mtraining.ring_profile import PassTimes, RingProfile, profile_ring
from megatron_mtraining.simulator.timeline import Ring
from megatron_mtraining.testing import run_virtual

WALL = ("index", "forward", "backward", "call")


@dataclass(frozen=True)
class Conditions:
    """What holds for the rows of a run beside the case.

    Attributes:
        throttle: an artificial slow link between nodes.
        pretended_hosts: hosts pretended to NCCL, 0 for none: ranks share GPUs, so rows have no times.
        repeats: calls that are timed.
    """

    throttle: Throttle | None = None
    pretended_hosts: int = 0
    repeats: int = 5

    def columns(self) -> Row:
        """The same for every row of the run."""
        row = link_columns(self.throttle) | {"connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default")}
        return row | ({"hosts": hosts.label(self.pretended_hosts)} if self.pretended_hosts else {})

    def profile(self) -> RingProfile:
        """What takes the times of passes, with the slow link if there is one."""
        return RingProfile() if self.throttle is None else ThrottledProfile(self.throttle)

    def links(self) -> AbstractContextManager[object]:
        """Within it passes go over the slow link, if there is one."""
        return nullcontext() if self.throttle is None else profile_ring(self.profile())


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
    conditions: Conditions = Conditions()
    tensors: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.config = self.case.config(self.ring)
        self.layout = self.case.layout_of(self.problem.seq_len, self.ring)
        rank = dist.get_rank()
        self.tensors = [self.layout.shard(x, rank).contiguous() for x in self.whole()]
        self.leaves = [x.requires_grad_() for x in self.tensors[:3]]

    def whole(self) -> tuple[Tensor, ...]:
        """The tensors of all ranks, the same on each."""
        torch.manual_seed(0)
        return self.problem.tensors()

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

    def results(self) -> list[Tensor]:
        """out, dq, dk, dv."""
        out = self.attend()
        return [out, *torch.autograd.grad(out, self.leaves, self.tensors[3])]

    def wall_times(self) -> dict[str, float]:
        """Milliseconds of one call behind other work, as in a model whose launches run ahead of the device."""
        marks = Marks(self.tensors[3].device)
        with self.conditions.links():
            dist.barrier()
            marks.begin()
            self.estimate()
            marks.mark()
            out = self.attend()
            marks.mark()
            torch.autograd.grad(out, self.leaves, self.tensors[3])
            marks.mark()
            index, forward, call = marks.read()
        return dict(zip(WALL, (index, forward - index, call - forward, call), strict=True))

    def profiled(self) -> list[PassTimes]:
        """The passes of one call without index."""
        profile = self.conditions.profile()
        dist.barrier()
        Marks(self.tensors[3].device).begin()
        with profile_ring(profile):
            self.results()
        return profile.read()

    def bits_equal(self) -> bool:
        """Whether output and gradients of all ranks are, bit by bit, those of one process that plays all ranks."""
        mine = self.results()
        whole = self.whole()
        leaves = [x.requires_grad_() for x in whole[:3]]
        options = {"config": self.config, "layout": self.layout, "inner_size": self.ring.inner_size}
        out = run_virtual(*leaves, index=self.index, **options)  # type: ignore[arg-type]
        expected = [out, *torch.autograd.grad(out, leaves, whole[3])]
        rank = dist.get_rank()
        same = all(torch.equal(x, self.layout.shard(y, rank)) for x, y in zip(mine, expected, strict=True))
        return slowest({"different": float(not same)})["different"] == 0


def everyone[Value](mine: Value) -> list[Value]:
    """The values of all ranks."""
    ranks: list[Value] = [mine] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def slowest(mine: dict[str, float]) -> dict[str, float]:
    """The largest of every value over the ranks."""
    ranks = everyone(mine)
    return {name: max(r[name] for r in ranks) for name in mine}
