"""The attention variants of the study, put into a built model in place of its core attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.proof.variants import variant
from megatron_mtraining import MTrainingConfig, VerticalSlashIndex
from megatron_mtraining.integration import runtime
from megatron_mtraining.integration.core_attention import MTrainingCoreAttention
from megatron_mtraining.integration.layout_mode import CONVERT, LayoutMode
from megatron_mtraining.layout import Layout
from megatron_mtraining.metrics import Recorder


class DenseCoreAttention(torch.nn.Module):
    """Dense causal attention by PyTorch's fastest kernel on Hopper (cuDNN), what the sparse runs are compared with."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """``[s, b, h, d]`` in, ``[s, b, h * d]`` out; causal, whatever the mask argument says."""
        backend = SDPBackend.CUDNN_ATTENTION if query.is_cuda else SDPBackend.MATH
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def attention_layers(model: GPTModel) -> list[Any]:
    """The self-attention modules, in the order of the layers."""
    return [layer.self_attention for layer in model.decoder.layers]


def use(model: GPTModel, name: str) -> None:
    """The attention of a variant in every layer, in the model's mode of training; sparse ones as the plugin puts them."""
    config = variant(name)
    for number, attention in enumerate(attention_layers(model), 1):
        if config is None:
            attention.core_attention = DenseCoreAttention()
        else:
            attention.core_attention = MTrainingCoreAttention(
                model.config, number, AttnMaskType.causal, "self", mtraining=config
            )
        attention.core_attention.train(model.training)


@contextmanager
def recorded() -> Iterator[dict[int, tuple[VerticalSlashIndex, Layout, int]]]:
    """Within the block, sparse layers in training leave their index in the dict, by layer number."""
    recorder = Recorder()
    runtime.use(runtime.Runtime(MTrainingConfig(), LayoutMode(CONVERT, "one rank"), recorder=recorder))
    try:
        yield recorder.indices
    finally:
        runtime.use(None)
