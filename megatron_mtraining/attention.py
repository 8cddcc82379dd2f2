"""The public functions: :func:`mtraining_attention` and :func:`estimate_index`. They need no Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .comm import GroupExchange, RingGroups, drive
from .config import BLOCK, MTrainingConfig
from .documents import Documents
from .estimate import estimate_steps
from .index import VerticalSlashIndex
from .layout import Layout
from .metrics import timed
from .ops import operators
from .ring import Columns, RingBackward, RingCall, RingForward, Saved, run

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class AttentionAux:
    """What an attention call knows besides its output.

    Attributes:
        lse: ``[batch, heads, local_seq]``, natural log, fp32 (fp64 for fp64 inputs), not differentiable.
        index: the kept lines.
        layout: the placement of the sequence.
        inner_size: ranks of an inner ring.
    """

    lse: Tensor
    index: VerticalSlashIndex
    layout: Layout
    inner_size: int


def mtraining_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    config: MTrainingConfig | None = None,
    layout: Layout | None = None,
    cp_group: dist.ProcessGroup | None = None,
    inner_group: dist.ProcessGroup | None = None,
    outer_group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    index: VerticalSlashIndex | None = None,
    documents: Documents | None = None,
    return_aux: bool = False,
) -> Any:
    """Distributed dynamic sparse causal attention (paper, section 3). Differentiable in q, k and v.

    Args:
        q: ``[batch, local_seq, heads, head_dim]``, this rank's queries in the order of ``layout``; bf16, fp16, fp32 or fp64.
        k, v: ``[batch, local_seq, kv_heads, head_dim]``, not expanded to the query heads. Any strides.
        config: options; the defaults of :class:`MTrainingConfig` if not given.
        layout: placement of the sequence; wins over the config's.
        cp_group: the context-parallel ranks; ``None``: this process has the whole sequence.
        inner_group, outer_group: both given: a hierarchical ring, inner the adjacent CP ranks, outer the strided ones.
        softmax_scale: ``head_dim ** -0.5`` if not given.
        index: kept lines to use instead of estimating them.
        documents: documents of a packed sequence, the same for every sample; one document if not given.
        return_aux: whether to return an :class:`AttentionAux` too.

    Returns:
        ``out [batch, local_seq, heads, head_dim]`` in the dtype of q, or ``(out, aux)``.

    Raises:
        ValueError: for inputs that do not fit together; the message names the argument, its value and what would be valid.
        RuntimeError: if the config's kernel is not to be had for these inputs.
    """
    groups = RingGroups(cp_group, inner_group, outer_group)
    return attention_on_groups(
        q, k, v, config=config or MTrainingConfig(), layout=layout, groups=groups, softmax_scale=softmax_scale,
        index=index, documents=documents, return_aux=return_aux,
    )  # fmt: skip


def attention_on_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    config: MTrainingConfig,
    groups: RingGroups,
    layout: Layout | None = None,
    softmax_scale: float | None = None,
    index: VerticalSlashIndex | None = None,
    documents: Documents | None = None,
    return_aux: bool = False,
) -> Any:
    """:func:`mtraining_attention` with all process groups, those for gradients included, in one object."""
    layout = check_inputs(q, k, v, config, layout, groups.cp_size)
    seq = q.shape[1]
    q, k, v = (_aligned(pad_to_blocks(x)) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if index is None:
        documents = _check_documents(documents, layout)
        with timed("index", q.device), torch.no_grad():
            index = _make_index(q, k, config, layout, documents, groups, scale)
    call = RingCall(
        index=check_index(index, q, layout),
        layout=layout,
        config=config,
        scale=scale,
        cp_rank=groups.cp_rank,
        inner_size=groups.inner_size(config.ring),
        ops=operators(config.kernel, q),
        exchange=GroupExchange(groups) if groups.cp_size > 1 else None,
    )
    out, lse = RingAttention.apply(q, k, v, call)
    out = out[:, :seq]
    return (out, AttentionAux(lse[..., :seq], index, layout, call.inner_size)) if return_aux else out


def estimate_index(
    q: Tensor,
    k: Tensor,
    *,
    config: MTrainingConfig | None = None,
    layout: Layout | None = None,
    cp_group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    documents: Documents | None = None,
) -> VerticalSlashIndex:
    """Estimates the kept lines from the last queries (paper, section 3.1). Arguments as in :func:`mtraining_attention`.

    Returns:
        The index of the whole sequence; the same bits on every rank, for every number of ranks and layout.
    """
    config = config or MTrainingConfig()
    groups = RingGroups(cp_group)
    layout = check_inputs(q, k, k, config, layout, groups.cp_size)
    documents = _check_documents(documents, layout)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    with torch.no_grad():
        return _make_index(pad_to_blocks(q), pad_to_blocks(k), config, layout, documents, groups, scale)


def _make_index(
    q: Tensor,
    k: Tensor,
    config: MTrainingConfig,
    layout: Layout,
    documents: Documents,
    groups: RingGroups,
    scale: float,
) -> VerticalSlashIndex:
    if config.dense:
        return VerticalSlashIndex.dense(q.shape[0], q.shape[2], documents, q.device)
    steps = estimate_steps(
        q, k, config=config, layout=layout, documents=documents, cp_rank=groups.cp_rank, scale=scale,
        ops=operators(config.kernel, q),
    )  # fmt: skip
    return drive(steps, groups.cp)


class RingAttention(torch.autograd.Function):
    """Autograd of one rank's ring: the same index and schedule object in both directions."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> tuple[Tensor, Tensor]:
        """Runs the forward ring; returns ``(out, lse)``."""
        ring = RingForward(call, q, k, v)
        with timed("forward", q.device):
            run([ring])
        save_ring(ctx, ring)
        ctx.call = call
        ctx.mark_non_differentiable(ring.lse)
        return ring.out, ring.lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Runs the backward ring; returns the gradients of q, k, v."""
        ring = RingBackward(ctx.call, saved_ring(ctx.saved_tensors), _aligned(dout))
        with timed("backward", dout.device):
            run([ring])
        return (*ring.gradients(), None)


def save_ring(ctx: Any, *rings: RingForward) -> None:
    """Saves what backward needs of one or several forward rings, as tensors that autograd's hooks can offload."""
    tensors: list[Tensor | None] = []
    for ring in rings:
        columns = ring.columns if ring.call.config.vertical_backward == "save" else None
        compact = (None, None, None) if columns is None else (columns.keys, columns.values, columns.positions)
        tensors += [ring.q, ring.k, ring.v, ring.out, ring.lse, ring.kept, *compact]
    ctx.save_for_backward(*tensors)


