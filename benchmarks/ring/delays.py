"""Ways to hold back a CUDA stream for some time: what stands in front of an exchange over an artificial slow link.

``copies``: dummy copies between device and pinned host memory by a copy engine, which take no multiprocessor. Keys go to
the host, gradients from it, so that neither waits for the other.

``kernel``: a kernel of one block that waits on one multiprocessor, as NCCL's own kernels do for as long as a transfer lasts. A
kernel that counts on all multiprocessors is held up by it: the difference between the two ways is the price of that.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache

import torch

from megatron_mtraining.schedule import Channel

WAYS = ("copies", "kernel")
COPY_BYTES = 32 << 20
CALIBRATION_CYCLES = 2_000_000
REPEATS = 5


@cache
def _buffers(device: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes on the device, and two buffers of pinned host memory, to copy to and from. They are never read."""
    host = [torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    return torch.zeros(2, COPY_BYTES, dtype=torch.uint8, device=device), host[0], host[1]


def copy_bytes(count: int, channel: Channel, device: int) -> None:
    """Copies so many bytes on the current stream, in the direction of a channel."""
    on_device, to_host, from_host = _buffers(device)
    keys = channel in (Channel.INNER, Channel.OUTER)
    target, source = (to_host, on_device[0]) if keys else (on_device[1], from_host)
    for first in range(0, count, COPY_BYTES):
        part = slice(0, min(COPY_BYTES, count - first))
        target[part].copy_(source[part], non_blocking=True)


def _seconds(run: Callable[[], object], device: int) -> float:
    """Median device time of a call."""
    times = []
    for _ in range(REPEATS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


@cache
def copy_rate(channel: Channel, device: int) -> float:
    """Bytes a second of such copies."""
    return 4 * COPY_BYTES / _seconds(lambda: copy_bytes(4 * COPY_BYTES, channel, device), device)


def cycles_per_second(device: int) -> float:
    """Of the waiting kernel's clock, now: the card changes it with its load."""
    return CALIBRATION_CYCLES / _seconds(lambda: torch.cuda._sleep(CALIBRATION_CYCLES), device)


class Delay:
    """Holds back the current stream, by one of :data:`WAYS`, calibrated when it is made."""

    def __init__(self, way: str) -> None:
        self._device = torch.cuda.current_device()
        self._cycles = cycles_per_second(self._device) if way == "kernel" else 0.0
        if way == "copies":
            for channel in (Channel.OUTER, Channel.OUTER_GRAD):
                copy_rate(channel, self._device)

    def __call__(self, seconds: float, channel: Channel) -> None:
        """Enqueues the delay of an exchange of a channel."""
        if self._cycles:
            torch.cuda._sleep(round(seconds * self._cycles))
            return
        keys = channel in (Channel.INNER, Channel.OUTER)
        rate = copy_rate(Channel.OUTER if keys else Channel.OUTER_GRAD, self._device)
        copy_bytes(round(seconds * rate), channel, self._device)
