"""Speed of the attention operators and of the index estimation, beside other implementations, on the same inputs.

    python -m benchmarks.bench_ops --out benchmarks/results

Rates are on useful pairs: forward ``4 * dim * pairs`` FLOPs, backward ``10 * dim * pairs`` (docs/design.md, "Cost"). The
most telling measurements come first; with ``--budget`` those that no longer fit are left out and named in the results.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import ours, peers
from benchmarks.problems import BlockLists, Problem
from benchmarks.rows import DENSE, Results
from benchmarks.timing import Measured, captured, matmul_tflops, measure
from megatron_mtraining import Layout
from megatron_mtraining.ops import native

FORWARD, BACKWARD = 4, 10
"""FLOPs per pair and head dimension."""


@dataclass(frozen=True)
class Task:
    """One group of measurements.

    Attributes:
        pairs: query-key pairs, times head dimension: what its cost is guessed from.
    """

    name: str
    pairs: float
    run: Callable[[], None]

    @property
    def seconds(self) -> float:
        """A guess: warm-up and repetitions of both passes at 400 TFLOP/s, at least half a second."""
        once = (FORWARD + BACKWARD) * self.pairs / 4e14
        return 0.5 + once * (1 if once > 2.5 else 6 if once < 0.4 else 3)


class Bench:
    """What one run measures."""

    def __init__(self, results: Results, kernels: list[str], impls: list[str] | None) -> None:
        self.results, self.kernels = results, kernels
        self.wanted = impls
        self.held: tuple[tuple[int, ...], tuple[Tensor, ...]] | None = None

    def wants(self, impl: str) -> bool:
        """Whether this implementation is to be measured."""
        return self.wanted is None or any(impl.startswith(name) for name in self.wanted)

    def tensors(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, dout: the same for all implementations and densities of a shape, one shape at a time."""
        shape = (problem.seq_len, problem.heads, problem.kv_heads, problem.head_dim)
        if self.held is None or self.held[0] != shape:
            self.held = None
            torch.cuda.empty_cache()
            torch.manual_seed(0)
            self.held = (shape, problem.tensors())
        q, k, v, dout = self.held[1]
        return q, k, v, dout

    def peer(self, problem: Problem, impl: str, attend: peers.Attend, pairs: float) -> None:
        """Both passes of another implementation that works off ``pairs``."""
        passes = peers.Passes(attend, self.tensors(problem))
        density = pairs / (problem.heads * problem.seq_len**2 / 2)
        long = (FORWARD + BACKWARD) * problem.head_dim * pairs > 1e15
        for kind, run, factor in (("forward", passes.forward, FORWARD), ("backward", passes.backward, BACKWARD)):
            measured = measure(run, warm_up=not long)
            self.results.add(problem, impl, kind, measured, factor * problem.head_dim * pairs, density)

    def dense(self, problem: Problem, impl: str) -> None:
        """A dense implementation."""
        self.peer(problem, impl, peers.dense()[impl], problem.heads * problem.seq_len**2 / 2)

    def slash(self, problem: Problem, impl: str) -> None:
        """An implementation over 128-blocks, on the slash blocks alone: an easier problem."""
        lists = BlockLists.of(problem.index())
        self.peer(problem, impl, peers.slash()[impl](lists), lists.pairs)

    def ours(self, problem: Problem, kernel: str) -> None:
        """Our operators on one rank that holds everything; backward in both modes where they differ."""
        q, k, v, dout = self.tensors(problem)
        index = problem.index()
        density, flops = float(index.density()), problem.head_dim * float(index.pairs().sum())
        share = ours.Share(q, k[None], v[None], dout, index, Layout.striped(problem.seq_len, 1), 0, kernel)
        long = (FORWARD + BACKWARD) * flops > 1e15
        measured = measure(share.forward, warm_up=not long)
        self.results.add(problem, f"mtraining-{kernel}", "forward", measured, FORWARD * flops, density)
        share.allocate_gradients()
        for share.deterministic, suffix in ((True, ""), (False, "-fast")):
            if suffix and (long or kernel == "sm80"):
                continue  # the general kernels have one mode
            measured = measure(share.backward, warm_up=not long)
            self.results.add(problem, f"mtraining-{kernel}{suffix}", "backward", measured, BACKWARD * flops, density)

    def index(self, problem: Problem) -> None:
        """Index estimation of the whole sequence: on an idle device, behind other work, and as a graph."""
        q, k, _, _ = self.tensors(problem)
        kernel = self.kernels[0]  # the index kernels are the same for every target
        flops = 3 * 2.0 * problem.heads * problem.head_dim * 64 * problem.seq_len  # three passes over the probe rows

        def estimate() -> None:
            ours.estimate(q, k, kernel)

        plain = measure(estimate, repeats=20)
        self.results.add(problem, "mtraining", "index", plain, flops, 1.0)
        queued = measure(estimate, repeats=20, queued=True)
        self.results.add(problem, "mtraining-queued", "index", queued, flops, 1.0, launch="queued")
        graph = Measured(measure(captured(estimate), repeats=20).ms, plain.peak_mib)
        self.results.add(problem, "mtraining-graph", "index", graph, flops, 1.0, launch="graph")

    def share(self, problem: Problem, cp_size: int, kernel: str) -> None:
        """One rank's share of a ring: real chunk shapes, all ring steps, no traffic; and the same in fewer launches."""
        layout, rank, index = Layout.striped(problem.seq_len, cp_size), cp_size // 2, problem.index()
        q, k, v, dout = self.tensors(problem)
        chunk_k, chunk_v = (torch.stack([layout.shard(x, r) for r in range(cp_size)]) for x in (k, v))
        local_q, local_dout = layout.shard(q, rank), layout.shard(dout, rank)
        flops = problem.head_dim * ours.share_pairs(index, layout, rank)
        density = flops / problem.head_dim * cp_size / (problem.heads * problem.seq_len**2 / 2)
        for per_launch in sorted({1, min(4, cp_size), cp_size}):
            share = ours.Share(
                local_q, chunk_k, chunk_v, local_dout, index, layout, rank, kernel, chunks_per_launch=per_launch
            )
            more: dict[str, object] = {"cp_size": cp_size, "chunks_per_launch": per_launch}
            share.allocate_gradients()
            for kind, run, factor in (("forward", share.forward, FORWARD), ("backward", share.backward, BACKWARD)):
                name = f"mtraining-{kernel}"
                self.results.add(problem, name, kind, measure(run), factor * flops, density, **more)
                if share.launches > 4:
                    measured = measure(captured(run))
                    self.results.add(problem, name, kind, measured, factor * flops, density, launch="graph", **more)


