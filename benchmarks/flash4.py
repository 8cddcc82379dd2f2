"""FlashAttention-4 (package flash-attn-4), dense causal and over lists of 128-blocks. Imported where it is installed.

Beside the package it needs nvidia-cutlass-dsl with its libraries for the CUDA version, quack-kernels, apache-tvm-ffi and
torch-c-dlpack-ext. Installed with ``pip install --target DIR``, PYTHONPATH is ``DIR:DIR/nvidia_cutlass_dsl/dsl_packages``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from flash_attn.cute import flash_attn_func
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from torch import Tensor

from benchmarks.problems import BlockLists


@cute.jit
def causal_mask(batch: Any, head: Any, query: Any, key: Any, seqlen: Any, aux: Any) -> Any:
    """Keeps the lower triangle; asked in the diagonal blocks alone."""
    return key <= query


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense causal attention of ``[batch, heads, seq, dim]`` tensors."""
    out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
    return _first(out).transpose(1, 2)


def slash(lists: BlockLists) -> Callable[..., Tensor]:
    """Attention over the listed blocks. Lists differ by query head, so heads of a group must not be packed."""
    rows, keys = (
        BlockSparseTensorsTorch(*diagonal, *full, block_size=(lists.block, lists.block))
        for diagonal, full in (lists.of_rows(), lists.of_keys())
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask_mod=causal_mask, pack_gqa=False,
            block_sparse_tensors=rows, block_sparse_tensors_bwd=keys,
        )  # fmt: skip
        return _first(out).transpose(1, 2)

    return attend


def _first(out: Any) -> Tensor:
    tensor: Tensor = out[0] if isinstance(out, tuple) else out
    return tensor
