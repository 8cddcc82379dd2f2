"""Llama-3.1-8B to 512K tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .long_context import K, Spread, peft_recipe, pretrain_recipe

if TYPE_CHECKING:
    from megatron.bridge.peft.base import PEFT
    from megatron.bridge.training.config import ConfigContainer

LLAMA31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""The model as in its ``config.json``."""


def llama31_8b_pretrain_32gpu_512k_config() -> ConfigContainer:
    """512K tokens over 32 context-parallel ranks; the factor of Llama 3's own scaling is 32 instead of 8."""
    return pretrain_recipe(LLAMA31_8B, Spread(512 * K, context_parallel=32), "llama31_8b_512k")


def llama31_8b_pretrain_8gpu_64k_config() -> ConfigContainer:
    """One node of 8 GPUs: 64K tokens; layers are shared by 2 tensor-parallel ranks."""
    return pretrain_recipe(LLAMA31_8B, Spread(64 * K, context_parallel=4, tensor_parallel=2), "llama31_8b_64k")


def llama31_8b_pretrain_2gpu_16k_config() -> ConfigContainer:
    """Two GPUs: 16K tokens, layers shared by both, the optimizer on the CPU."""
    spread = Spread(16 * K, context_parallel=1, tensor_parallel=2, global_batch=8, optimizer_offload=1.0)
    return pretrain_recipe(LLAMA31_8B, spread, "llama31_8b_16k")


def llama31_8b_peft_8gpu_128k_config(peft_scheme: str | PEFT = "lora") -> ConfigContainer:
    """Adapters on one node of 8 GPUs: 128K tokens.

    Args:
        peft_scheme: ``lora``, ``dora``, or one of Bridge's peft objects.
    """
    return peft_recipe(LLAMA31_8B, Spread(128 * K, context_parallel=8), "llama31_8b_128k_peft", peft_scheme)
