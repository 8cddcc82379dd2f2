"""What `torch.cuda` answers while Megatron trains on the CPU, and `device="cuda"` made to mean the CPU.

`torch.cuda.is_available()` keeps saying no: code that asks takes its CPU path. Only what is called without asking is
replaced, by calls that do what they mean on a machine whose one device is the CPU: synchronising is free, events keep
wall-clock time, the CUDA generator is the CPU's.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class Event:
    """Stand-in for `torch.cuda.Event`: remembers the wall-clock time at which it was recorded."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._time = 0.0

    def record(self, _stream: Any = None) -> None:
        """Remember now."""
        self._time = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`."""
        return (end._time - self._time) * 1e3

    def query(self) -> bool:
        """Whether the work before the event is done: always."""
        return True

    def wait(self, _stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Stream:
    """Stand-in for `torch.cuda.Stream`: work is done when the call that gives it returns."""

    device = _CPU

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait_stream(self, _stream: "Stream") -> None:
        """Nothing to wait for."""

    def wait_event(self, _event: Event) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event recorded now."""
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        """Whether the stream is idle: always."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


_STREAM = Stream()
# An architecture that needs no CUDA_DEVICE_MAX_CONNECTIONS=1 to order kernels: there is no queue to order.
_PROPERTIES = SimpleNamespace(name="CPU", major=10, minor=0, total_memory=0, multi_processor_count=1)


@contextlib.contextmanager
def _stream_context(_stream: Stream | None) -> Iterator[None]:
    yield


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _zero(*_args: Any, **_kwargs: Any) -> int:
    return 0


def _set_rng_state(state: torch.Tensor, *_args: Any) -> None:
    torch.set_rng_state(state)


def _replacements() -> dict[str, Any]:
    """Attribute of `torch.cuda` -> what stands in for it."""
    memory_numbers = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return {
        "current_device": lambda: _CPU,
        "current_stream": lambda *_: _STREAM,
        "default_stream": lambda *_: _STREAM,
        "get_device_name": lambda *_: "CPU",
        "get_device_properties": lambda *_: _PROPERTIES,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": _set_rng_state,
        "manual_seed": torch.manual_seed,
        "mem_get_info": lambda *_: (0, 0),
        "memory_stats": lambda *_: defaultdict(int),  # every number that is asked for is 0
        "stream": _stream_context,
        "Event": Event,
        "Stream": Stream,
        "FloatTensor": torch.FloatTensor,
        "HalfTensor": torch.HalfTensor,
        "BFloat16Tensor": torch.BFloat16Tensor,
        "DoubleTensor": torch.DoubleTensor,
        "IntTensor": torch.IntTensor,
        "LongTensor": torch.LongTensor,
        "ByteTensor": torch.ByteTensor,
        **dict.fromkeys(memory_numbers, _zero),
        **dict.fromkeys(("set_device", "set_stream", "synchronize", "empty_cache", "ipc_collect"), _nothing),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"), _nothing),
    }


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Every torch call: `device="cuda"` becomes the CPU, pinned memory is off, moves to the GPU return the tensor.

    The name of a tensor's type, which Megatron's optimizers compare with `torch.cuda.FloatTensor` and the like, is the
    GPU's.
    """

    _MOVES: tuple[Callable[..., Any], ...] = (torch.Tensor.cuda, torch.Tensor.pin_memory)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._MOVES:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # Megatron's optimizers compare these names
            return func(*args).replace("torch.", "torch.cuda.")
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and any(_is_cuda(value) for value in args[1:]):
            args = tuple(_CPU if _is_cuda(value) else value for value in args)
        return func(*args, **kwargs)


_mode: _CudaMeansCpu | None = None


def is_installed() -> bool:
    """Whether this process already runs on the stand-in."""
    return _mode is not None


def refuse_gpu() -> None:
    """Raise RuntimeError where there is a GPU: a stand-in there would train on the CPU unnoticed."""
    if torch.cuda.is_available():
        raise RuntimeError(
            f"--mtraining-cpu is for machines without a GPU, and this one has {torch.cuda.device_count()} "
            f"({torch.cuda.get_device_name(0)}): leave the option out to train there"
        )


def install() -> None:
    """Replace what Megatron calls of `torch.cuda`, and map CUDA devices to the CPU, for the rest of the process."""
    global _mode
    refuse_gpu()
    if _mode is not None:
        return
    for name, replacement in _replacements().items():
        setattr(torch.cuda, name, replacement)
    torch.nn.Module.cuda = lambda module, device=None: module  # type: ignore[method-assign,assignment]
    torch.compiler.set_stance(
        "force_eager"
    )  # Megatron decorates its fusions with torch.compile, which needs a compiler
    _mode = _CudaMeansCpu()
    _mode.__enter__()