def saved_ring(tensors: tuple[Tensor, ...]) -> Saved:
    """What :func:`save_ring` saved of one ring."""
    q, k, v, out, lse, kept, keys, values, positions = tensors
    columns = None if keys is None else Columns(keys, values, positions)
    return Saved(q, k, v, out, lse, kept, columns)


def pad_to_blocks(x: Tensor) -> Tensor:
    """Pads ``[batch, seq, heads, dim]`` with zero rows to whole blocks; they come last, so causality hides them."""
    missing = -x.shape[1] % BLOCK
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x


def _aligned(x: Tensor) -> Tensor:
    """A copy where a kernel could not read ``x``: last dimension strided, broadcast rows, or rows off 16 bytes."""
    unit = 16 // x.element_size()
    strides = x.stride()
    fits = strides[-1] == 1 and all(s > 0 and s % unit == 0 for s in strides[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, config: MTrainingConfig, layout: Layout | None, cp_size: int
) -> Layout:
    """Refuses inputs that do not fit together, and returns the layout.

    Raises:
        ValueError: naming the argument, its value and the valid ones.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: must be [batch, local_seq, heads, head_dim]")
        if x.dtype not in DTYPES or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}: must be bf16, fp16, fp32 or fp64, as q ({q.dtype} on {q.device})"
            )
    if k.shape[:3] != v.shape[:3] or k.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: batch and sequence must agree, and k and v have "
            f"the same heads (cross attention and q_len != k_len are not supported)"
        )
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        raise ValueError(
            f"head dimensions of q, k, v are {q.shape[-1]}, {k.shape[-1]}, {v.shape[-1]}: must be equal (multi-latent "
            f"attention with d_qk != d_v is not supported)"
        )
    if k.shape[2] < 1 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads, k has {k.shape[2]}: must be a multiple")
    if layout is None:
        layout = Layout.from_config(config, q.shape[1] * cp_size, cp_size)
    if layout.cp_size != cp_size or layout.local_seq_len != q.shape[1]:
        raise ValueError(
            f"layout is for {layout.cp_size} ranks of {layout.local_seq_len} tokens: the inputs are of {cp_size} ranks of "
            f"{q.shape[1]} tokens"
        )
    return layout


def _check_documents(documents: Documents | None, layout: Layout) -> Documents:
    documents = documents or Documents.single(layout.seq_len)
    if documents.seq_len != layout.seq_len:
        raise ValueError(f"documents are for {documents.seq_len} tokens: the sequence has {layout.seq_len}")
    return documents


def check_index(index: VerticalSlashIndex, q: Tensor, layout: Layout) -> VerticalSlashIndex:
    """Refuses an index of another batch, number of heads, length or device.

    Raises:
        ValueError: naming both.
    """
    shape, device = tuple(index.column_words.shape), index.column_words.device
    if shape != (q.shape[0], q.shape[2], layout.num_blocks) or index.seq_len != layout.seq_len or device != q.device:
        raise ValueError(
            f"index is for [batch, heads, blocks] {shape}, {index.seq_len} tokens on {device}: the inputs have "
            f"{(q.shape[0], q.shape[2], layout.num_blocks)}, {layout.seq_len} tokens on {q.device}"
        )
    return index
