"""Ranks played on one device: the compute time of every rank and launch, without traffic; the simulator adds the links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.problems import Problem
from benchmarks.ring.cases import Case, Row, case_index, describe, in_pairs
from megatron_mtraining.block_lists import Index
from megatron_mtraining.metrics import imbalance_degrees
from megatron_mtraining.ring_profile import PassTimes, profile_ring
from megatron_mtraining.simulator import H200_LINKS, Links, Shape
from megatron_mtraining.simulator.timeline import Ring, Timeline, simulate
from megatron_mtraining.testing import run_virtual

PHASES = ("forward", "backward")
LEAD_CYCLES = 120_000_000
"""Work in front of a pass, about 65 ms: the host prepares all ranks meanwhile, and launches then run ahead of the device,
as in a model."""


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


def lead(device: str) -> None:
    """Occupies the device for a while."""
    if device.startswith("cuda"):
        torch.cuda._sleep(LEAD_CYCLES)


def compute_tables(
    tensors: tuple[Tensor, ...], index: Index, case: Case, ring: Ring, repeats: int, device: str
) -> dict[str, Tensor]:
    """Plays all ranks ``repeats`` times; the least times."""
    q, k, v, dout = tensors
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    layout = case.layout_of(q.shape[1], ring)
    tables: dict[str, list[Tensor]] = {phase: [] for phase in PHASES}
    for _ in range(repeats):
        with profile_ring() as profile:
            lead(device)
            out = run_virtual(
                *leaves, layout=layout, config=case.config(ring), inner_size=ring.inner_size, index=index
            )  # fmt: skip
            lead(device)
            torch.autograd.grad(out, leaves, dout)
        passes = profile.read()
        for phase, found in tables.items():
            found.append(time_table(passes, phase))
        del out
    return {phase: torch.stack(found).amin(0) for phase, found in tables.items()}


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
    if warm_up:
        compute_tables(tensors, index, case, ring, 1, problem.device)
    tables = compute_tables(tensors, index, case, ring, repeats, problem.device)
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
