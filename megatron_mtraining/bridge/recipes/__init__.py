"""Recipes for Megatron-Bridge: functions that return a ``ConfigContainer`` with MTraining attention enabled.

Named as Bridge names its own: ``<model>_<pretrain|peft>_<gpus>gpu_<length>_config``. Pretraining recipes take no
argument, peft recipes the scheme.
"""

from __future__ import annotations

from .llama31 import (
    llama31_8b_peft_8gpu_128k_config,
    llama31_8b_pretrain_2gpu_16k_config,
    llama31_8b_pretrain_8gpu_64k_config,
    llama31_8b_pretrain_32gpu_512k_config,
)
from .qwen25 import (
    qwen25_3b_peft_8gpu_128k_config,
    qwen25_3b_pretrain_1gpu_16k_config,
    qwen25_3b_pretrain_2gpu_32k_config,
    qwen25_3b_pretrain_8gpu_128k_config,
    qwen25_3b_pretrain_32gpu_512k_config,
)

__all__ = [
    "llama31_8b_peft_8gpu_128k_config",
    "llama31_8b_pretrain_2gpu_16k_config",
    "llama31_8b_pretrain_8gpu_64k_config",
    "llama31_8b_pretrain_32gpu_512k_config",
    "qwen25_3b_peft_8gpu_128k_config",
    "qwen25_3b_pretrain_1gpu_16k_config",
    "qwen25_3b_pretrain_2gpu_32k_config",
    "qwen25_3b_pretrain_8gpu_128k_config",
    "qwen25_3b_pretrain_32gpu_512k_config",
]
