"""Rings and baselines compared in one run, on real ranks or on ranks played on one GPU.

    python -m benchmarks.bench_ring --virtual 4x8 --seq-lens 524288 --dense --baselines --out benchmarks/results
    torchrun --nproc-per-node 2 -m benchmarks.bench_ring --seq-lens 65536 262144 --out benchmarks/results
    torchrun --nproc-per-node 4 -m benchmarks.bench_ring --seq-lens 262144 --inner 4 2 --outer-gbs 40 10 --out DIR
    torchrun --nproc-per-node 4 -m benchmarks.bench_ring --seq-lens 65536 --inner 2 --pretend-hosts 2 --out DIR  # 2 GPUs
    python -m benchmarks.bench_ring --pairs --virtual 4x8 --seq-lens 524288           # balance alone, needs no GPU

Played ranks (NODESxRANKS): compute time of every rank and launch without traffic, its imbalance, and the pass with the links
of the simulator added (NVLink as measured, between nodes assumed). ``--baselines``: cuDNN dense with gathered keys,
head-parallel sparse attention, and the index policies on a ring. Real ranks: time of index, forward, backward and of the
call of all three (slowest rank), exposed communication, share of the transfers hidden, imbalance in time, dense attention of
cuDNN (and of Transformer Engine, where it is installed) in the same run, and beside each time what the simulator predicts.
``--outer-gbs``: once more with an artificial slow link between nodes of ``--inner`` ranks (``benchmarks.ring.throttle``).
``--pretend-hosts``: more ranks than GPUs; bytes and equality of bits, no times (``benchmarks.ring.hosts``).
Both: imbalance in pairs. `benchmarks.bench_scaling` runs this for several numbers of GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.problems import Problem
from benchmarks.ring import gathered, heads, hosts, played, run_ranks
from benchmarks.ring.cases import PATTERNS, Case, Row, comparison, in_pairs, pattern_index
from benchmarks.ring.delays import WAYS
from benchmarks.ring.output import LISTS, write
from benchmarks.structured import structured_tensors
from megatron_mtraining import MTrainingConfig, estimate_index
from megatron_mtraining.config import BLOCK, INDEX_POLICIES
from megatron_mtraining.simulator import H200_LINKS, Shape

MODULE = "benchmarks.bench_ring"
POLICY_SEQ_LEN = 131072
SPREAD = 0.6
"""Deviation of the logarithm of the heads' densities, for head-parallel attention."""


def numbers(text: str, separator: str, names: str) -> tuple[int, ...]:
    """Positive integers of an option such as 4x8.

    Raises:
        argparse.ArgumentTypeError: if these are not as many as ``names`` says.
    """
    parts = text.split(separator)
    if len(parts) != len(names.split(separator)) or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: must be {names}, positive integers")
    return tuple(map(int, parts))


