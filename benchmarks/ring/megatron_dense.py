"""What a Megatron user has today: Transformer Engine's dense attention, its ring over zigzag chunks (where it is installed)."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.timing import measure


def installed() -> bool:
    """Whether Transformer Engine is there."""
    return importlib.util.find_spec("transformer_engine") is not None


def attention(heads: int, kv_heads: int, head_dim: int, group: dist.ProcessGroup) -> Any:
    """Its attention module; context parallel over ``group`` where that has several ranks."""
    from transformer_engine.pytorch import DotProductAttention

    ring: dict[str, Any] = {}
    if dist.get_world_size(group) > 1:
        ring = {
            "cp_group": group,
            "cp_global_ranks": dist.get_process_group_ranks(group),
            "cp_stream": torch.cuda.Stream(),
            "cp_comm_type": "p2p",
        }
    return DotProductAttention(
        heads, head_dim, num_gqa_groups=kv_heads, attention_dropout=0.0, qkv_format="bshd", attn_mask_type="causal", **ring
    )  # fmt: skip


class MegatronDense:
    """Calls of one rank: ``q, k, v, dout`` of the whole sequence are cut to its two zigzag chunks."""

    def __init__(self, tensors: tuple[Tensor, ...], group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        rows = tensors[0].shape[1] // (2 * size)
        mine = (rank, 2 * size - 1 - rank)
        local = [torch.cat([x[:, n * rows : (n + 1) * rows] for n in mine], 1) for x in tensors]
        self.leaves = [x.requires_grad_() for x in local[:3]]
        self.dout = local[3].flatten(2)
        self.attend = attention(local[0].shape[2], local[1].shape[2], local[0].shape[3], group)

    def forward(self) -> Tensor:
        """Forward; a graph is made, as in training."""
        out: Tensor = self.attend(*self.leaves)
        return out

    def call(self) -> tuple[Tensor, ...]:
        """Forward and backward."""
        return torch.autograd.grad(self.forward(), self.leaves, self.dout)


def measured(tensors: tuple[Tensor, ...], group: dist.ProcessGroup) -> dict[str, float]:
    """Milliseconds on this rank. It forbids a second backward pass, so backward is the call without forward."""
    ranks = MegatronDense(tensors, group)
    dist.barrier(group)
    forward = measure(ranks.forward, repeats=3, budget_ms=float("inf"), queued=True).ms
    dist.barrier(group)
    call = measure(ranks.call, repeats=3, budget_ms=float("inf"), queued=True).ms
    return {"forward": forward, "backward": call - forward, "call": call}
