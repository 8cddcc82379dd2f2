"""Named ranges for NVIDIA's profilers: ``mtraining index``, ``forward``, ``backward``, ``recall``, ``launch N``, ``merge``.

Always on where the work is on a GPU: without a profiler attached a range is two calls that return at once. The host opens
and closes them as it issues the work; profilers project them onto the kernels.
"""

from __future__ import annotations

from types import TracebackType

import torch


def shows(device: torch.device) -> bool:
    """Whether work on a device can be seen by NVIDIA's profilers."""
    return device.type == "cuda"


class nvtx_range:
    """A range around a block; nothing on the CPU.

    Args:
        name: what the profiler shows.
        device: where the block's work runs.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name if shows(device) else None

    def __enter__(self) -> None:
        if self._name is not None:
            torch.cuda.nvtx.range_push(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._name is not None:
            torch.cuda.nvtx.range_pop()
