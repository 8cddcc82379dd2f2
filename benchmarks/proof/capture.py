"""Queries, keys, values and output gradients of every attention layer, from one forward and backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from benchmarks.proof.attention import DenseCoreAttention, attention_layers
from benchmarks.proof.evaluate import logits_of, token_losses


@dataclass
class LayerTensors:
    """Of one layer and sample: ``q``, ``dout [1, seq, heads, dim]``; ``k``, ``v [1, seq, kv_heads, dim]``, after RoPE."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None = None


class CapturingAttention(DenseCoreAttention):
    """Dense attention that keeps its inputs and the gradient of its output."""

    seen: LayerTensors | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """See :class:`DenseCoreAttention`."""
        out = super().forward(query, key, value, attention_mask, **options)
        seen = LayerTensors(*(x.detach().transpose(0, 1) for x in (query, key, value)))
        self.seen = seen

        def keep(gradient: Tensor) -> None:
            seen.dout = gradient.detach().unflatten(2, query.shape[2:]).transpose(0, 1)

        if out.requires_grad:
            out.register_hook(keep)
        return out


def capture(model: GPTModel, tokens: Tensor, *, backward: bool = False) -> list[LayerTensors]:
    """The tensors of each layer on ``tokens [1, seq + 1]``; the model is left with this attention and without gradients."""
    modules = [CapturingAttention() for _ in attention_layers(model)]
    for attention, module in zip(attention_layers(model), modules, strict=True):
        attention.core_attention = module
    with torch.set_grad_enabled(backward):
        losses = token_losses(logits_of(model, tokens[:, :-1]), tokens[:, 1:])
    if backward:
        losses.mean().backward()
        model.zero_grad()
    found = [module.seen for module in modules]
    assert all(seen is not None for seen in found)
    return [seen for seen in found if seen is not None]
