"""What the index keeps of the attention that a training step computed: of the rows that chose it, and of all rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from benchmarks.proof.attention import attention_layers
from benchmarks.proof.row_study import percentile, row_recalls
from megatron_mtraining import VerticalSlashIndex
from megatron_mtraining.block_lists import Index
from megatron_mtraining.recall import probe_recall

ROWS = 256
"""Rows, evenly placed from the first to the last, that stand for all rows of the sequence."""

Heads = tuple[Tensor, Tensor]
"""``q [1, seq, heads, dim]`` and ``k [1, seq, kv_heads, dim]`` of a layer, after RoPE."""


@contextmanager
def watched(model: GPTModel) -> Iterator[list[Heads]]:
    """Within the block every attention layer leaves the queries and keys of its last call in the list, by layer."""
    attentions = [attention.core_attention for attention in attention_layers(model)]
    seen: list[Heads] = [(torch.empty(0), torch.empty(0))] * len(attentions)

    def keep(number: int) -> Any:
        def hook(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[number] = (inputs[0].detach().transpose(0, 1), inputs[1].detach().transpose(0, 1))

        return hook

    handles = [attention.register_forward_pre_hook(keep(number)) for number, attention in enumerate(attentions)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def layer_recall(model: GPTModel, layer: int, heads: Heads, index: Index) -> dict[str, float | None]:
    """Recalls of one layer (counted from 0) of a batch of one sequence.

    Returns:
        ``probe``: of the rows that chose the lines (:func:`megatron_mtraining.recall.probe_recall`, mean over the heads; None
        for row lists, which no probe rows choose); ``true``: mean over :data:`ROWS` rows and the heads; ``worst_head``: of
        the head with the least; ``rows_5th``: 5th percentile of single rows.
    """
    q, k = heads
    probe = None
    if isinstance(index, VerticalSlashIndex):
        config = attention_layers(model)[layer].core_attention.mtraining
        probe = probe_recall(q, k, index, config=config).mean().item()
    rows = torch.linspace(0, q.shape[1] - 1, ROWS, device=q.device).long()
    found = row_recalls(q, k, rows, {"own": index}, q.shape[3] ** -0.5)["own"]
    return {
        "probe": probe,
        "true": found.mean().item(),
        "worst_head": found.mean(1).min().item(),
        "rows_5th": percentile(found, 5),
    }


def recall_line(model: GPTModel, seen: list[Heads], indices: dict[int, Any]) -> dict[str, list[float | None]]:
    """:func:`layer_recall` of every layer of a step, a list by layer for each of its keys.

    Args:
        model: with the attention that the step ran.
        seen: of :func:`watched`.
        indices: of :func:`benchmarks.proof.attention.recorded`.
    """
    with torch.no_grad():
        found = [layer_recall(model, layer, seen[layer], indices[layer][0]) for layer in sorted(indices)]
    return {key: [None if (value := line[key]) is None else round(value, 5) for line in found] for key in found[0]}
