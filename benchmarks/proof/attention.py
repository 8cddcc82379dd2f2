"""The attention variants of the study, put into a built model in place of its core attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.proof.estimators import PROBES, ProbeView, joint, spread_rows
from benchmarks.proof.variants import GUARD_SEGMENTS, LATE, variant
from megatron_mtraining import MTrainingConfig, VerticalSlashIndex, estimate_index, mtraining_attention
from megatron_mtraining.bitmap import count_bits
from megatron_mtraining.config import BLOCK
from megatron_mtraining.documents import segment_ends
from megatron_mtraining.integration import runtime
from megatron_mtraining.integration.core_attention import MTrainingCoreAttention
from megatron_mtraining.integration.guard import Guard
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


class ChosenIndexCoreAttention(MTrainingCoreAttention):
    """MTraining attention under an index that :meth:`choose` finds; one rank."""

    def choose(self, q: Tensor, k: Tensor) -> VerticalSlashIndex:
        """The index for ``q [batch, seq, heads, dim]`` and ``k [batch, seq, kv_heads, dim]``."""
        raise NotImplementedError

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """``[s, b, h, d]`` in, ``[s, b, h * d]`` out; the index is recorded in training."""
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            index = self.choose(q.detach(), k.detach())
        out, aux = mtraining_attention(q, k, v, config=self.mtraining, index=index, return_aux=True)
        state = runtime.current_or_none()
        recorder = None if state is None else state.recorder
        if recorder is not None and self.training:
            recorder.record(self.layer_index, aux.index, aux.layout, aux.inner_size)
        return out.transpose(0, 1).flatten(2)


class JointCoreAttention(ChosenIndexCoreAttention):
    """Under an index of :func:`benchmarks.proof.estimators.joint`.

    Args:
        share: share of the probes' mass.
        options: as of :class:`MTrainingCoreAttention`.
    """

    def __init__(self, *args: Any, share: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.share = share

    def choose(self, q: Tensor, k: Tensor) -> VerticalSlashIndex:
        """One sample at a time: the estimator knows no batch."""
        rows = spread_rows(q.shape[1], min(PROBES, q.shape[1]), q.device)
        scale = q.shape[3] ** -0.5
        found = [joint(ProbeView.make(q[i : i + 1], k[i : i + 1], rows, scale), self.share) for i in range(len(q))]
        capacity = min(found[0].column_capacity, self.mtraining.max_compact_columns)
        words = (torch.cat([getattr(index, name) for index in found]) for name in ("slash_words", "column_words"))
        return VerticalSlashIndex(*words, found[0].documents, capacity)


class GuardedCoreAttention(ChosenIndexCoreAttention):
    """Under the library's index and its guard, head by head.

    Args:
        bound: heads that recall less at the ends of :data:`GUARD_SEGMENTS` parts keep every line.
        options: as of :class:`MTrainingCoreAttention`.
    """

    def __init__(self, *args: Any, bound: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.guard = Guard(recall=bound, scope="head", segments=GUARD_SEGMENTS)

    def choose(self, q: Tensor, k: Tensor) -> VerticalSlashIndex:
        """Estimated, then judged."""
        index = estimate_index(q, k, config=self.mtraining)
        return self.guard(
            q,
            k,
            index,
            config=self.mtraining,
            layout=None,
            cp_group=None,
            tp_group=None,
            softmax_scale=None,
            layer=None,
        )


@dataclass(frozen=True)
class Measured:
    """The density of lines that hold for some rows only, in the place of an index."""

    value: Tensor

    def density(self) -> Tensor:
        """fp64 scalar."""
        return self.value


def pairs_of_rows(index: VerticalSlashIndex, first: int) -> Tensor:
    """int64 ``[batch, heads]``: pairs that the row blocks from ``first`` on keep; one document."""
    block = torch.arange(index.num_blocks, device=index.slash_words.device)
    distance = block[first:, None] - block[None, :]
    slash = index.slash_bits()[:, :, distance.clamp(min=0)] & (distance >= 0)
    columns = count_bits(index.column_words)[:, :, None, :] * (~slash & (distance > 0))
    return BLOCK * BLOCK * slash.sum((2, 3)) + BLOCK * columns.sum((2, 3))


class OwnLinesCoreAttention(MTrainingCoreAttention):
    """MTraining attention in which each segment of rows has lines of its own; one rank.

    A segment's rows are those of the attention over the sequence up to its end, so this costs more than it has to: it is for
    the loss, not for the time.

    Args:
        segments: of rows, equal parts.
        options: as of :class:`MTrainingCoreAttention`.
    """

    def __init__(self, *args: Any, segments: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.segments = segments

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """``[s, b, h, d]`` in, ``[s, b, h * d]`` out."""
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        ends = segment_ends(q.shape[1], self.mtraining.last_q, self.segments)[::-1]
        outs, pairs, begin = [], torch.zeros((), dtype=torch.int64, device=q.device), 0
        for end in ends:
            out, aux = mtraining_attention(*(x[:, :end] for x in (q, k, v)), config=self.mtraining, return_aux=True)
            outs.append(out[:, begin:])
            pairs = pairs + pairs_of_rows(aux.index, begin // BLOCK)
            begin = end
        state = runtime.current_or_none()
        recorder = None if state is None else state.recorder
        if recorder is not None and self.training:
            density = Measured((pairs.double() / (q.shape[1] ** 2 / 2)).mean())
            recorder.indices[self.layer_index] = (density, aux.layout, aux.inner_size)
        return torch.cat(outs, 1).transpose(0, 1).flatten(2)


def use(model: GPTModel, name: str) -> None:
    """The attention of a variant in every layer, in the model's mode of training; sparse ones as the plugin puts them."""
    use_by_layer(model, [name] * len(attention_layers(model)))


def use_by_layer(model: GPTModel, names: list[str]) -> None:
    """:func:`use` with a variant for each layer."""
    for number, (attention, name) in enumerate(zip(attention_layers(model), names, strict=True), 1):
        chosen = variant(name)
        if chosen.late is not None and number >= LATE:
            chosen = replace(chosen, config=chosen.late)
        contract = (model.config, number, AttnMaskType.causal, "self")
        if chosen.config is None:
            core: torch.nn.Module = DenseCoreAttention()
        elif number in chosen.dense_layers:
            core = MTrainingCoreAttention(*contract, mtraining=replace(chosen.config, dense=True))
        elif chosen.head_recall is not None:
            core = GuardedCoreAttention(*contract, mtraining=chosen.config, bound=chosen.head_recall)
        elif chosen.own_lines > 1:
            core = OwnLinesCoreAttention(*contract, mtraining=chosen.config, segments=chosen.own_lines)
        elif chosen.joint_share is None:
            core = MTrainingCoreAttention(*contract, mtraining=chosen.config)
        else:
            core = JointCoreAttention(*contract, mtraining=chosen.config, share=chosen.joint_share)
        attention.core_attention = core.train(model.training)


@contextmanager
def recorded() -> Iterator[dict[int, tuple[VerticalSlashIndex, Layout, int]]]:
    """Within the block, sparse layers in training leave their index in the dict, by layer number."""
    recorder = Recorder()
    runtime.use(runtime.Runtime(MTrainingConfig(), LayoutMode(CONVERT, "one rank"), recorder=recorder))
    try:
        yield recorder.indices
    finally:
        runtime.use(None)
