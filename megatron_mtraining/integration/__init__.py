"""The plugin for Megatron-LM: the only part of the package that imports ``megatron``.

``python -m megatron_mtraining.launch`` needs nothing from here. A script of one's own calls :func:`set_up` before it
builds its models, and slices its batches with :func:`deal_batch`.
"""

from __future__ import annotations

import importlib
from typing import Any

from .errors import RefusedError
from .hooks import install, set_up, tear_down, uninstall

__all__ = [
    "MTrainingCoreAttention",
    "MTrainingSpecProvider",
    "RefusedError",
    "check_model",
    "core_attention_spec",
    "create_ring_groups",
    "deal_batch",
    "deal_rotary",
    "destroy_ring_groups",
    "gpt_block_spec",
    "gpt_layer_spec",
    "hybrid_stack_spec",
    "install",
    "set_up",
    "swap_core_attention",
    "tear_down",
    "uninstall",
]

_LAZY = {
    "MTrainingCoreAttention": "core_attention",
    "MTrainingSpecProvider": "specs",
    "check_model": "model_check",
    "core_attention_spec": "specs",
    "create_ring_groups": "groups",
    "deal_batch": "sharding",
    "deal_rotary": "sharding",
    "destroy_ring_groups": "groups",
    "gpt_block_spec": "specs",
    "gpt_layer_spec": "specs",
    "hybrid_stack_spec": "specs",
    "swap_core_attention": "spec_swap",
}
"""Names whose modules import Megatron; loaded when first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