def plan(bench: Bench, args: argparse.Namespace) -> Iterator[Task]:
    """All measurements, the most telling first."""
    shapes = [Problem(seq_len, *map(int, heads.split("/"))) for heads in args.heads for seq_len in args.seq_lens]
    headline = next((x for x in shapes if x.seq_len == 131072), shapes[0])
    longest = Problem(max(args.seq_lens), headline.heads, headline.kv_heads, headline.head_dim)
    rest = sorted((x for x in shapes if x != headline), key=lambda x: (x.heads != headline.heads, x.seq_len))
    yield from shape_tasks(bench, headline, args, first=True)
    for cp_size in args.cp_sizes:
        for kernel in bench.kernels:
            pairs = 3 * 0.06 * longest.heads * longest.head_dim * longest.seq_len**2 / 2 / cp_size
            run = lambda c=cp_size, k=kernel: bench.share(longest, c, k)  # noqa: E731
            yield Task(f"share of W={cp_size} {kernel}", pairs, run)
    yield from shape_tasks(bench, headline, args, first=False)
    for shape in rest:
        yield from shape_tasks(bench, shape, args, first=True)
    for shape in rest:
        yield from shape_tasks(bench, shape, args, first=False)


def shape_tasks(bench: Bench, shape: Problem, args: argparse.Namespace, first: bool) -> Iterator[Task]:
    """Of one shape: dense attention, the index and the first density; or what is left."""
    size = f"{shape.seq_len} {shape.heads}/{shape.kv_heads}/{shape.head_dim}"
    whole = shape.heads * shape.head_dim * shape.seq_len**2 / 2
    if first:
        for impl in (DENSE, *(x for x in peers.dense() if x != DENSE)):
            if bench.wants(impl) and (impl != "flash-attention-2" or shape.seq_len <= args.longest_slow):
                yield Task(f"{impl} {size}", whole, lambda impl=impl: bench.dense(shape, impl))
        if bench.wants("mtraining"):
            yield Task(f"index {size}", 0.0, lambda: bench.index(shape))
    for density in args.densities[:1] if first else args.densities[1:]:
        problem = replace(shape, density=density or None)
        pairs = whole * (density or 0.06)
        for kernel in bench.kernels if bench.wants("mtraining") else ():
            run = lambda p=problem, k=kernel: bench.ours(p, k)  # noqa: E731
            yield Task(f"{kernel} {size} at {density or 'the reference density'}", pairs, run)
        for impl in peers.slash() if density < 1 else ():
            if bench.wants(impl) and (impl != "flex-slash-128" or shape.seq_len <= args.longest_slow):
                yield Task(f"{impl} {size} at {density}", pairs, lambda p=problem, i=impl: bench.slash(p, i))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[32768, 131072, 524288])
    parser.add_argument(
        "--heads", nargs="+", default=["16/2/128", "32/8/128", "9/3/64"], help="heads/kv_heads/head_dim"
    )
    parser.add_argument(
        "--densities", type=float, nargs="+", default=[0.0, 0.02, 0.05, 0.1, 1.0], help="0: the reference pattern"
    )
    parser.add_argument("--kernels", nargs="+", default=None, help="sm80, sm90 (default: all that run here)")
    parser.add_argument("--cp-sizes", type=int, nargs="*", default=[8, 32], help="shares of one rank, longest seq_len")
    parser.add_argument("--impls", nargs="+", default=None, help="only implementations whose names begin so")
    parser.add_argument(
        "--longest-slow", type=int, default=131072, help="longest sequence for FlashAttention-2 and FlexAttention"
    )
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds; what does not fit is left out")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON and Markdown results")
    return parser.parse_args()


def main() -> int:
    """Runs the benchmark; the results are written as they come."""
    begin, args = time.perf_counter(), arguments()
    info = native.load()
    major = torch.cuda.get_device_capability()[0]
    runs = [f"sm{a}" for a in sorted(info.architectures, reverse=True) if (major >= 8 if a == 80 else major == 9)]
    results = Results(matmul_tflops(), args.out)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16 matmul {results.matmul:.0f} TFLOP/s")
    bench = Bench(results, args.kernels or runs, args.impls)
    for task in plan(bench, args):
        left = args.budget - (time.perf_counter() - begin)
        if task.seconds > left:
            results.skipped.append(task.name)
            continue
        try:
            task.run()
        except Exception as error:  # one implementation's failure does not cost the others' rows
            traceback.print_exc()
            results.failed.append(f"{task.name}: {str(error).splitlines()[0] if str(error) else repr(error)}")
        print(f"# {task.name}: {time.perf_counter() - begin:.1f} s", flush=True)
    results.write()
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
