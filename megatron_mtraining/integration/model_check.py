"""Checking a built model: is MTraining attention really where it should be?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from . import runtime
from .core_attention import MTrainingCoreAttention
from .errors import RefusedError

LANGUAGE_MODELS = (GPTModel, HybridModel)
"""Models all of whose self-attention must be causal."""

VISION_MODELS = frozenset({"LLaVAModel", "MimoModel"})
"""Models around a language model that slice its inputs in zigzag themselves."""


@dataclass
class AttentionCensus:
    """The attention layers of a model by what became of them.

    Attributes:
        swapped: names of the layers that have MTraining attention.
        skipped: causal self-attention that still has another core, with the class of that core.
        cross: cross attention.
        not_causal: self-attention with another mask within a GPT or hybrid model.
        other: self-attention with another mask elsewhere (a vision tower, say), which is left alone.
    """

    swapped: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    cross: list[str] = field(default_factory=list)
    not_causal: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)


def count_attention(models: Iterable[torch.nn.Module]) -> AttentionCensus:
    """Counts the attention layers of the model chunks of this rank."""
    census = AttentionCensus()
    models = list(models)
    inside = {layer for model in _modules(models, LANGUAGE_MODELS) for layer in _modules([model], Attention)}
    for name, layer in _attention_layers(models):
        core = type(layer.core_attention).__name__
        if isinstance(layer.core_attention, MTrainingCoreAttention):
            census.swapped.append(name)
        elif layer.attention_type != "self":
            census.cross.append(name)
        elif layer.attn_mask_type in (AttnMaskType.causal, AttnMaskType.causal_bottom_right):
            census.skipped.append(f"{name} ({core})")
        else:
            others = census.not_causal if layer in inside else census.other
            others.append(f"{name} ({layer.attn_mask_type.name}, {core})")
    return census


def _modules(models: Iterable[torch.nn.Module], kind: Any) -> Iterator[Any]:
    """The modules of a class (or several) within models, which may be such modules themselves."""
    return (module for model in models for module in model.modules() if isinstance(module, kind))


def _attention_layers(models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, Attention]]:
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                yield name, module


def check_model(models: Iterable[torch.nn.Module]) -> AttentionCensus:
    """Refuses a model in which a causal self-attention layer of this rank does not have MTraining attention, and a GPT
    or hybrid model with self-attention that is not causal.

    Also notes what the model needs dealt in the native layout, which core attention asserts, and numbers the layers of
    multi-token prediction for the metrics.

    Args:
        models: the model chunks of this rank.

    Raises:
        RefusedError: listing the layers that were skipped, or naming what in the model is not supported.
    """
    models = list(models)
    census = count_attention(models)
    found = len(census.swapped) + len(census.skipped)
    if census.cross:
        raise RefusedError(
            f"cross attention is not supported with --attention-backend mtraining: {_list(census.cross)}"
        )
    if census.skipped:
        raise RefusedError(
            f"only {len(census.swapped)} of {found} causal self-attention layers on this rank have MTraining "
            f"attention; skipped: {_list(census.skipped)}"
        )
    if (census.not_causal or census.other) and not census.swapped:
        raise RefusedError(
            f"no causal self-attention layer in the model; it has {_list(census.not_causal + census.other)}"
        )
    if census.not_causal:
        raise RefusedError(
            "self-attention that is not causal is not supported with --attention-backend mtraining: "
            f"{_list(census.not_causal)}"
        )
    _note_expectations(models)
    _number_mtp_layers(models)
    return census


def _number_mtp_layers(models: list[torch.nn.Module]) -> None:
    """Numbers the layers of multi-token prediction, which Megatron begins anew, after the decoder's.

    A depth of a hybrid model has a pattern of layers, of which all count, as in its decoder.
    """
    for depth in _modules(models, MultiTokenPredictionLayer):
        cores = list(_modules([depth], MTrainingCoreAttention))
        pattern = getattr(depth, "mtp_layer_pattern", None)
        first = depth.config.num_layers + (depth.layer_number - 1) * (len(pattern) if pattern else len(cores))
        for place, core in enumerate(cores):
            core.layer_index = first + (core.layer_number - 1 if pattern else place)


def _note_expectations(models: list[torch.nn.Module]) -> None:
    state = runtime.current()
    for model in models:
        for module in model.modules():
            if type(module).__name__ in VISION_MODELS and state.layout_mode.replaces_slicing:
                raise RefusedError(
                    f"{type(module).__name__} slices its inputs in Megatron's zigzag layout; "
                    "use --mtraining-layout-mode convert"
                )
            if getattr(module, "pre_process", False) and hasattr(module, "embedding"):
                state.expects.add("batch")
            if isinstance(module, RotaryEmbedding):
                state.expects.add("rotary")


def _list(names: list[str], most: int = 8) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
