"""Rows of rings on real ranks: times of the slowest rank, what was hidden, what was sent, and the simulator's prediction."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.problems import Problem
from benchmarks.ring import megatron_dense
from benchmarks.ring.cases import Case, Row, case_index
from benchmarks.ring.gathered import GatheredRanks
from benchmarks.ring.prediction import (
    FACTORS,
    Forecast,
    Traffic,
    common_columns,
    dense_columns,
    gathered_name,
    planned_traffic,
    predicted,
    predicted_gathered,
    shape_of,
    tflops,
)
from benchmarks.ring.real import WALL, Conditions, RealRank, everyone, slowest
from benchmarks.timing import Marks
from megatron_mtraining import VerticalSlashIndex
from megatron_mtraining.comm import RingGroups
from megatron_mtraining.metrics import imbalance_degrees
from megatron_mtraining.ring_profile import PassTimes
from megatron_mtraining.simulator.timeline import Ring

LONG_MS = 1000.0
"""Calls that are predicted to take longer are timed once."""


def sent(times: PassTimes) -> Traffic:
    """Bytes that this rank sent in a pass."""
    outer = sum(t.sent_bytes for t in times.transfers if t.channel.startswith("outer"))
    return Traffic(sum(t.sent_bytes for t in times.transfers) - outer, outer)


def slow_exchange_ms(times: PassTimes) -> float:
    """Mean duration of the exchanges over the outer ring (a flat ring: of all); 0 without any."""
    outer = [t for t in times.transfers if t.channel.startswith("outer")] or times.transfers
    return statistics.fmean(t.end - t.begin for t in outer) if outer else 0.0


def pass_row(found: list[PassTimes]) -> Row:
    """What the profile says of one phase, over all ranks: the slowest of each value, the least hidden."""
    mine = {
        name: statistics.median(getattr(p, name) for p in found) for name in ("exposed_ms", "transfer_ms", "tail_ms")
    }
    mine["slow_exchange_ms"] = statistics.median(map(slow_exchange_ms, found))
    hidden = statistics.median(p.hidden for p in found)
    compute = [statistics.median(p.launches[i].compute_ms for p in found) for i in range(len(found[0].launches))]
    ranks = everyone({"hidden": hidden, "compute": compute})
    table = torch.tensor([r["compute"] for r in ranks])
    return (
        {name: round(value, 3) for name, value in slowest(mine).items()}
        | {"hidden": round(min(r["hidden"] for r in ranks), 3)}  # type: ignore[type-var]
        | {f"time_{name}": round(value, 3) for name, value in imbalance_degrees(table).items()}
        | {"per_launch_ms": [[round(x, 3) for x in r["compute"]] for r in ranks]}  # type: ignore[union-attr]
    )


def timed_rows(rank: RealRank, passes: int) -> list[Row]:
    """Rows of a case with times (those of the slowest rank), on GPUs each with its prediction; so many calls are timed."""
    wall = [rank.wall_times() for _ in range(passes + 1)][1:]
    found = [times for _ in range(passes) for times in rank.profiled()]
    median = slowest({name: statistics.median(times[name] for times in wall) for name in WALL})
    problem, index, size = rank.problem, rank.index, rank.ring.cp_size
    on_gpu = rank.problem.device == "cuda"
    forecast = predicted(problem, rank.case, rank.ring, index, rank.conditions.throttle) if on_gpu else {}
    common = common_columns(problem, rank.case, rank.ring, index, rank.layout) | rank.conditions.columns()
    rows = []
    for name in WALL:
        if rank.case.dense and name == "index":
            continue
        row = common | {"pass": name, "ms": round(median[name], 3)} | forecast.get(name, {})
        if name in FACTORS:
            row["tflops"] = tflops(problem, index, size, name, median[name])
        if name in ("forward", "backward"):
            mine = [p for p in found if p.phase == name]
            row |= pass_row(mine) | sent(mine[0]).columns()
        rows.append(row)
    return rows


def checked_rows(rank: RealRank) -> list[Row]:
    """Rows of a case without times: bytes that this rank sent, those that the plan asks for, whether every rank sent these, and
    whether the bits are right.
    """
    passes = rank.profiled()
    equal = rank.bits_equal()
    common = common_columns(rank.problem, rank.case, rank.ring, rank.index, rank.layout) | rank.conditions.columns()
    size, rows = rank.ring.cp_size, []
    for times in passes:
        backward = times.phase == "backward"
        plan = rank.ring.plan(backward, rank.case.launched(rank.ring, rank.layout.local_seq_len, backward))
        shape = shape_of(rank.problem)
        planned = planned_traffic(plan, shape.chunk_bytes(size), shape.chunk_bytes(size, 4))
        columns = sent(times).columns() | planned.columns("planned_")
        columns["every_rank_as_planned"] = all(everyone(sent(times).columns() == planned.columns()))
        columns["bits_equal_one_process"] = equal
        rows.append(common | {"pass": times.phase} | columns)
    return rows


def real_rows(
    problem: Problem, case: Case, ring: Ring, groups: RingGroups, index: VerticalSlashIndex, conditions: Conditions
) -> list[Row]:
    """Rows of a case: index, forward, backward, and the call of all three; without times on pretended hosts."""
    rank = RealRank(problem, case, ring, groups, case_index(problem, case, index), conditions)
    if conditions.pretended_hosts:
        return checked_rows(rank)
    call_ms = predicted(problem, case, ring, rank.index, conditions.throttle)["call"]["predicted_ms"]
    few = min(2, conditions.repeats) if case.dense else conditions.repeats
    return timed_rows(rank, 1 if call_ms > LONG_MS else few)


def together(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median milliseconds of what all ranks do together, this rank's; they begin each repetition together, after one that is
    not timed: one that plans longer than another would be waited for in the next collective.
    """
    run()
    times = []
    for _ in range(repeats):
        dist.barrier()
        marks = Marks(device)
        marks.begin()
        run()
        marks.mark()
        times += marks.read()
    return statistics.median(times)


