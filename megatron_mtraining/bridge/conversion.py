"""From Hugging Face to a Megatron checkpoint, where Bridge's own call needs APEX."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

EXTENSION = "fused_weight_gradient_mlp_cuda"
"""The compiled module of APEX that adds weight gradients up in place."""


def have_fused_gradients() -> bool:
    """Whether APEX's extension is installed. Bridge 0.6 takes Transformer Engine for enough, Megatron's output layer not."""
    return importlib.util.find_spec(EXTENSION) is not None


def drop_missing_fusion(provider: Any) -> None:
    """Turns ``gradient_accumulation_fusion`` of a provider off where the model could not be built with it."""
    if not have_fused_gradients():
        provider.gradient_accumulation_fusion = False


def import_hf_checkpoint(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Writes the Hugging Face model of a folder as a Megatron checkpoint: ``AutoBridge.import_ckpt`` without APEX.

    Needs a GPU, and a process of its own: Bridge starts NCCL in it, and leaves it on.

    Args:
        source: folder of the model, such as :func:`.extend_hf_config` makes.
        target: folder of the checkpoint, for ``checkpoint.pretrained_checkpoint``.
    """
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(os.fspath(source))
    provider = bridge.to_megatron_provider(load_weights=True)
    drop_missing_fusion(provider)
    provider.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    bridge.save_megatron_model(model, os.fspath(target), hf_tokenizer_path=os.fspath(source), low_memory_save=True)
