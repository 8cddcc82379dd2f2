"""The authors' Triton kernel (microsoft/MInference, branch wenxuan/mtrain) on the same slash blocks and columns.

No release of the package ``minference`` holds that kernel. It is loaded from a checkout that does, without the rest of the
package, which needs more than the kernel does.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.problems import BlockLists
from megatron_mtraining import VerticalSlashIndex
from megatron_mtraining.config import BLOCK

KERNEL = "minference.ops.minference_attn_triton"


def checkout(named: str) -> Path:
    """A checkout given on a command line.

    Raises:
        argparse.ArgumentTypeError: if the folder does not hold the kernel.
    """
    if not Path(named, *KERNEL.split(".")).with_suffix(".py").is_file():
        raise argparse.ArgumentTypeError(f"{named} has no {KERNEL} (branch wenxuan/mtrain of microsoft/MInference)")
    return Path(named)


def kernels(folder: Path) -> Any:
    """The module of the kernel in a checkout; its packages are left empty, as their imports are not needed."""
    for name in ("minference", "minference.ops"):
        package = sys.modules.setdefault(name, ModuleType(name))
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
    return importlib.import_module(KERNEL)


def lists(index: VerticalSlashIndex) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the kernel reads for each row block of 64: its columns and its key blocks, of one sample without packing.

    Returns:
        ``bar_idx`` int32 ``[1, heads, blocks, most columns]``, the columns outside the kept blocks, ascending;
        ``bar_cnt`` int32 ``[1, heads, blocks, 2]``, where a row's list begins and ends;
        ``block_idx`` int32 ``[1, heads, blocks, blocks]``, the kept blocks ascending, then the others;
        ``block_cnt`` int32 ``[1, heads, blocks]``, how many are kept.
    """
    bits, columns = index.slash_bits()[0], index.column_bits()[0]
    heads, blocks = bits.shape
    row = torch.arange(blocks, device=bits.device)
    distance = row[:, None] - row[None, :]
    kept = bits[:, distance.clamp(min=0)] & (distance >= 0)
    block_cnt, block_idx = BlockLists(kept, BLOCK).of_rows_together()
    most = max(1, int(columns.sum(-1).max()))
    bar_idx = torch.zeros(1, heads, blocks, most, dtype=torch.int32, device=bits.device)
    bar_cnt = torch.zeros(1, heads, blocks, 2, dtype=torch.int32, device=bits.device)
    for head in range(heads):
        positions = columns[head].nonzero()[:, 0]
        block = positions // BLOCK
        allowed = (row[:, None] > block) & ~kept[head][:, block]
        order = torch.argsort(allowed.to(torch.int8), dim=-1, descending=True, stable=True)
        bar_idx[0, head, :, : len(positions)] = positions[order].to(torch.int32)
        bar_cnt[0, head, :, 1] = allowed.sum(-1)
    return bar_idx, bar_cnt, block_idx, block_cnt


def attention(folder: Path, index: VerticalSlashIndex) -> Callable[..., Tensor]:
    """Attention of ``[1, heads, seq, dim]`` tensors over what the index keeps, by the kernel of a checkout."""
    module, given = kernels(folder), lists(index)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scale = q.shape[-1] ** -0.5
            out, lse = module.block_bar_attn_fwd(q, k, v, None, None, scale, *given, granularity=BLOCK)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.scale = scale
            return out  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            q, k, v, out, lse = ctx.saved_tensors
            found = module.block_bar_attn_bwd(
                grads[0], q, k, v, out, None, None, None, lse, ctx.scale, *given, granularity=BLOCK, deterministic=False
            )
            return tuple(found)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = Attention.apply(*(x.transpose(1, 2) for x in (q, k, v)))  # type: ignore[no-untyped-call]
        return out.transpose(1, 2)

    return attend
