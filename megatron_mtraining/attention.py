"""The public functions: :func:`mtraining_attention` and :func:`estimate_index`. They need no Megatron."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .block_lists import Index, index_of_words, local_index
from .comm import RingGroups, require_equal_shapes
from .config import BLOCK, MTrainingConfig
from .documents import Documents
from .layout import Layout
from .policies.lines import column_capacity
from .ring_op import Context, estimate, number_of, release, ring_attention

SINGLE = RingGroups()
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class AttentionAux:
    """What an attention call knows besides its output.

    Attributes:
        lse: ``[batch, heads, local_seq]``, natural log, fp32 (fp64 for fp64 inputs), not differentiable.
        index: the kept lines, or the row lists of this rank.
        layout: the placement of the sequence.
        inner_size: ranks of an inner ring.
    """

    lse: Tensor
    index: Index
    layout: Layout
    inner_size: int


def mtraining_attention(  # noqa: PLR0913 - the public interface names them all
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
    index: Index | None = None,
    documents: Documents | None = None,
    return_aux: bool = False,
) -> Any:
    """Distributed dynamic sparse causal attention (paper, section 3). Differentiable in q, k and v.

    Args:
        q: ``[batch, local_seq, heads, head_dim]``, this rank's queries in the order of ``layout``; bf16, fp16, fp32 or fp64.
        k, v: ``[batch, local_seq, kv_heads, head_dim]``, not expanded to the query heads. Any strides.
        config: options; the defaults of :class:`MTrainingConfig` if not given.
        layout: placement of the sequence; wins over the config's. Not given: that of the config for as many tokens as all
            ranks hold; then the ranks compare shapes in the first call with new ones.
        cp_group: the context-parallel ranks; ``None``: this process has the whole sequence.
        inner_group, outer_group: both given: a hierarchical ring, inner the adjacent CP ranks, outer the strided ones.
        softmax_scale: ``head_dim ** -0.5`` if not given.
        index: what to keep instead of estimating it: lines, or row lists (:class:`BlockListIndex`) with all rows or those
            of this rank.
        documents: documents of a packed sequence, the same for every sample; one document if not given.
        return_aux: whether to return an :class:`AttentionAux` too.

    Returns:
        ``out [batch, local_seq, heads, head_dim]`` in the dtype of q, or ``(out, aux)``.

    Raises:
        ValueError: for inputs that do not fit together; the message names the argument, its value and what would be valid.
        RuntimeError: if the config's kernel is not to be had for these inputs.
    """
    return attention_on_groups(
        q, k, v, config=config or MTrainingConfig(), layout=layout, groups=RingGroups(cp_group, inner_group, outer_group),
        softmax_scale=softmax_scale, index=index, documents=documents, return_aux=return_aux,
    )  # fmt: skip


@torch.compiler.disable
def attention_on_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    config: MTrainingConfig,
    groups: RingGroups,
    layout: Layout | None = None,
    softmax_scale: float | None = None,
    index: Index | None = None,
    documents: Documents | None = None,
    return_aux: bool = False,
) -> Any:
    """:func:`mtraining_attention` with all process groups, those for gradients included, in one object."""
    capacity = None if index is None else index.column_capacity
    if index is not None and documents is not None and documents != index.documents:
        raise ValueError(f"index is for documents {index.documents}: the call is for {documents}")
    documents = documents if index is None else index.documents
    context = make_context(
        q, k, v, config, groups, capacity=capacity, layout=layout, softmax_scale=softmax_scale, documents=documents
    )
    words: tuple[Tensor, ...] = ()
    if index is not None:
        index = local_index(index, context.layout, groups.cp_rank)
        words = (index.slash_words, index.column_words)
        check_words(words, q, context)
    out, lse, *found_words = attend(q, k, v, words, number_of(context))
    if not return_aux:
        return out
    found = index_of_words(
        found_words[0], found_words[1], context.documents, context.column_capacity, context.row_blocks
    )
    return out, AttentionAux(lse, found, context.layout, context.inner_size)


def make_context(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: MTrainingConfig,
    groups: RingGroups,
    *,
    capacity: int | None = None,
    layout: Layout | None = None,
    softmax_scale: float | None = None,
    documents: Documents | None = None,
) -> Context:
    """Checks a call and fills in what was not given; ``capacity`` is the index's, if there is one.

    Raises:
        ValueError: naming the argument, its value and what would be valid.
    """
    if not isinstance(config, MTrainingConfig):
        raise ValueError(f"config={config!r}: must be an MTrainingConfig")
    inner_size = groups.inner_size(config.ring)
    if layout is None and groups.cp is not None and groups.cp_size > 1:
        require_equal_shapes({"q": q, "k": k, "v": v}, groups.cp)
    layout = check_inputs(q, k, v, config, layout, groups.cp_size)
    documents = Documents.single(layout.seq_len) if documents is None else documents
    if documents.seq_len != layout.seq_len:
        raise ValueError(f"documents are for {documents.seq_len} tokens: the sequence has {layout.seq_len}")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if not 0 < scale < float("inf"):
        raise ValueError(f"softmax_scale={softmax_scale}: must be a positive number")
    if capacity is None:
        capacity = column_capacity(documents, config)
    return Context(config, layout, documents, groups, scale, inner_size, capacity)


def attend(
    q: Tensor, k: Tensor, v: Tensor, words: tuple[Tensor, ...], number: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(out, lse, slash_words, column_words)`` of a checked call, under the given words or estimated ones."""
    seq = q.shape[1]
    q, k, v = (pad_to_blocks(x) for x in (q, k, v))
    slash_words, column_words = words or estimate(q.detach(), k.detach(), number)
    out, lse, *_ = ring_attention(q, k, v, slash_words, column_words, number)
    return out[:, :seq], lse[..., :seq].detach(), slash_words, column_words


