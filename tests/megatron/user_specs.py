"""Specs as users write them (``--spec``), without Transformer Engine."""

from __future__ import annotations

import dataclasses
import functools

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def attention_spec(core=DotProductAttention, mask=AttnMaskType.causal):
    """Self-attention with a plain core, or another."""
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": mask},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=core, linear_proj=RowParallelLinear
        ),
    )


def user_layer_spec(**changes):
    """A transformer layer."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=attention_spec(**changes),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


hybrid_stack_spec = ModuleSpec(
    module=HybridStack,
    submodules=HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm, self_attention=attention_spec(), self_attn_bda=get_bias_dropout_add
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=functools.partial(
                    MLP.as_mlp_submodule,
                    submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
                ),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    ),
)
"""A hybrid stack of attention and MLP layers."""

predicting_stack_spec = ModuleSpec(
    module=HybridStack,
    submodules=dataclasses.replace(
        hybrid_stack_spec.submodules,
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(
                layer_specs=[
                    ModuleSpec(
                        module=MultiTokenPredictionLayer,
                        submodules=MultiTokenPredictionLayerSubmodules(
                            enorm=WrappedTorchNorm,
                            hnorm=WrappedTorchNorm,
                            eh_proj=ColumnParallelLinear,
                            mtp_model_layer=None,  # made of the pattern
                            layer_norm=WrappedTorchNorm,
                        ),
                    )
                ]
            ),
        ),
    ),
)
"""The same with multi-token prediction."""