def heads_of(text: str) -> tuple[int, ...]:
    """The heads of the command line."""
    found = numbers(text, "/", "heads/kv_heads/head_dim")
    if found[0] % found[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: heads must be a multiple of kv_heads")
    return found


def node_of(text: str) -> tuple[int, ...]:
    """Nodes and ranks a node of the command line."""
    return numbers(text, "x", "NODESxRANKS")


def problem_of(seq_len: int, heads: tuple[int, int, int], device: str = "cuda") -> Problem:
    """The shape of a length; ``heads``: heads, key heads and dimension of a head."""
    return Problem(seq_len, *heads, device=device)


def head_name(spread: float) -> str:
    """The case of head-parallel attention with such heads."""
    return "head-parallel, " + (f"densities spread by e^{spread}" if spread else "heads alike")


def balance(problem: Problem, node: tuple[int, int], pattern: str) -> Iterator[Row]:
    """Imbalance in pairs of all rings, and of head-parallel attention (all of its pairs: it has no steps)."""
    index = pattern_index(problem, pattern)
    for case in comparison(node[0], False):
        if case.chunks is None:  # pairs do not depend on launches
            ring = case.ring(node[0] * node[1], node[1])
            layout = case.layout_of(problem.seq_len, ring)
            yield {"case": case.name, "density": round(float(index.density()), 4), **in_pairs(index, layout, ring)}
    for spread in (SPREAD, 0.0):
        yield from heads.pair_rows(pattern_index(problem, "bands", spread), (2, 4, 8, 16), head_name(spread))


def gathered_rows(problem: Problem, tensors: tuple[torch.Tensor, ...], node: tuple[int, int]) -> Iterator[Row]:
    """cuDNN dense with gathered keys: one rank's compute, and the traffic, none of it hidden."""
    size = node[0] * node[1]
    shape = Shape(problem.seq_len, problem.heads, problem.kv_heads, problem.head_dim)
    traffic = gathered.gather_ms(shape, size, node[1], H200_LINKS)
    times = gathered.measured(tensors, size)
    for (phase, ms), exposed in zip(times.items(), traffic, strict=True):
        flops = (4 if phase == "forward" else 10) * problem.head_dim * problem.heads * problem.seq_len**2 / 2 / size
        yield {
            "case": "cuDNN dense, gathered keys", "seq_len": problem.seq_len, "heads": problem.heads,
            "kv_heads": problem.kv_heads, "head_dim": problem.head_dim, "cp_size": size, "inner_size": node[1],
            "density": 1.0, "pass": phase, "compute_ms": round(ms, 3), "tflops": round(flops / ms / 1e9, 1),
            "simulated_ms": round(ms + exposed, 3), "exposed_ms": round(exposed, 3),
            "compute_share": round(ms / (ms + exposed), 3),
        }  # fmt: skip


def head_rows(problem: Problem, tensors: tuple[torch.Tensor, ...]) -> Iterator[Row]:
    """Head-parallel sparse attention, with heads alike and with heads of different density."""
    for spread in (SPREAD, 0.0):
        index = pattern_index(problem, "bands", spread)
        for ranks in (8, 16) if spread else (8,):
            if problem.heads % ranks == 0:
                yield from heads.head_rows(problem, tensors, index, ranks, head_name(spread))


def policy_rows(shape: Problem, node: tuple[int, int]) -> Iterator[Row]:
    """Index policies on the same ring, under indices estimated from made-up queries and keys."""
    problem = replace(shape, seq_len=min(POLICY_SEQ_LEN, shape.seq_len))
    tensors = structured_tensors(
        problem.seq_len, problem.heads, problem.kv_heads, problem.head_dim, problem.device
    )  # fmt: skip
    for policy in INDEX_POLICIES:
        index = estimate_index(*tensors[:2], config=MTrainingConfig(top_p=0.9, index_policy=policy))
        case = Case(f"policy {policy}, striped", hierarchical=node[0] > 1)
        yield from played.play_case(problem, tensors, case, node, index)


def virtual_rows(problem: Problem, args: argparse.Namespace, node: tuple[int, int]) -> Iterator[Row]:
    """All ranks played on this device."""
    index = pattern_index(problem, args.pattern)
    torch.manual_seed(0)
    tensors = problem.tensors()
    for case in comparison(node[0], args.dense):
        if args.cases is None or case.name in args.cases:
            yield from played.play_case(problem, tensors, case, node, index)
    if args.baselines:
        yield from gathered_rows(problem, tensors, node)
        yield from head_rows(problem, tensors)
        yield from policy_rows(problem, (2, 4) if node[0] > 1 else (1, 8))


def positive(text: str) -> float:
    """A positive number of the command line."""
    value = number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a positive number")
    return value


def microseconds(text: str) -> float:
    """A latency of the command line."""
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of at least 0")
    return value


def number(text: str) -> float:
    """A number of the command line; not a number if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def add_real(parser: argparse.ArgumentParser) -> None:
    """Options of real ranks alone."""
    group = parser.add_argument_group("real ranks")
    group.add_argument(
        "--inner", type=int, nargs="+", default=[], help="ranks of a node, one or several (default: all)"
    )
    group.add_argument(
        "--outer-gbs",
        type=positive,
        nargs="+",
        default=[],
        metavar="GB/s",
        help="once more for each, with an artificial slow link of this bandwidth between nodes",
    )
    group.add_argument("--outer-us", type=microseconds, default=0.0, help="latency of that link in microseconds (0)")
    group.add_argument(
        "--outer-by", nargs="+", choices=WAYS, default=[], help="what holds exchanges back there (copies)"
    )
    group.add_argument(
        "--pretend-hosts",
        type=int,
        default=0,
        metavar="HOSTS",
        help="let NCCL take the ranks for those of so many hosts, so that hosts share GPUs: bytes and bits, no times",
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[65536])
    parser.add_argument("--heads", type=heads_of, default=(16, 2, 128), help="heads/kv_heads/head_dim (16/2/128)")
    parser.add_argument(
        "--virtual",
        nargs="+",
        type=node_of,
        metavar="NODESxRANKS",
        help="one or several: play all ranks here, e.g. 4x8",
    )
    parser.add_argument(
        "--pattern", choices=PATTERNS, help="the index (default: bands for played ranks, reference for real ones)"
    )
    parser.add_argument(
        "--peer",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="dense attention of cuDNN and, where it is installed, Transformer Engine beside real ranks",
    )
    parser.add_argument("--pairs", action="store_true", help="print the balance in pairs of --virtual, run nothing")
    parser.add_argument("--cases", nargs="+", help="names of the rings to play (default: all)")
    parser.add_argument("--baselines", action="store_true", help="gathered dense, head-parallel, index policies too")
    add_real(parser)
    parser.add_argument("--dense", action="store_true", help="dense attention on the same rings too")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--device",
        default="cuda",
        choices=["cuda", "cpu"],
        help="cpu: the reference operators, and gloo for real ranks",
    )
    parser.add_argument("--out", type=Path, help="folder of the JSON and Markdown results")
    args = parser.parse_args()
    known = {case.name for nodes in (1, 2) for case in comparison(nodes, True)} | set(run_ranks.ALONE)
    if args.cases is not None and not set(args.cases) <= known:
        parser.error(f"--cases: {sorted(set(args.cases) - known)} unknown, there are {sorted(known)}")
    args.pattern = args.pattern or ("bands" if args.virtual else "reference")
    if args.pairs and not args.virtual:
        parser.error("--pairs: needs --virtual")
    if args.out is None and not args.pairs:
        parser.error("--out: needed but with --pairs")
    if args.out is not None:
        check_folder(parser, args.out)
    check_run(parser, args)
    return args


def check_folder(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Ends the program with one line if there is a file where the results' folder should be."""
    if folder.exists() and not folder.is_dir():
        parser.error(f"--out {folder}: must be a folder, is a file")


def check_run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program with one line if lengths, processes or devices do not fit."""
    sizes = [nodes * inner for nodes, inner in args.virtual or ()] or [int(os.environ.get("WORLD_SIZE", "0"))]
    if not args.virtual and not sizes[0]:
        parser.error("real ranks: run it under torchrun --nproc-per-node N -m benchmarks.bench_ring, or give --virtual")
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: must be at least 1")
    check_real(parser, args, sizes[0])
    for seq_len in args.seq_lens:
        unit = 2 * BLOCK * math.lcm(*sizes)  # two zigzag chunks a rank
        if seq_len < 1 or seq_len % unit:
            parser.error(f"--seq-lens {seq_len}: must be a multiple of {unit}, two chunks of {BLOCK} tokens a rank")
    if not args.pairs and args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU; --pairs needs none, and --virtual can run with --device cpu")


def check_real(parser: argparse.ArgumentParser, args: argparse.Namespace, size: int) -> None:
    """The same for the options of real ranks."""
    given = [name for name in ("inner", "outer_gbs", "outer_us", "outer_by", "pretend_hosts") if getattr(args, name)]
    if args.virtual and given:
        parser.error(f"--{given[0].replace('_', '-')}: of real ranks, not of --virtual")
    for inner in args.inner:
        if inner < 1 or size % inner:
            parser.error(f"--inner {inner}: must divide the {size} ranks")
    if len(set(args.inner)) < len(args.inner):
        parser.error(f"--inner {' '.join(map(str, args.inner))}: must be different")
    args.inner = args.inner or [size]
    for name in ("outer_us", "outer_by"):
        if getattr(args, name) and not args.outer_gbs:
            parser.error(f"--{name.replace('_', '-')}: needs --outer-gbs")
    args.outer_by = args.outer_by or ["copies"]
    if args.outer_gbs and all(inner == size for inner in args.inner):
        parser.error(f"--outer-gbs: needs an --inner below the {size} ranks, whose nodes it lies between")
    if args.pretend_hosts and (args.device == "cpu" or args.outer_gbs):
        parser.error("--pretend-hosts: for GPUs, without --outer-gbs: such runs have no times")
    if args.virtual or args.device == "cpu" or not torch.cuda.is_available():
        return
    here, there = int(os.environ.get("LOCAL_WORLD_SIZE", size)), torch.cuda.device_count()
    if args.pretend_hosts:
        try:
            hosts.local_size(size, args.pretend_hosts, there)
        except ValueError as error:
            parser.error(f"--pretend-hosts {args.pretend_hosts}: {error}")
    elif here > there:
        parser.error(f"--nproc-per-node {here}: there are {there} GPUs; --pretend-hosts lets ranks share them")


def main() -> None:
    """Runs the benchmark and writes the results as they come."""
    args = arguments()
    if not args.virtual:
        run_ranks.run(args)
        return
    lengths = "-".join(f"{seq_len // 1024}k" for seq_len in args.seq_lens)
    for node in args.virtual:
        text, kind, rows = f"{node[0]}x{node[1]}", "pairs" if args.pairs else "virtual", []
        for seq_len in args.seq_lens:
            problem = problem_of(seq_len, args.heads, "cpu" if args.pairs else args.device)
            for row in balance(problem, node, args.pattern) if args.pairs else virtual_rows(problem, args, node):
                rows.append(row)
                if args.out is not None:
                    write(rows, args.out, MODULE, f"ring-DATE-{kind}-{text}-{lengths}")
                print(json.dumps({k: v for k, v in row.items() if k not in LISTS}), flush=True)


if __name__ == "__main__":
    main()
