"""Speed of the attention operators and of the index estimation, beside other implementations, on the same inputs.

    python -m benchmarks.bench_ops --out benchmarks/results

Rates are on useful pairs: forward ``4 * dim * pairs`` FLOPs, backward ``10 * dim * pairs`` (docs/design.md, "Cost").
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import torch

from benchmarks import ours, peers
from benchmarks.problems import Problem
from benchmarks.timing import matmul_tflops, median_ms, peak_mib
from megatron_mtraining import Layout, VerticalSlashIndex
from megatron_mtraining.ops import native

Row = dict[str, object]


class Bench:
    """Collects the rows of one run."""

    def __init__(self, kernels: list[str], with_peers: bool, deterministic_only: bool) -> None:
        self.kernels, self.with_peers = kernels, with_peers
        self.modes = (True,) if deterministic_only else (True, False)
        self.rows: list[Row] = []
        self.matmul = matmul_tflops()

    def add(self, problem: Problem, impl: str, kind: str, ms: float, flops: float, **more: object) -> None:
        """One measurement."""
        tflops = flops / ms / 1e9
        row: Row = {
            "impl": impl, "pass": kind, "seq_len": problem.seq_len, "heads": problem.heads,
            "kv_heads": problem.kv_heads, "head_dim": problem.head_dim, "ms": round(ms, 4),
            "tflops": round(tflops, 1), "of_matmul": round(tflops / self.matmul, 3), **more,
        }  # fmt: skip
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def dense(self, problem: Problem) -> dict[str, float]:
        """Dense peers; returns cuDNN's times."""
        times: dict[str, float] = {}
        pairs = problem.heads * problem.seq_len**2 / 2
        found = dict(peers.DENSE)
        flash4 = peers.flash4()
        if flash4 is not None:
            found["flash-attention-4"] = flash4
        for impl, attend in found.items():
            for kind, run in zip(("forward", "backward"), peers.passes(attend, *problem.tensors()), strict=True):
                ms = median_ms(run)
                self.add(
                    problem, impl, kind, ms, (4 if kind == "forward" else 10) * problem.head_dim * pairs, density=1.0
                )
                if impl == "cudnn":
                    times[kind] = ms
        return times

    def flex(self, problem: Problem, index: VerticalSlashIndex) -> None:
        """FlexAttention on the slash blocks alone, an easier problem."""
        attend, pairs = peers.flex_slash(problem, index)
        density = round(pairs / (problem.heads * problem.seq_len**2 / 2), 4)
        for kind, run in zip(("forward", "backward"), peers.passes(attend, *problem.tensors()), strict=True):
            flops = (4 if kind == "forward" else 10) * problem.head_dim * pairs
            self.add(problem, "flex-slash-128", kind, median_ms(run), flops, density=density)

    def ours(self, problem: Problem, index: VerticalSlashIndex, dense: dict[str, float]) -> None:
        """Our operators on one rank that holds everything."""
        q, k, v, dout = problem.tensors()
        density = float(index.density())
        flops = problem.head_dim * float(index.pairs().sum())
        layout = Layout.striped(problem.seq_len, 1)
        for kernel in self.kernels:
            share = ours.Share(q, k[None], v[None], dout, index, layout, 0, kernel)
            memory = peak_mib(share.forward)
            self._row(
                problem, f"mtraining-{kernel}", "forward", median_ms(share.forward), 4 * flops, density, dense, memory
            )
            share.allocate_gradients()
            for share.deterministic in self.modes:
                name = f"mtraining-{kernel}" + ("" if share.deterministic else "-fast")
                memory = peak_mib(share.backward)
                ms = median_ms(share.backward)
                self._row(problem, name, "backward", ms, 10 * flops, density, dense, memory)

    def _row(
        self, problem: Problem, impl: str, kind: str, ms: float, flops: float, density: float, dense: dict[str, float],
        memory: float,
    ) -> None:  # fmt: skip
        more: Row = {"density": round(density, 4), "peak_mib": round(memory, 1)}
        if kind in dense:
            speed_up = dense[kind] / ms
            more |= {"speed_up": round(speed_up, 2), "of_ideal": round(speed_up * density, 3)}
        self.add(problem, impl, kind, ms, flops, **more)

    def index(self, problem: Problem) -> None:
        """Index estimation of the whole sequence: launched from Python, and as a graph (the device's time alone)."""
        q, k, _, _ = problem.tensors()
        flops = 3 * 2.0 * problem.heads * problem.head_dim * 64 * problem.seq_len
        kernel = self.kernels[0]  # the index kernels are the same for every target

        def estimate() -> VerticalSlashIndex:
            return ours.estimate(q, k, kernel)

        memory = round(peak_mib(estimate), 1)
        self.add(problem, "mtraining", "index", median_ms(estimate, repeats=20), flops, peak_mib=memory)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            estimate()
        self.add(problem, "mtraining-graph", "index", median_ms(graph.replay, repeats=20), flops, peak_mib=memory)

    def share(self, problem: Problem, index: VerticalSlashIndex, cp_size: int) -> None:
        """One rank's share of a ring: real chunk shapes, all ring steps, no traffic; and the same in fewer launches."""
        layout = Layout.striped(problem.seq_len, cp_size)
        q, k, v, dout = problem.tensors()
        rank = cp_size // 2
        chunk_k, chunk_v = (torch.stack([layout.shard(x, r) for r in range(cp_size)]) for x in (k, v))
        local_q, local_dout = layout.shard(q, rank), layout.shard(dout, rank)
        del q, k, v, dout
        flops = problem.head_dim * share_pairs(index, layout, rank)
        for kernel in self.kernels:
            for per_launch in sorted({1, min(4, cp_size), cp_size}):
                share = ours.Share(
                    local_q, chunk_k, chunk_v, local_dout, index, layout, rank, kernel, chunks_per_launch=per_launch
                )
                more = {
                    "cp_size": cp_size,
                    "chunks_per_launch": per_launch,
                    "density": round(float(index.density()), 4),
                }
                self.add(problem, f"mtraining-{kernel}", "forward", median_ms(share.forward), 4 * flops, **more)
                share.allocate_gradients()
                self.add(problem, f"mtraining-{kernel}", "backward", median_ms(share.backward), 10 * flops, **more)