def dense_rows(problem: Problem, ring: Ring, conditions: Conditions) -> list[Row]:
    """Dense attention on the same ranks: cuDNN with gathered keys (one rank: all of it), and Transformer Engine's ring."""
    torch.manual_seed(0)
    ranks = GatheredRanks(problem.tensors(), dist.group.WORLD)
    device = ranks.local[0].device
    forecast = predicted_gathered(problem, ring.cp_size, ring.node_size)
    repeats = 1 if forecast["call"]["predicted_ms"] > LONG_MS else 2
    found = {
        phase: together(run, device, repeats)
        for phase, run in (("forward", ranks.forward), ("backward", ranks.backward))
    }
    found["call"] = sum(found.values())
    del ranks
    name = gathered_name(ring.cp_size)
    rows = dense_row(name, problem, ring, found, forecast if problem.device == "cuda" else {}, conditions)
    if megatron_dense.installed():
        torch.cuda.empty_cache()
        times = megatron_dense.measured(problem.tensors(), dist.group.WORLD)
        rows += dense_row("Transformer Engine dense, p2p", problem, ring, times, {}, conditions)
    return rows


def dense_row(
    name: str, problem: Problem, ring: Ring, times: dict[str, float], forecast: Forecast, conditions: Conditions
) -> list[Row]:
    """Rows of a dense implementation, the slowest rank's; nothing is predicted for Transformer Engine."""
    common = dense_columns(name, problem, ring) | conditions.columns()
    pairs = problem.heads * problem.seq_len**2 / 2
    return [
        common
        | {"pass": phase, "ms": round(ms, 3)}
        | (forecast[phase] if forecast else {"predicted_ms": None})
        | {"tflops": round(FACTORS[phase] * problem.head_dim * pairs / ring.cp_size / ms / 1e9, 1)}
        for phase, ms in slowest(times).items()
    ]
