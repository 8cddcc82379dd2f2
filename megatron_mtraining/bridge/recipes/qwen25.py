"""Qwen2.5-3B, the model that the paper extends from 32K to 512K tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .long_context import K, Spread, peft_recipe, pretrain_recipe

if TYPE_CHECKING:
    from megatron.bridge.peft.base import PEFT
    from megatron.bridge.training.config import ConfigContainer

QWEN25_3B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
"""The model as in its ``config.json``."""


def qwen25_3b_pretrain_32gpu_512k_config() -> ConfigContainer:
    """The paper's run: 512K tokens over 32 context-parallel ranks, YaRN with factor 16."""
    return pretrain_recipe(QWEN25_3B, Spread(512 * K, context_parallel=32), "qwen25_3b_512k")


def qwen25_3b_pretrain_8gpu_128k_config() -> ConfigContainer:
    """One node of 8 GPUs: 128K tokens, as many on each GPU as in the paper's run."""
    return pretrain_recipe(QWEN25_3B, Spread(128 * K, context_parallel=8), "qwen25_3b_128k")


def qwen25_3b_pretrain_2gpu_32k_config() -> ConfigContainer:
    """Two GPUs: 32K tokens, the model's own length."""
    return pretrain_recipe(QWEN25_3B, Spread(32 * K, context_parallel=2, global_batch=8), "qwen25_3b_32k")


def qwen25_3b_pretrain_1gpu_16k_config() -> ConfigContainer:
    """One GPU: 16K tokens, the optimizer on the CPU."""
    spread = Spread(16 * K, context_parallel=1, global_batch=8, optimizer_offload=1.0)
    return pretrain_recipe(QWEN25_3B, spread, "qwen25_3b_16k")


def qwen25_3b_peft_8gpu_128k_config(peft_scheme: str | PEFT = "lora") -> ConfigContainer:
    """Adapters on one node of 8 GPUs: 128K tokens.

    Args:
        peft_scheme: ``lora``, ``dora``, or one of Bridge's peft objects.
    """
    return peft_recipe(QWEN25_3B, Spread(128 * K, context_parallel=8), "qwen25_3b_128k_peft", peft_scheme)
