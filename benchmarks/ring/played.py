"""Ranks played on one device: the compute time of every rank and launch, without traffic; the simulator adds the links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.problems import Problem
from benchmarks.ring.cases import Case, Row, case_index, describe, in_pairs
from megatron_mtraining.block_lists import Index, local_index
from megatron_mtraining.comm import VirtualExchange
from megatron_mtraining.metrics import imbalance_degrees
from megatron_mtraining.ops import operators
from megatron_mtraining.ring import RingBackward, RingForward, run
from megatron_mtraining.ring_call import RingCall
from megatron_mtraining.ring_profile import CallProfile, PassTimes, RingProfile, profile_ring
from megatron_mtraining.simulator import H200_LINKS, Links, Shape
from megatron_mtraining.simulator.timeline import Ring, Timeline, simulate
from megatron_mtraining.testing import saved_of

PHASES = ("forward", "backward")
SPACE_CYCLES = 600_000
"""Work in front of every measured stretch, about 0.3 ms: the host launches the stretch meanwhile, so that the device runs
through it without waiting for the host, as it does in a model, where the host is far ahead."""


class SpacedCall(CallProfile):
    """A pass with work in front of each stretch that is measured."""

    def mark(self, point: str) -> None:
        """Occupies the device, then takes the time."""
        if point in ("arrived", "summed") and self.device.type == "cuda":
            torch.cuda._sleep(SPACE_CYCLES)
        super().mark(point)


class SpacedProfile(RingProfile):
    """A profile of such passes."""

    call_type = SpacedCall


def time_table(passes: Sequence[PassTimes], phase: str) -> Tensor:
    """Compute time ``[ranks, launches]`` in ms of one pass of every rank."""
    mine = sorted((p for p in passes if p.phase == phase), key=lambda p: p.cp_rank)
    return torch.tensor([[launch.compute_ms for launch in p.launches] for p in mine])


@dataclass(frozen=True)
class Played:
    """Compute times of all ranks.

    Attributes:
        tables: by phase, ms ``[ranks, launches]``; the least of the repeats.
        timelines: by phase, the pass with the links of the simulator added.
    """

    tables: dict[str, Tensor]
    timelines: dict[str, Timeline]

    @property
    def seconds(self) -> float:
        """Forward and backward, with the links."""
        return sum(line.seconds for line in self.timelines.values())


class PlayedRanks:
    """All ranks of a case in this process, their tensors dealt out once."""

    def __init__(self, tensors: tuple[Tensor, ...], index: Index, case: Case, ring: Ring) -> None:
        q = tensors[0]
        config, layout = case.config(ring), case.layout_of(q.shape[1], ring)
        ranks = range(ring.cp_size)
        ops, mailbox = operators(config.kernel, q), {}  # type: ignore[var-annotated]
        self.parts = [[layout.shard(x.detach(), rank).contiguous() for x in tensors] for rank in ranks]
        self.calls = [
            RingCall(local_index(index, layout, rank), layout, config, q.shape[-1] ** -0.5, rank, ring.inner_size, ops,
                     VirtualExchange(mailbox, rank))
            for rank in ranks
        ]  # fmt: skip

    @torch.no_grad()
    def run(self) -> dict[str, Tensor]:
        """Compute times ``[ranks, launches]`` in ms of a forward and a backward pass."""
        with profile_ring(SpacedProfile()) as profile:
            forward = [RingForward(call, *part[:3]) for call, part in zip(self.calls, self.parts, strict=True)]
            run(forward)
            backward = [
                RingBackward(ring.call, saved_of(ring), part[3]) for ring, part in zip(forward, self.parts, strict=True)
            ]
            run(backward)
        passes = profile.read()
        return {phase: time_table(passes, phase) for phase in PHASES}


def compute_tables(
    tensors: tuple[Tensor, ...], index: Index, case: Case, ring: Ring, repeats: int, warm_up: bool = False
) -> dict[str, Tensor]:
    """Plays all ranks; the least times of the repeats."""
    ranks = PlayedRanks(tensors, index, case, ring)
    found = [ranks.run() for _ in range(repeats + warm_up)][warm_up:]
    return {phase: torch.stack([tables[phase] for tables in found]).amin(0) for phase in PHASES}


def with_links(tables: dict[str, Tensor], case: Case, ring: Ring, shape: Shape, links: Links) -> dict[str, Timeline]:
    """The passes with the simulator's links; the tables hold the adding of partial gradients already."""
    key_bytes, grad_bytes = shape.chunk_bytes(ring.cp_size), shape.chunk_bytes(ring.cp_size, 4)
    found = {}
    for phase, table in tables.items():
        backward = phase == "backward"
        plan = ring.plan(backward, case.launched(ring, shape.seq_len // ring.cp_size, backward))
        found[phase] = simulate(ring, plan, table.double().numpy() / 1e3, links, key_bytes, grad_bytes)
    return found


def play(
    problem: Problem, tensors: tuple[Tensor, ...], case: Case, ring: Ring, index: Index, repeats: int = 2,
    warm_up: bool = True,
) -> Played:  # fmt: skip
    """Measures one case; with ``warm_up`` one more run goes before."""
    tables = compute_tables(tensors, index, case, ring, repeats, warm_up)
    shape = Shape(problem.seq_len, problem.heads, problem.kv_heads, problem.head_dim)
    return Played(tables, with_links(tables, case, ring, shape, H200_LINKS))


def in_time(table: Tensor, phase: str, one_chunk: bool) -> dict[str, float]:
    """Imbalance degrees of the times of the launches without columns (forward's last and backward's first have them).

    Step level is said only where all launches have one chunk.
    """
    slash = table[:, :-1] if phase == "forward" else table[:, 1:]
    degrees = imbalance_degrees(slash if slash.shape[1] else table)
    degrees["total"] = imbalance_degrees(table)["total"]
    if not one_chunk:
        del degrees["step"]
    return {f"time_{name}": round(value, 3) for name, value in degrees.items()}


def rows_of(problem: Problem, case: Case, ring: Ring, index: Index, played: Played) -> list[Row]:
    """A row a phase."""
    rows = []
    layout = case.layout_of(problem.seq_len, ring)
    common = describe(problem, case.name, ring, index) | in_pairs(index, layout, ring)
    flops = problem.head_dim * float(index.pairs().sum()) / ring.cp_size
    for phase, table in played.tables.items():
        busy, line = float(table.sum(1).mean()), played.timelines[phase]
        most = case.launched(ring, layout.local_seq_len, phase == "backward")
        rows.append(
            common | {"pass": phase, "launches": table.shape[1], "compute_ms": round(busy, 3),
                      "slowest_ms": round(float(table.sum(1).max()), 3),
                      "tflops": round((4 if phase == "forward" else 10) * flops / busy / 1e9, 1)}
            | in_time(table, phase, most == 1)
            | {"simulated_ms": round(line.seconds * 1e3, 3),
               "exposed_ms": round(float(line.exposed.sum(1).mean()) * 1e3, 3),
               "compute_share": round(line.compute_share, 3),
               "per_launch_ms": [round(x, 4) for x in table.mean(0).tolist()],
               "table_ms": [[round(x, 4) for x in ranks] for ranks in table.tolist()]}
        )  # fmt: skip
    return rows


def play_case(
    problem: Problem, tensors: tuple[Tensor, ...], case: Case, node: tuple[int, int], index: Index
) -> list[Row]:
    """Measures a case on ``(nodes, ranks a node)`` and describes it. Dense attention of long sequences runs once."""
    nodes, inner = node
    ring = case.ring(nodes * inner, inner)
    used = case_index(problem, case, index) if case.dense else index  # type: ignore[arg-type]
    played = play(problem, tensors, case, ring, used, 1 if case.dense else 2, warm_up=not case.dense)
    return rows_of(problem, case, ring, used, played)
