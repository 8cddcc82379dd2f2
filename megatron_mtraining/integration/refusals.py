"""What the plugin refuses, as data: every Megatron feature that changes the mathematics and is not supported.

The table is checked on the argument namespace, before and after Megatron's own validation, and again on the
``TransformerConfig`` of every core attention module, so that a config made in Python is held to the same rules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import RefusedError
from .layout_mode import GATED_DELTA_NETS

PACKING = (
    "--sft, or packed_seq_params of your own with documents padded to multiples of 64 tokens and cu_seqlens_q_padded"
)
"""What keeps documents apart instead of Megatron's own options for it."""

NVTE_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@dataclass(frozen=True)
class Refusal:
    """One feature that is refused.

    Attributes:
        name: attribute of the argument namespace or of the ``TransformerConfig``.
        option: what the user types; the same as the config field where no option exists.
        refused: says from the value, and from the object that holds it, whether it is refused.
        reason: why.
        valid: what to use instead.
    """

    name: str
    option: str
    refused: Callable[[Any, Any], bool]
    reason: str
    valid: str


def _is_set(value: Any, _: Any) -> bool:
    return bool(value)


def _given(value: Any, _: Any) -> bool:
    return value is not None


def _not(*allowed: Any) -> Callable[[Any, Any], bool]:
    return lambda value, _: value not in allowed


def _captures_attention(impl: Any, owner: Any) -> bool:
    """Whether a CUDA graph would hold attention: whole layers (no module list), ``attn``, or the whole iteration."""
    if impl in (None, "none"):
        return False
    modules = getattr(owner, "cuda_graph_modules", None) or getattr(owner, "cuda_graph_scope_deprecated", None) or []
    names = {getattr(module, "name", str(module)) for module in ([modules] if isinstance(modules, str) else modules)}
    return impl == "full_iteration" or not names or bool(names & {"attn", "full", "full_iteration"})


def _unequal_head_dims(v_head_dim: Any, owner: Any) -> bool:
    if not getattr(owner, "multi_latent_attention", False):
        return False
    return bool(owner.qk_head_dim + owner.qk_pos_emb_head_dim != v_head_dim)