class MTrainingAttention(torch.nn.Module):
    """:func:`mtraining_attention` for one length, prepared in advance: ``torch.compile`` takes it without graph breaks.

    Args:
        seq_len: global sequence length.
        head_dim: head dimension of q, k and v.
        config, layout, softmax_scale, documents: as in :func:`mtraining_attention`.
        groups: process groups of the ring; a single rank if not given.

    Raises:
        ValueError: naming the argument, its value and what would be valid.
    """

    def __init__(
        self,
        seq_len: int,
        head_dim: int,
        *,
        config: MTrainingConfig | None = None,
        groups: RingGroups = SINGLE,
        layout: Layout | None = None,
        softmax_scale: float | None = None,
        documents: Documents | None = None,
    ) -> None:
        super().__init__()
        config = config or MTrainingConfig()
        layout = layout or Layout.from_config(config, seq_len, groups.cp_size)
        local = torch.empty(1, layout.local_seq_len, 1, head_dim, device="meta")
        self.context = make_context(
            local, local, local, config, groups, layout=layout, softmax_scale=softmax_scale, documents=documents
        )
        self._register()

    def _register(self) -> None:
        self._number = number_of(self.context, forever=True)
        weakref.finalize(self, release, self._number)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies and unpickled modules get a number of their own: the first module's is released with it."""
        super().__setstate__(state)
        self._register()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[batch, local_seq, heads, head_dim]`` in and out, as in :func:`mtraining_attention`."""
        return attend(q, k, v, (), self._number)[0]


def estimate_index(
    q: Tensor,
    k: Tensor,
    *,
    config: MTrainingConfig | None = None,
    layout: Layout | None = None,
    cp_group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    documents: Documents | None = None,
) -> Index:
    """Estimates what is kept, by ``config.index_policy`` (paper, section 3.1). Arguments as in :func:`mtraining_attention`.

    Returns:
        The lines of the whole sequence, the same bits on every rank, for every number of ranks and layout; or, for the
        policies that choose row by row, the row lists of this rank.
    """
    # No ring runs here, so none needs to be possible.
    config, groups = replace(config or MTrainingConfig(), ring="flat"), RingGroups(cp_group)
    context = make_context(q, k, k, config, groups, layout=layout, softmax_scale=softmax_scale, documents=documents)
    q, k = (pad_to_blocks(x.detach()) for x in (q, k))
    slash_words, column_words = estimate(q, k, number_of(context))
    rows = context.row_blocks
    return index_of_words(slash_words, column_words, context.documents, context.column_capacity, rows)


def pad_to_blocks(x: Tensor) -> Tensor:
    """Pads ``[batch, seq, heads, dim]`` with zero rows to whole blocks; they come last, so causality hides them."""
    missing = -x.shape[1] % BLOCK
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, config: MTrainingConfig, layout: Layout | None, cp_size: int
) -> Layout:
    """Refuses inputs that do not fit together, and returns the layout.

    Raises:
        ValueError: naming the argument, its value and the valid ones.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: must be [batch, local_seq, heads, head_dim], none of them 0"
            )
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


def check_words(words: tuple[Tensor, ...], q: Tensor, context: Context) -> None:
    """Refuses an index of another batch, number of heads, length or device.

    Raises:
        ValueError: naming both.
    """
    expected = (q.shape[0], q.shape[2], context.layout.num_blocks)
    shape, device = tuple(words[1].shape), words[1].device
    if shape != expected or device != q.device:
        raise ValueError(
            f"index is for [batch, heads, blocks] {shape} on {device}: the inputs have {expected} on {q.device}"
        )
