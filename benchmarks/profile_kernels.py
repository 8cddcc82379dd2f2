"""Time of every kernel of one index estimation, forward and backward pass, from torch's profiler.

python -m benchmarks.profile_kernels --seq-len 131072 --kernel sm80
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from benchmarks import ours
from benchmarks.problems import Problem
from megatron_mtraining import Layout


def kernel_times(function: Callable[[], object], repeats: int = 5) -> list[tuple[str, float, int]]:
    """(name, microseconds, launches) of each kernel in one call, the longest first."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
    found = [
        (event.key, event.self_device_time_total / repeats, event.count // repeats) for event in trace.key_averages()
    ]
    return sorted((row for row in found if row[1] > 0), key=lambda row: -row[1])


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=131072)
    parser.add_argument("--heads", default="16/2/128", help="heads/kv_heads/head_dim")
    parser.add_argument("--kernel", default="auto")
    args = parser.parse_args()
    problem = Problem(args.seq_len, *map(int, args.heads.split("/")))
    q, k, v, dout = problem.tensors()
    share = ours.Share(q, k[None], v[None], dout, problem.index(), Layout.striped(args.seq_len, 1), 0, args.kernel)
    share.allocate_gradients()
    passes = {"index": lambda: ours.estimate(q, k, args.kernel), "forward": share.forward, "backward": share.backward}
    for name, function in passes.items():
        rows = kernel_times(function)
        print(f"{name}: {sum(row[1] for row in rows):.0f} us in {sum(row[2] for row in rows)} launches")
        for kernel, microseconds, launches in rows[:12]:
            print(f"  {microseconds:10.1f} us  {launches:3d} x  {kernel[:110]}")


if __name__ == "__main__":
    main()
