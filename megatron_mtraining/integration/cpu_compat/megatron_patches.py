"""The Megatron functions that insist on a GPU, made to run without one."""

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

_MODULES = (
    "torch._dynamo",
    "megatron.core",
    "megatron.core.tensor_parallel.random",
    "megatron.training.arguments",
    "megatron.training.initialize",
    "megatron.training.training",
)


def import_megatron() -> None:
    """Import what `apply` patches and whatever decides at import time whether there is a GPU."""
    for name in _MODULES:
        importlib.import_module(name)


def apply() -> None:
    """Patch Megatron, for the rest of the process, and say so on rank 0."""
    from megatron.core.tensor_parallel import random as rng
    from megatron.training import initialize, training

    initialize.initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    training.initialize_megatron = initialize.initialize_megatron
    # Both decide by the number of GPUs whether to set up model parallelism and its random states.
    for name in ("_initialize_distributed", "_set_random_seed"):
        setattr(initialize, name, _with_one_device(getattr(initialize, name)))
    training.set_jit_fusion_options = _no_warm_up
    rng._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    logging.getLogger(rng.__name__).addFilter(_is_no_rng_warning)
    if os.environ.get("RANK", "0") == "0":
        print("> megatron_mtraining: no GPU; Megatron runs on the CPU over gloo (--mtraining-cpu)", flush=True)


def _with_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, told during the call that there is one device."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        real = torch.cuda.device_count
        torch.cuda.device_count = lambda: 1
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.device_count = real

    return wrapper


def _no_warm_up(*_args: Any, **_kwargs: Any) -> None:
    """Stand-in for `set_jit_fusion_options`: there is no fusion to warm up."""


def _is_no_rng_warning(record: logging.LogRecord) -> bool:
    """Filter out the warning that the CPU generator moved inside a GPU generator's context: here they are one."""
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()
