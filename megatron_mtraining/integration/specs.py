"""Layer specs and a backend provider with MTraining attention, for models that are built in Python.

The launcher needs none of these: it swaps core attention in whatever spec a script builds.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_mtraining.config import MTrainingConfig

from .core_attention import MTrainingCoreAttention
from .errors import RefusedError
from .spec_swap import swap_core_attention


def core_attention_spec(mtraining: MTrainingConfig | None = None) -> ModuleSpec:
    """The spec of MTraining core attention.

    Args:
        mtraining: the attention's config; that of the plugin's set-up if left out.
    """
    return ModuleSpec(module=MTrainingCoreAttention, params={} if mtraining is None else {"mtraining": mtraining})


def gpt_layer_spec(config: TransformerConfig, mtraining: MTrainingConfig | None = None) -> ModuleSpec:
    """Megatron's GPT layer spec for ``config`` (local or Transformer Engine), with MTraining attention."""
    if config.transformer_impl == "transformer_engine":
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            qk_l2_norm=config.qk_l2_norm,
        )
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
        )
    return _swapped(spec, mtraining)


def gpt_block_spec(
    config: TransformerConfig, mtraining: MTrainingConfig | None = None, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Megatron's GPT block spec for ``config`` (the layers of this pipeline stage), with MTraining attention."""
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return _swapped(spec, mtraining)


def hybrid_stack_spec(stack: ModuleSpec | None = None, mtraining: MTrainingConfig | None = None) -> ModuleSpec:
    """A hybrid stack spec with MTraining attention in its attention layers.

    Args:
        stack: the stack to change; Megatron's own (for Transformer Engine) if left out.
        mtraining: the attention's config.
    """
    if stack is None:
        from megatron.core.models.hybrid import hybrid_layer_specs

        stack = hybrid_layer_specs.hybrid_stack_spec
    return _swapped(stack, mtraining)


def _swapped(spec: Any, mtraining: MTrainingConfig | None) -> Any:
    swapped, count = swap_core_attention(spec, core_attention_spec(mtraining))
    if not count:
        raise RefusedError("the spec holds no causal self-attention whose core attention could be swapped")
    return swapped


class MTrainingSpecProvider(BackendSpecProvider):
    """A ``BackendSpecProvider`` that answers as another one does, except for core attention.

    Args:
        fallback: the provider of everything else; Megatron's local one if left out.
        mtraining: the attention's config; that of the plugin's set-up if left out.
    """

    def __init__(self, fallback: BackendSpecProvider | None = None, mtraining: MTrainingConfig | None = None) -> None:
        self.fallback = LocalSpecProvider() if fallback is None else fallback
        self.mtraining = mtraining

    def core_attention(self) -> Any:
        """MTraining core attention, as a spec."""
        return core_attention_spec(self.mtraining)

    def column_parallel_linear(self) -> type:
        """The fallback's column parallel linear layer."""
        return self.fallback.column_parallel_linear()

    def row_parallel_linear(self) -> type:
        """The fallback's row parallel linear layer."""
        return self.fallback.row_parallel_linear()

    def fuse_layernorm_and_linear(self) -> bool:
        """Whether the fallback fuses norm and linear layer."""
        return self.fallback.fuse_layernorm_and_linear()

    def column_parallel_layer_norm_linear(self) -> type | None:
        """The fallback's fused norm and linear layer."""
        return self.fallback.column_parallel_layer_norm_linear()

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """The fallback's norm."""
        return self.fallback.layer_norm(rms_norm=rms_norm, for_qk=for_qk, has_residual=has_residual)

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """The fallback's experts."""
        return self.fallback.grouped_mlp_modules(moe_use_grouped_gemm)

    def activation_func(self) -> Any:
        """The fallback's activation."""
        return self.fallback.activation_func()

    def __getattr__(self, name: str) -> Any:
        """Whatever else a fallback offers (Transformer Engine's ``linear``, say)."""
        if name == "fallback":
            raise AttributeError(name)
        return getattr(self.fallback, name)
