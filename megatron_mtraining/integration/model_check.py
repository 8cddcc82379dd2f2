"""Checking a built model: is MTraining attention really where it should be?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType

from . import runtime
from .core_attention import MTrainingCoreAttention
from .errors import RefusedError

VISION_MODELS = frozenset({"LLaVAModel", "MimoModel"})
"""Models around a language model that slice its inputs in zigzag themselves."""


@dataclass
class AttentionCensus:
    """The attention layers of a model by what became of them.

    Attributes:
        swapped: names of the layers that have MTraining attention.
        skipped: causal self-attention that still has another core, with the class of that core.
        cross: cross attention.
        other: self-attention with another mask (a vision tower, say), which is left alone.
    """

    swapped: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    cross: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)


def count_attention(models: Iterable[torch.nn.Module]) -> AttentionCensus:
    """Counts the attention layers of the model chunks of this rank."""
    census = AttentionCensus()
    for name, layer in _attention_layers(models):
        core = type(layer.core_attention).__name__
        if isinstance(layer.core_attention, MTrainingCoreAttention):
            census.swapped.append(name)
        elif layer.attention_type != "self":
            census.cross.append(name)
        elif layer.attn_mask_type in (AttnMaskType.causal, AttnMaskType.causal_bottom_right):
            census.skipped.append(f"{name} ({core})")
        else:
            census.other.append(f"{name} ({layer.attn_mask_type.name}, {core})")
    return census


def _attention_layers(models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, Attention]]:
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                yield name, module


def check_model(models: Iterable[torch.nn.Module]) -> AttentionCensus:
    """Refuses a model in which a causal self-attention layer of this rank does not have MTraining attention.

    Also notes what the model needs dealt in the native layout, which core attention asserts.

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
    if census.other and not census.swapped:
        raise RefusedError(f"no causal self-attention layer in the model; it has {_list(census.other)}")
    _note_expectations(models)
    return census


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
