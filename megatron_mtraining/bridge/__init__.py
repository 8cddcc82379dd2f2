"""MTraining attention for NeMo's Megatron-Bridge: one call on a ``ConfigContainer``, and recipes for 512K tokens.

    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron_mtraining.bridge import enable

    metrics = enable(cfg, top_p=0.90)
    pretrain(cfg, forward_step, callbacks=[metrics])

Importing this package imports neither Bridge nor Megatron; its modules do so when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "LayerPlan",
    "MTrainingCallback",
    "apply_overrides",
    "describe",
    "enable",
    "export_hf_adapter",
    "export_hf_checkpoint",
    "extend_hf_config",
    "import_hf_checkpoint",
    "install",
    "is_enabled",
    "uninstall",
]

_LAZY = {
    "LayerPlan": "hook",
    "MTrainingCallback": "callback",
    "apply_overrides": "overrides",
    "describe": "enabling",
    "enable": "enabling",
    "export_hf_adapter": "conversion",
    "export_hf_checkpoint": "conversion",
    "extend_hf_config": "rope",
    "import_hf_checkpoint": "conversion",
    "install": "enabling",
    "is_enabled": "enabling",
    "uninstall": "enabling",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
