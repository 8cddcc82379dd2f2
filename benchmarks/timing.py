"""Timing with device events: warm-up, repetitions, median; peak memory of the same call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

QUEUE_CYCLES = 10_000_000
"""Cycles of the work that a queued call waits for: about 5 ms."""

FIRST_CALL_CYCLES = 500_000_000
"""The same for a first call, which may load kernels or plan: about 0.3 s."""


@dataclass(frozen=True)
class Measured:
    """Median time of a call in milliseconds, and the memory that it allocates at its peak, in MiB."""

    ms: float
    peak_mib: float


def measure(
    function: Callable[[], object],
    repeats: int = 5,
    budget_ms: float = 1500.0,
    warm_up: bool = True,
    queued: bool = False,
) -> Measured:
    """Times ``function``; fewer repetitions where one alone takes long.

    Args:
        function: enqueues work on the current stream.
        repeats: most repetitions.
        budget_ms: no further repetition once this much was measured.
        warm_up: one call before the first repetition. Without it the first repetition waits behind other work, so that
            what the host does at a first call is not measured, and its memory is reported.
        queued: behind some milliseconds of other work, as in a model whose launches run ahead of the device. Without it
            the device is idle and waits for every launch.

    Without a GPU the host's clock is taken, and no memory is reported.
    """
    if not torch.cuda.is_available():
        return _on_host(function, repeats, budget_ms, warm_up)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if warm_up:
        function()
        torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < repeats and (not times or sum(times) < budget_ms):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if queued or not (warm_up or times):
            torch.cuda._sleep(QUEUE_CYCLES if queued else FIRST_CALL_CYCLES)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return Measured(statistics.median(times), (torch.cuda.max_memory_allocated() - before) / 2**20)


def _on_host(function: Callable[[], object], repeats: int, budget_ms: float, warm_up: bool) -> Measured:
    """:func:`measure` on the CPU."""
    if warm_up:
        function()
    times: list[float] = []
    while len(times) < repeats and (not times or sum(times) < budget_ms):
        began = time.perf_counter()
        function()
        times.append((time.perf_counter() - began) * 1e3)
    return Measured(statistics.median(times), 0.0)


class Marks:
    """Times between points of one run, taken behind other work, as in a model whose launches run ahead of the device.

    Without CUDA they are of the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken: list[torch.cuda.Event | float] = []

    def begin(self) -> None:
        """Occupies the device for some milliseconds, and takes the first point behind that."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda._sleep(2 * QUEUE_CYCLES)
        self.mark()

    def mark(self) -> None:
        """The next point."""
        if self._device.type != "cuda":
            self._taken.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._taken.append(event)

    def read(self) -> list[float]:
        """Milliseconds from the first point to each later one; waits for the device."""
        if self._device.type != "cuda":
            return [(at - self._taken[0]) * 1e3 for at in self._taken[1:]]  # type: ignore[operator]
        torch.cuda.synchronize(self._device)
        return [self._taken[0].elapsed_time(event) for event in self._taken[1:]]  # type: ignore[union-attr]


def measure_in_turn(functions: dict[str, Callable[[], object]], seconds: float = 2.0) -> dict[str, Measured]:
    """Times functions one after another, again and again: all of them on a card as warm as each other makes it.

    Args:
        functions: each enqueues work on the current stream.
        seconds: about how long; every function is timed three times at least, each time after a call of its own.

    Returns:
        The medians. Memory is not looked at.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    began = time.perf_counter()
    while len(next(iter(times.values()))) < 3 or time.perf_counter() - began < seconds:
        for name, function in functions.items():
            times[name].append(measure(function, repeats=1).ms)
    return {name: Measured(statistics.median(found), 0.0) for name, found in times.items()}


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """``function`` as a CUDA graph: its kernels without the time to launch them from Python."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def matmul_tflops(size: int = 8192) -> float:
    """The card's own bf16 matmul rate on random data, in this run."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / measure(lambda: a @ b, repeats=10).ms / 1e9