REFUSALS: tuple[Refusal, ...] = (
    Refusal("yaml_cfg", "--yaml-cfg", _given, "it replaces the parsed options", "command-line options"),
    Refusal("window_size", "--window-size", _given, "sliding windows are not built", "no --window-size"),
    Refusal(
        "softmax_type", "--softmax-type", _not("vanilla"), "attention sinks are not built", "--softmax-type vanilla"
    ),
    Refusal(
        "attention_dropout", "--attention-dropout", _is_set, "attention dropout is not built", "--attention-dropout 0"
    ),
    Refusal(
        "reset_attention_mask",
        "--reset-attention-mask",
        _is_set,
        "the mask between documents would be ignored",
        PACKING,
    ),
    Refusal(
        "position_embedding_type",
        "--position-embedding-type",
        lambda value, _: value == "relative",
        "it adds an attention bias",
        "rope, yarn, mrope, learned_absolute or none",
    ),
    Refusal("qk_clip", "--qk-clip", _is_set, "the row maximum of the logits is not provided", "no --qk-clip"),
    Refusal(
        "log_max_attention_logit",
        "--log-max-attention-logit",
        _is_set,
        "the row maximum of the logits is not provided",
        "no --log-max-attention-logit",
    ),
    Refusal(
        "fp8_dot_product_attention",
        "fp8_dot_product_attention",
        _is_set,
        "attention is not built in fp8",
        "False (linear layers may stay in fp8)",
    ),
    Refusal(
        "fp8_multi_head_attention",
        "fp8_multi_head_attention",
        _is_set,
        "attention is not built in fp8",
        "False (linear layers may stay in fp8)",
    ),
    Refusal(
        "cuda_graph_impl",
        "--cuda-graph-impl",
        _captures_attention,
        "attention with its communication cannot be captured",
        "none, or --cuda-graph-modules without attn",
    ),
    Refusal(
        "enable_cuda_graph", "--enable-cuda-graph", _is_set, "attention cannot be captured", "no --enable-cuda-graph"
    ),
    Refusal(
        "external_cuda_graph",
        "--external-cuda-graph",
        _is_set,
        "attention cannot be captured",
        "no --external-cuda-graph",
    ),
    Refusal(
        "v_head_dim",
        "--v-head-dim",
        _unequal_head_dims,
        "multi-latent attention needs the same head dimension for keys and values",
        "--qk-head-dim + --qk-pos-emb-head-dim equal to --v-head-dim",
    ),
    Refusal(
        "experimental_attention_variant",
        "--experimental-attention-variant",
        _not(None, *GATED_DELTA_NETS),
        "it replaces core attention by its own",
        "no variant, or a gated delta net",
    ),
    Refusal(
        "use_kitchen_attention", "--use-kitchen-attention", _is_set, "it replaces core attention", "no such option"
    ),
    Refusal(
        "batch_invariant_mode",
        "--batch-invariant-mode",
        _is_set,
        "it works with FlashAttention only",
        "no --batch-invariant-mode",
    ),
    Refusal(
        "transformer_impl",
        "--transformer-impl",
        lambda value, _: value == "inference_optimized",
        "it is for inference",
        "local or transformer_engine",
    ),
    Refusal(
        "inference_dynamic_batching",
        "--inference-dynamic-batching",
        _is_set,
        "dynamic batching passes core attention by",
        "static batching",
    ),
    Refusal(
        "perform_rl_step",
        "--perform-rl-step",
        _is_set,
        "its rollouts use dynamic batching, which passes core attention by",
        "pretraining or fine-tuning",
    ),
    Refusal(
        "hybrid_context_parallel",
        "--hybrid-context-parallel",
        _is_set,
        "context-parallel groups that change from step to step are not built",
        "--context-parallel-size alone",
    ),
    Refusal(
        "dataloader_inter_document_masking",
        "--dataloader-inter-document-masking",
        _is_set,
        "Megatron's data set begins documents at any token, and attention needs multiples of 64",
        PACKING,
    ),
)


WITHOUT_EFFECT = {
    "cp_comm_type": ("--cp-comm-type", (None, "p2p", ["p2p"])),
    "flash_attention_version": ("--flash-attention-version", (None,)),
}
"""Options that choose how another attention works, not what it computes: by attribute, the option and the values that
choose nothing.
"""


def without_effect(args: Any) -> list[str]:
    """The options given that say how another attention works; they change nothing here, and are pointed out."""
    return [
        option
        for name, (option, nothing) in WITHOUT_EFFECT.items()
        if hasattr(args, name) and getattr(args, name) not in nothing
    ]


def refuse(owner: Any) -> None:
    """Checks every refusal whose attribute ``owner`` has.

    Args:
        owner: an argument namespace or a ``TransformerConfig``.

    Raises:
        RefusedError: for the first one that applies; names the option, the value and the valid ones.
    """
    for item in REFUSALS:
        if not hasattr(owner, item.name):
            continue
        value = getattr(owner, item.name)
        if item.refused(value, owner):
            raise RefusedError(
                f"{item.option} {value}: not supported with --attention-backend mtraining, because {item.reason}; "
                f"use {item.valid}"
            )


def refuse_environment(environ: Mapping[str, str] | None = None) -> None:
    """Refuses NVTE_* variables that choose another attention backend.

    Raises:
        RefusedError: naming the variable and its value.
    """
    environ = os.environ if environ is None else environ
    for name in NVTE_VARIABLES:
        if environ.get(name, "1") != "1":
            raise RefusedError(
                f"{name}={environ[name]}: conflicts with --attention-backend mtraining; unset it or set it to 1"
            )
