"""Hooks into the building of models and of process groups."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.attention import Attention

from . import groups, runtime
from .core_attention import MTrainingCoreAttention
from .errors import RefusedError
from .model_check import check_model
from .rebind import rebind, replace_method
from .spec_swap import swap_core_attention
from .specs import core_attention_spec

SPEC_ARGUMENTS = {
    GPTModel: ("transformer_layer_spec", "mtp_block_spec"),
    HybridModel: ("hybrid_stack_spec",),
}
"""The constructor arguments of each model that hold specs of attention layers."""

Undo = Callable[[], None]


def hook_models() -> list[Undo]:
    """Swaps core attention in every GPTModel and HybridModel that is built from now on, and checks whole models."""
    from megatron.training import training

    undo = [replace_method(model, "__init__", _swapping(model)) for model in SPEC_ARGUMENTS]
    undo.append(replace_method(Attention, "flash_decode_and_prefill", _refuse_dynamic_batching))
    undo.append(
        rebind(training.__name__, "setup_model_and_optimizer", _checking(training.setup_model_and_optimizer)).undo
    )
    return undo


def _swapping(model: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A constructor that swaps core attention in the specs it is given and checks what was built."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(self, *args, **kwargs)
            for name in SPEC_ARGUMENTS[model]:
                if bound.arguments.get(name) is not None:
                    bound.arguments[name], _ = swap_core_attention(bound.arguments[name], core_attention_spec())
            original(*bound.args, **bound.kwargs)
            check_model([self])

        return __init__

    return wrap


def _refuse_dynamic_batching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamic batching calls FlashAttention and passes core attention by."""

    @functools.wraps(original)
    def flash_decode_and_prefill(self: Attention, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.core_attention, MTrainingCoreAttention):
            raise RefusedError("inference with dynamic batching passes core attention by; use static batching")
        return original(self, *args, **kwargs)

    return flash_decode_and_prefill


def _checking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's set-up of the model, with a check of all chunks of this rank: also models of other classes."""

    @functools.wraps(original)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        built = original(*args, **kwargs)
        check_model(built[0])
        return built

    return setup_model_and_optimizer


def hook_process_groups() -> list[Undo]:
    """Makes the ring groups right after Megatron's own groups, and destroys them right before those."""
    name = parallel_state.__name__
    undo = [
        rebind(name, "initialize_model_parallel", _making(parallel_state.initialize_model_parallel)).undo,
        rebind(name, "destroy_model_parallel", _destroying(parallel_state.destroy_model_parallel)).undo,
    ]
    if parallel_state.model_parallel_is_initialized():
        make_ring_groups(parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False))
    return undo


def _making(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        # Megatron does not forget hierarchical groups when it destroys them, so their existence alone says nothing.
        given = bound.arguments["hierarchical_context_parallel_sizes"]
        make_ring_groups(
            parallel_state.get_hierarchical_context_parallel_groups() if given else None,
            timedelta(minutes=bound.arguments["distributed_timeout_minutes"]),
        )
        return result

    return initialize_model_parallel


def _destroying(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def destroy_model_parallel(*args: Any, **kwargs: Any) -> Any:
        groups.destroy_ring_groups()
        return original(*args, **kwargs)

    return destroy_model_parallel


def make_ring_groups(
    hierarchical: Sequence[torch.distributed.ProcessGroup] | None, timeout: timedelta | None = None
) -> None:
    """Makes the rings of Megatron's context-parallel groups. Collective over the world.

    Args:
        hierarchical: Megatron's hierarchical context-parallel groups of this rank, inner first, if it made them.
        timeout: of the groups' operations: that of Megatron's own groups.
    """
    state = runtime.current()
    if parallel_state.get_context_parallel_world_size() == 1:
        return
    plan = groups.create_ring_groups(
        parallel_state.get_context_parallel_group(),
        state.config.ring,
        hierarchical,
        state.inner_across_hosts,
        timeout,
    )
    if torch.distributed.get_rank() == 0:
        kind = "flat" if plan.inner_size == parallel_state.get_context_parallel_world_size() else "hierarchical"
        print(
            f"> megatron_mtraining: {kind} ring, inner size {plan.inner_size} ({plan.reason}), "
            f"{groups.count_made()} communicators made",
            flush=True,
        )
