"""Timing with device events: warm-up, repetitions, median."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def median_ms(function: Callable[[], object], repeats: int = 5, budget_ms: float = 2000.0) -> float:
    """Median time of ``function`` in milliseconds; fewer repetitions where one alone takes long."""
    function()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < repeats and (len(times) < 2 or sum(times) < budget_ms):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def matmul_tflops(size: int = 8192) -> float:
    """The card's own bf16 matmul rate on random data, in this run."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_ms(lambda: a @ b, repeats=10) / 1e9


def peak_mib(function: Callable[[], object]) -> float:
    """Peak memory that ``function`` allocates on top of what is there, in MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
