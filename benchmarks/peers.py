"""Other implementations of attention, as far as they are there: dense causal, slash blocks alone, or the same mask."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import minference
from benchmarks.problems import BlockLists
from megatron_mtraining import VerticalSlashIndex

Attend = Callable[..., Tensor]


class Passes:
    """Forward and backward of a function of ``[batch, heads, seq, dim]`` tensors."""

    def __init__(self, attend: Attend, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        q, k, v, dout = tensors
        self.attend = attend
        self.leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        self.dout = dout.transpose(1, 2)
        self.out: Tensor | None = None

    def forward(self) -> None:
        """One forward pass; its graph serves the backward passes."""
        self.out = None
        self.out = self.attend(*self.leaves)

    def backward(self) -> None:
        """One backward pass of the last forward pass."""
        assert self.out is not None
        torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)


def _sdpa(backend: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attend


def _flex_slash(lists: BlockLists) -> Attend:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    diagonal, full = lists.of_rows()
    block_mask = BlockMask.from_kv_blocks(*diagonal, *full, BLOCK_SIZE=lists.block, mask_mod=lambda b, h, q, k: q >= k)
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=block_mask, enable_gqa=True)
        return out

    return attend


def _has_flash4() -> bool:
    names = ("flash_attn", "flash_attn.cute", "cutlass")
    return all(importlib.util.find_spec(name) is not None for name in names)


def dense() -> dict[str, Attend]:
    """The dense implementations that are there."""
    found = {"cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION), "flash-attention-2": _sdpa(SDPBackend.FLASH_ATTENTION)}
    if _has_flash4():
        from benchmarks import flash4

        found["flash-attention-4"] = flash4.dense
    return found


def slash() -> dict[str, Callable[[BlockLists], Attend]]:
    """The implementations over 128-blocks that are there, each made for given lists."""
    found: dict[str, Callable[[BlockLists], Attend]] = {"flex-slash-128": _flex_slash}
    if _has_flash4():
        from benchmarks import flash4

        found["flash-attention-4-slash-128"] = flash4.slash
    return found


def sparse(checkout: Path | None) -> dict[str, Callable[[VerticalSlashIndex], Attend]]:
    """The implementations of the same mask that are there, each made for a given index; ``checkout``: of MInference."""
    return {"minference-triton": partial(minference.attention, checkout)} if checkout else {}
