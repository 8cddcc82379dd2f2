"""Buffers of rings, reused from layer to layer and from call to call."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_IDLE = 4
"""Idle buffers that are kept: the keys of forward, the keys and the gradients of backward, and one of another shape."""


@dataclass(eq=False)
class _Idle:
    """A buffer that nobody holds, and how far its last holder's stream had got when it was given back (CUDA only)."""

    key: Hashable
    buffer: Tensor
    stream: torch.cuda.Stream | None
    used: torch.cuda.Event | None


class BufferPool:
    """Lends buffers, each to one holder at a time, however calls are nested (recompute, interleaved pipeline stages).

    Whoever gives a buffer back has ordered the end of all its transfers before whatever its current stream does next. A
    later holder on that stream needs nothing more; one on another stream waits, on the device, for that point. So buffers
    need not be told apart by the process groups that they are sent over. A holder that fails keeps its buffer.
    """

    def __init__(self, max_idle: int = MAX_IDLE) -> None:
        self._idle: list[_Idle] = []
        self._lock = threading.Lock()
        self._max_idle = max_idle

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of unspecified contents, to be given back with :meth:`give`."""
        key = _key(shape, dtype, device)
        with self._lock:
            found = next((idle for idle in reversed(self._idle) if idle.key == key), None)
            if found is None:
                return torch.empty(tuple(shape), dtype=dtype, device=device)
            self._idle.remove(found)
        if found.stream is not None and found.used is not None:
            stream = torch.cuda.current_stream(device)
            if stream != found.stream:
                stream.wait_event(found.used)
                # The allocator must not hand the memory out, should it be freed, before this stream is done with it.
                found.buffer.record_stream(stream)
        return found.buffer

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back. The longest idle ones are freed beyond the limit."""
        stream = used = None
        if buffer.is_cuda:
            stream = torch.cuda.current_stream(buffer.device)
            used = torch.cuda.Event()
            used.record(stream)
        with self._lock:
            self._idle.append(_Idle(_key(buffer.shape, buffer.dtype, buffer.device), buffer, stream, used))
            del self._idle[: -self._max_idle]

    def clear(self) -> None:
        """Frees the idle buffers."""
        with self._lock:
            self._idle.clear()


def _key(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Hashable:
    return tuple(shape), dtype, device.type, torch.cuda.current_device() if device.type == "cuda" else 0


pool = BufferPool()
"""The buffers of this process."""
