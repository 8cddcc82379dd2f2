"""Speed of the attention operators and of the index estimation, beside other implementations, on the same inputs.

    python -m benchmarks.bench_ops --out benchmarks/results

Rates are on useful pairs: forward ``4 * dim * pairs`` FLOPs, backward ``10 * dim * pairs`` (docs/design.md, "Cost"). The
most telling measurements come first; with ``--budget`` those that no longer fit are left out and named in the results, as
are passes of more than six seconds. Passes of more than a second run once, shorter ones two to five times.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import minference, ours, peers
from benchmarks.plan import BACKWARD, FORWARD, LONGEST, Repeats, Task, plan, seconds_of
from benchmarks.problems import BlockLists, Problem
from benchmarks.rows import Results
from benchmarks.timing import Measured, captured, matmul_tflops, measure, measure_in_turn
from megatron_mtraining import Layout, VerticalSlashIndex
from megatron_mtraining.ops import native


class Bench:
    """What one run measures."""

    def __init__(self, results: Results, kernels: list[str], args: argparse.Namespace) -> None:
        self.results, self.kernels = results, kernels
        self.wanted: list[str] | None = args.impls
        self.dense_peers, self.slash_peers = list(peers.dense()), list(peers.slash())
        self.sparse = peers.sparse(args.minference)
        self.sparse_peers = list(self.sparse)
        self.held: tuple[tuple[int, ...], tuple[Tensor, ...]] | None = None
        self.held_index: tuple[Problem, VerticalSlashIndex] | None = None

    def wants(self, impl: str) -> bool:
        """Whether this implementation is to be measured."""
        return self.wanted is None or any(impl.startswith(name) for name in self.wanted)

    def run(self, task: Task) -> None:
        """One group of measurements."""
        problem, impl = task.problem, task.impl
        if task.what == "dense":
            self.peer(problem, impl, peers.dense()[impl], task.pairs)
        elif task.what == "slash":
            # Whole blocks of 128 and no columns: an easier problem.
            lists = BlockLists.of(self.index_of(problem))
            self.peer(problem, impl, peers.slash()[impl](lists), lists.pairs)
        elif task.what == "sparse":
            self.same_mask(problem, impl)
        elif task.what == "ours":
            self.ours(problem, impl)
        elif task.what == "share":
            self.share(problem, task.cp_size, impl)
        else:
            self.index(problem)

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

    def index_of(self, problem: Problem) -> VerticalSlashIndex:
        """The index of a problem, one at a time."""
        if self.held_index is None or self.held_index[0] != problem:
            self.held_index = (problem, problem.index())
        return self.held_index[1]

    def add(
        self,
        problem: Problem,
        impl: str,
        kind: str,
        run: Callable[[], object],
        flops: float,
        density: float,
        **more: object,
    ) -> bool:
        """Measures one pass unless it takes too long; whether it ran."""
        seconds = seconds_of(impl, kind, flops)
        if seconds > LONGEST:
            shape = f"{problem.seq_len} {problem.heads}/{problem.kv_heads}/{problem.head_dim}"
            self.results.skipped.append(f"{impl} {kind} {shape} at density {density:.3g} (about {seconds:.0f} s)")
            return False
        times = Repeats.of(seconds)
        measured = measure(run, times.repeats, times.budget_ms, times.warm_up)
        self.results.add(problem, impl, kind, measured, flops, density, **more)
        return True

    def peer(self, problem: Problem, impl: str, attend: peers.Attend, pairs: float) -> None:
        """Both passes of another implementation that works off ``pairs``."""
        passes = peers.Passes(attend, self.tensors(problem))
        density, flops = pairs / (problem.heads * problem.seq_len**2 / 2), problem.head_dim * pairs
        if self.add(problem, impl, "forward", passes.forward, FORWARD * flops, density):
            self.add(problem, impl, "backward", passes.backward, BACKWARD * flops, density)

    def ours(self, problem: Problem, impl: str) -> None:
        """Our operators on one rank that holds everything; backward in both modes where they differ."""
        q, k, v, dout = self.tensors(problem)
        index = self.index_of(problem)
        density, flops = float(index.density()), problem.head_dim * float(index.pairs().sum())
        kernel = impl.removeprefix("mtraining-")
        share = ours.Share(q, k[None], v[None], dout, index, Layout.striped(problem.seq_len, 1), 0, kernel)
        if not self.add(problem, impl, "forward", share.forward, FORWARD * flops, density):
            return
        share.allocate_gradients()
        self.add(problem, impl, "backward", share.backward, BACKWARD * flops, density)
        if kernel != "sm80" and problem.density is None:  # the general kernels have one mode
            share.deterministic = False
            self.add(problem, f"{impl}-fast", "backward", share.backward, BACKWARD * flops, density)

    def same_mask(self, problem: Problem, impl: str) -> None:
        """Both passes of another implementation on the same mask; the forward passes also in turn with ours."""
        index = self.index_of(problem)
        attend, pairs = self.sparse[impl](index), float(index.pairs().sum())
        self.peer(problem, impl, attend, pairs)
        q, k, v, dout = self.tensors(problem)
        whole = Layout.striped(problem.seq_len, 1)
        runs: dict[str, Callable[[], object]] = {impl: peers.Passes(attend, (q, k, v, dout)).forward}
        for kernel in self.kernels:
            runs[f"mtraining-{kernel}"] = ours.Share(q, k[None], v[None], dout, index, whole, 0, kernel).forward
        density, flops = float(index.density()), FORWARD * problem.head_dim * pairs
        for name, measured in measure_in_turn(runs).items():
            self.results.add(problem, name, "forward", measured, flops, density, launch="in turn")

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

    def share(self, problem: Problem, cp_size: int, impl: str) -> None:
        """One rank's share of a ring: real chunk shapes, all ring steps, no traffic; and the same in fewer launches."""
        layout, rank, index = Layout.striped(problem.seq_len, cp_size), cp_size // 2, self.index_of(problem)
        q, k, v, dout = self.tensors(problem)
        chunk_k, chunk_v = (torch.stack([layout.shard(x, r) for r in range(cp_size)]) for x in (k, v))
        local_q, local_dout = layout.shard(q, rank), layout.shard(dout, rank)
        flops = problem.head_dim * ours.share_pairs(index, layout, rank)
        density = flops / problem.head_dim * cp_size / (problem.heads * problem.seq_len**2 / 2)
        kernel = impl.removeprefix("mtraining-")
        for per_launch in sorted({1, min(4, cp_size), cp_size}):
            share = ours.Share(
                local_q, chunk_k, chunk_v, local_dout, index, layout, rank, kernel, chunks_per_launch=per_launch
            )
            more: dict[str, object] = {"cp_size": cp_size, "chunks_per_launch": per_launch}
            share.allocate_gradients()
            for kind, run, factor in (("forward", share.forward, FORWARD), ("backward", share.backward, BACKWARD)):
                self.add(problem, impl, kind, run, factor * flops, density, **more)
                if share.launches > 4:
                    self.add(problem, impl, kind, captured(run), factor * flops, density, launch="graph", **more)


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
    parser.add_argument(
        "--minference", type=minference.checkout, help="a checkout of microsoft/MInference, for the authors' kernel"
    )
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
    bench = Bench(results, args.kernels or runs, args)
    for task in plan(bench, args):
        left = args.budget - (time.perf_counter() - begin)
        if task.seconds > left:
            results.skipped.append(task.name)
            continue
        try:
            bench.run(task)
        except Exception as error:  # one implementation's failure does not cost the others' rows
            traceback.print_exc()
            results.failed.append(f"{task.name}: {str(error).splitlines()[0] if str(error) else repr(error)}")
        print(f"# {task.name}: {time.perf_counter() - begin:.1f} s", flush=True)
    results.write()
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
