"""Other implementations of attention, as far as they are installed: dense causal, or slash blocks alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.problems import Problem
from megatron_mtraining import VerticalSlashIndex

FLEX_BLOCK = 128

Passes = tuple[Callable[[], object], Callable[[], object]]


def passes(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Passes:
    """(forward, backward) of a function of ``[batch, heads, seq, dim]`` tensors."""
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    grad = dout.transpose(1, 2)
    out = attend(*leaves)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*leaves)

    return forward, lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def sdpa(backend: SDPBackend) -> Callable[..., Tensor]:
    """Dense causal SDPA of one backend."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return attend


def flex_slash(problem: Problem, index: VerticalSlashIndex) -> tuple[Callable[..., Tensor], float]:
    """FlexAttention over the 128-blocks that hold a slash block, and the pairs that it works off."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    blocks = problem.seq_len // FLEX_BLOCK
    bits = index.slash_bits()[0]  # distances in 64-blocks; a 128-block pair (i, j) holds 2 (i - j) + {-1, 0, 1}
    near = torch.nn.functional.pad(bits, (1, 1))[:, : 2 * blocks + 2]
    active = (near[:, :-2:2] | near[:, 1:-1:2] | near[:, 2::2])[:, :blocks]
    row = torch.arange(blocks, device="cuda")
    distance = row[:, None] - row[None, :]
    mask = torch.stack([head[distance.clamp(min=0)] & (distance >= 0) for head in active])
    full = mask & (distance > 0)
    diagonal = mask & (distance == 0)

    def compact(x: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.argsort(x.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
        return x.sum(-1).to(torch.int32)[None], order[None]

    block_mask = BlockMask.from_kv_blocks(
        *compact(diagonal), *compact(full), BLOCK_SIZE=FLEX_BLOCK, mask_mod=lambda b, h, q, k: q >= k
    )
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    pairs = float(mask.sum()) * FLEX_BLOCK**2

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=block_mask, enable_gqa=True)
        return out

    return attend, pairs


def flash4() -> Callable[..., Tensor] | None:
    """FlashAttention-4 dense causal, where it is installed."""
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return None
    from flash_attn.cute import flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


DENSE = {"cudnn": sdpa(SDPBackend.CUDNN_ATTENTION), "flash-attention-2": sdpa(SDPBackend.FLASH_ATTENTION)}