def share_pairs(index: VerticalSlashIndex, layout: Layout, rank: int) -> float:
    """Pairs of one rank's queries: by the definitions, from the bitmaps (one document)."""
    slash, columns = index.slash_bits()[0], index.column_bits()[0]
    per_block = columns.unflatten(-1, (-1, 64)).sum(-1).double()
    total = 0.0
    for block in layout.block_position[rank].tolist():
        kept = slash[:, : block + 1].flip(-1)  # entry j: key block j
        total += 4096.0 * float(kept.sum()) + 64.0 * float((per_block[:, : block + 1] * ~kept).sum())
    return total


def markdown(rows: list[Row], header: str) -> str:
    """All rows as one table."""
    keys = (
        "seq_len", "heads", "kv_heads", "head_dim", "density", "cp_size", "chunks_per_launch", "impl", "pass", "ms",
        "tflops", "of_matmul", "speed_up", "of_ideal", "peak_mib",
    )  # fmt: skip
    lines = [header, "", "| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    lines += ["| " + " | ".join(str(row.get(key, "")) for key in keys) + " |" for row in rows]
    return "\n".join(lines) + "\n"


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
    parser.add_argument(
        "--longest-dense", type=int, default=131072, help="longest sequence for the other implementations"
    )
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--deterministic-only", action="store_true", help="skip the fast mode of backward")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON and Markdown results")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark and writes the results."""
    args = arguments()
    info = native.load()
    major = torch.cuda.get_device_capability()[0]
    runs = [f"sm{a}" for a in info.architectures if (major >= 8 if a == 80 else major == 9)]
    bench = Bench(args.kernels or runs, not args.no_peers, args.deterministic_only)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16 matmul {bench.matmul:.0f} TFLOP/s", flush=True
    )
    try:
        for heads in args.heads:
            for seq_len in args.seq_lens:
                run_shape(bench, Problem(seq_len, *map(int, heads.split("/"))), args)
    finally:  # what was measured before an error is kept
        if args.out and bench.rows:
            write(bench, args.out)


def run_shape(bench: Bench, shape: Problem, args: argparse.Namespace) -> None:
    """All densities of one shape."""
    dense = bench.dense(shape) if bench.with_peers and shape.seq_len <= args.longest_dense else {}
    bench.index(shape)
    for density in args.densities:
        problem = Problem(shape.seq_len, shape.heads, shape.kv_heads, shape.head_dim, density or None)
        index = problem.index()
        bench.ours(problem, index, dense)
        if not density and shape.seq_len == max(args.seq_lens):
            for cp_size in args.cp_sizes:
                bench.share(problem, index, cp_size)
    if dense:
        bench.flex(shape, shape.index())


def write(bench: Bench, folder: Path) -> None:
    """The dated JSON and Markdown files."""
    folder.mkdir(parents=True, exist_ok=True)
    date = datetime.date.today().isoformat()
    name = f"ops-{date}-{torch.cuda.get_device_name().lower().replace(' ', '-')}"
    options = " ".join(sys.argv[1:]).replace(str(folder), "benchmarks/results")
    command = f"python -m benchmarks.bench_ops {options}"
    card = {
        "date": date, "command": command, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "matmul_tflops": round(bench.matmul, 1), "note": "sm80 kernels run here on Hopper, not on an A100",
    }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps({**card, "rows": bench.rows}, indent=1) + "\n")
    header = f"# Operators on {card['device']}, {date}\n\n`{command}`, torch {card['torch']}, bf16 matmul " + (
        f"{card['matmul_tflops']} TFLOP/s in the same run. {card['note']}."
    )
    (folder / f"{name}.md").write_text(markdown(bench.rows, header))


if __name__ == "__main__":
    main()
