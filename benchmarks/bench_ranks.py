"""Index estimation, forward and backward under context parallelism on NCCL, and the share of the first in the others.

    torchrun --nproc-per-node 2 -m benchmarks.bench_ranks --out benchmarks/results

Every rank holds its stripes of the sequence; times are the slowest rank's medians, launched behind other work as in a
model (but the second row of the index). Attention runs with the reference
pattern as its index (the index estimated from random tensors keeps nearly everything).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.problems import Problem
from benchmarks.timing import measure
from megatron_mtraining import Layout, MTrainingConfig, estimate_index, mtraining_attention


def slowest_ms(function: Callable[[], object], repeats: int, queued: bool) -> float:
    """The median time of the slowest rank; the ranks begin together."""
    dist.barrier()
    ms = torch.tensor(measure(function, repeats=repeats, queued=queued).ms, device="cuda")
    dist.all_reduce(ms, dist.ReduceOp.MAX)
    return float(ms)


def times(problem: Problem, kernel: str, repeats: int) -> dict[str, float]:
    """Milliseconds of index, forward and backward on this rank's part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layout, group = Layout.striped(problem.seq_len, size), dist.group.WORLD
    config = MTrainingConfig(kernel=kernel)
    torch.manual_seed(0)
    q, k, v, dout = (layout.shard(x, rank).contiguous() for x in problem.tensors())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"config": config, "layout": layout, "cp_group": group}

    def estimate() -> object:
        return estimate_index(q.detach(), k.detach(), **options)  # type: ignore[arg-type]

    index = problem.index()
    out = mtraining_attention(*leaves, index=index, **options)  # type: ignore[arg-type]

    def forward() -> object:
        return mtraining_attention(*leaves, index=index, **options)  # type: ignore[arg-type]

    def backward() -> object:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return {
        "index": slowest_ms(estimate, 4 * repeats, queued=True),
        "index on an idle device": slowest_ms(estimate, 4 * repeats, queued=False),
        "forward": slowest_ms(forward, repeats, queued=True),
        "backward": slowest_ms(backward, repeats, queued=True),
    }


def main() -> None:
    """Runs the benchmark; rank 0 writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[131072, 262144])
    parser.add_argument("--heads", default="16/2/128", help="heads/kv_heads/head_dim")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON results")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rows = []
    for seq_len in args.seq_lens:
        problem = Problem(seq_len, *map(int, args.heads.split("/")))
        found = times(problem, args.kernel, args.repeats)
        share = found["index"] / (found["forward"] + found["backward"])
        rows += [
            {
                "impl": "mtraining", "pass": kind, "cp_size": dist.get_world_size(), "seq_len": seq_len,
                "heads": problem.heads, "kv_heads": problem.kv_heads, "head_dim": problem.head_dim,
                "ms": round(ms, 4), "index_share": round(share, 4),
            }
            for kind, ms in found.items()
        ]  # fmt: skip
        if dist.get_rank() == 0:
            print(f"N={seq_len}, cp {dist.get_world_size()}: {found}, index share {share:.2%}", flush=True)
            if args.out:
                write(args, rows)
    dist.destroy_process_group()


def write(args: argparse.Namespace, rows: list[dict[str, object]]) -> None:
    """The dated JSON file."""
    args.out.mkdir(parents=True, exist_ok=True)
    date, card = datetime.date.today().isoformat(), torch.cuda.get_device_name()
    name = f"ranks-{date}-{dist.get_world_size()}x{card.lower().replace(' ', '-')}.json"
    command = f"torchrun --nproc-per-node {dist.get_world_size()} -m benchmarks.bench_ranks --kernel {args.kernel}"
    head = {"date": date, "command": command, "device": card, "torch": torch.__version__}
    (args.out / name).write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
