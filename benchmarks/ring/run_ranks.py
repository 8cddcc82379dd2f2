"""``benchmarks.bench_ring`` on real ranks: what is run, in which order, by each process under torchrun."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.problems import Problem
from benchmarks.ring import hosts
from benchmarks.ring.cases import Case, Row, comparison, pattern_index
from benchmarks.ring.output import write
from benchmarks.ring.real import Conditions, ring_groups
from benchmarks.ring.real_rows import dense_rows, real_rows
from benchmarks.ring.throttle import SlowLinks, Throttle
from megatron_mtraining.comm import RingGroups
from megatron_mtraining.ring_op import forget_contexts
from megatron_mtraining.simulator.timeline import Ring

MODULE = "benchmarks.bench_ring"
ALONE = ("ours, one rank", "dense, one rank")
"""Cases of a single rank."""


def real_cases(cp_size: int, inner_size: int, with_dense: bool) -> list[tuple[Case, Ring]]:
    """The rings to compare on real ranks. A single rank has one. With nodes of one rank the hierarchical ring does what the
    flat one does, but over its outer channels, which a slow link is put into: it is there alone.
    """
    if cp_size == 1:
        found = [Case(ALONE[0])] + [Case(ALONE[1], dense=True)] * with_dense
        return [(case, Ring(1, 1, 1)) for case in found]
    found = comparison(cp_size // inner_size, with_dense)
    made = [(case, case.ring(cp_size, inner_size)) for case in found if case.chunks is None or cp_size > 2]
    alone = [case.hierarchical and not (case.rotated or case.dense) for case, _ in made]
    return [pair for pair, kept in zip(made, alone, strict=True) if inner_size > 1 or kept]


def throttled_cases(cp_size: int, inner_size: int) -> list[tuple[Case, Ring]]:
    """What is compared over a slow link: the flat and the hierarchical ring, striped and zigzag. None within one node."""
    if inner_size == cp_size:
        return []
    return [
        (case, ring)
        for case, ring in real_cases(cp_size, inner_size, False)
        if case.chunks is None and not case.rotated
    ]


def runs(
    cp_size: int, inner_sizes: list[int], slow: SlowLinks, with_dense: bool
) -> Iterator[tuple[Case, Ring, Throttle | None]]:
    """Everything that is run for a length: all rings over the links as they are, then those over slow ones."""
    for inner in inner_sizes:
        for case, ring in real_cases(cp_size, inner, with_dense):
            yield case, ring, None
        for throttle in slow.throttles(inner):
            for case, ring in throttled_cases(cp_size, inner):
                yield case, ring, throttle


def set_up(args: argparse.Namespace) -> torch.device:
    """Joins the ranks; the device of this one."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return torch.device("cpu")
    local = int(os.environ["LOCAL_RANK"])
    if args.pretend_hosts:
        size = hosts.local_size(world, args.pretend_hosts, torch.cuda.device_count())
        os.environ.update(hosts.environment(rank, size))
        local = rank % size
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def file_name(args: argparse.Namespace, size: int) -> str:
    """Of the results."""
    if args.pretend_hosts:
        return f"ring-DATE-{size}-ranks-{args.pretend_hosts}-pretended-hosts"
    unit = "rank" if args.device == "cpu" else "gpu"
    pattern = "" if args.pattern == "reference" else f"-{args.pattern}"
    return f"ring-DATE-{size}-{unit}{'s' * (size > 1)}{pattern}"


def length_rows(
    args: argparse.Namespace, problem: Problem, groups: Callable[[Ring], RingGroups], conditions: Conditions
) -> Iterator[list[Row]]:
    """The rows of a length, case by case."""
    size, index = dist.get_world_size(), pattern_index(problem, args.pattern)
    slow = SlowLinks(tuple(args.outer_gbs), args.outer_us, tuple(args.outer_by))
    for case, ring, throttle in runs(size, args.inner, slow, args.dense):
        if args.cases is None or case.name in args.cases:
            yield real_rows(problem, case, ring, groups(ring), index, replace(conditions, throttle=throttle))
    if args.peer and not args.pretend_hosts:
        if problem.device == "cuda":
            torch.cuda.empty_cache()
        yield dense_rows(problem, Ring(size, size, args.inner[0]), conditions)


def run(args: argparse.Namespace) -> None:
    """This process's rank of a run under torchrun; rank 0 writes the rows as they come."""
    device = set_up(args)
    size = dist.get_world_size()
    made = {inner: ring_groups(inner) for inner in dict.fromkeys([*args.inner, size])}
    rows: list[Row] = []
    for seq_len in args.seq_lens:
        problem = Problem(seq_len, *args.heads, device=device.type)
        conditions = Conditions(None, args.pretend_hosts, args.repeats)
        for found in length_rows(args, problem, lambda ring: made[ring.inner_size], conditions):
            rows.extend(found)
            if dist.get_rank() == 0:
                write(rows, args.out, MODULE, file_name(args, size))
                print(json.dumps(found), flush=True)
    dist.barrier()
    forget_contexts()
    made.clear()
    dist.destroy_process_group()
