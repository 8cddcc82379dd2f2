"""For tests and studies: all ranks of a ring in one process, and a dense oracle."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from .attention import SINGLE, AttentionAux, check_words, make_context, pad_to_blocks
from .block_lists import BlockListIndex, Index, local_index
from .comm import Collective, Result, VirtualExchange, combine
from .config import MTrainingConfig
from .documents import Documents
from .estimate import Estimation, estimate_steps
from .index import VerticalSlashIndex
from .layout import Layout
from .ops import operators
from .ring import RingBackward, RingForward, Saved, run
from .ring_call import Columns, RingCall
from .ring_op import exactly


def run_virtual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    config: MTrainingConfig | None = None,
    inner_size: int | None = None,
    index: Index | None = None,
    documents: Documents | None = None,
    softmax_scale: float | None = None,
    return_aux: bool = False,
) -> Any:
    """:func:`mtraining_attention` with all ranks of ``layout`` played one after another. Differentiable.

    Args:
        q, k, v: the whole sequence, ``[batch, seq_len, heads, head_dim]`` in its natural order.
        layout: placement, and with it the number of ranks.
        inner_size: ranks of an inner ring; a flat ring if not given.
        config, index, documents, softmax_scale, return_aux: as in :func:`mtraining_attention`.

    Returns:
        ``out`` of the whole sequence, or ``(out, aux)`` with the whole ``lse``.
    """
    config = config or MTrainingConfig()
    size = layout.cp_size
    inner_size = inner_size or size
    if size % inner_size:
        raise ValueError(f"inner_size={inner_size}: must divide cp_size={size}")
    whole = Layout.contiguous(layout.seq_len, 1)
    capacity = None if index is None else index.column_capacity
    documents = index.documents if index is not None else documents
    context = make_context(
        q, k, v, config, SINGLE, capacity=capacity, layout=whole, softmax_scale=softmax_scale, documents=documents
    )
    if index is None:
        index = estimate_virtual(
            q,
            k,
            layout=layout,
            config=config,
            documents=context.documents,
            softmax_scale=context.scale,
            check_same=True,
        )
    index = local_index(index, whole, 0)
    check_words((index.slash_words, index.column_words), q, context)
    mailbox: dict[Any, Any] = {}
    ops = operators(config.kernel, q)
    calls = [
        RingCall(
            local_index(index, layout, rank),
            layout,
            config,
            context.scale,
            rank,
            inner_size,
            ops,
            VirtualExchange(mailbox, rank),
        )
        for rank in range(size)
    ]
    flat = [pad_to_blocks(layout.shard(x, rank)) for x in (q, k, v) for rank in range(size)]
    results = VirtualRing.apply(calls, *flat)
    out = layout.unshard([x[:, : layout.local_seq_len] for x in results[:size]])
    if not return_aux:
        return out
    lse = layout.unshard([x[..., : layout.local_seq_len] for x in results[size:]], dim=2)
    return out, AttentionAux(lse, index, layout, inner_size)


def estimate_virtual(
    q: Tensor,
    k: Tensor,
    *,
    layout: Layout,
    config: MTrainingConfig,
    documents: Documents | None = None,
    softmax_scale: float | None = None,
    check_same: bool = False,
) -> Index:
    """The index that the ranks of ``layout`` estimate together, from whole tensors: all lines, or all row lists.

    Raises:
        AssertionError: with ``check_same``, if the ranks do not agree in every bit.
    """
    documents = documents or Documents.single(layout.seq_len)
    if config.dense:
        return VerticalSlashIndex.dense(q.shape[0], q.shape[2], documents, q.device)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    with torch.no_grad():
        steps = [
            estimate_steps(
                Estimation(
                    q=pad_to_blocks(layout.shard(q, rank)),
                    k=pad_to_blocks(layout.shard(k, rank)),
                    config=config,
                    layout=layout,
                    documents=documents,
                    cp_rank=rank,
                    scale=scale,
                    ops=operators(config.kernel, q),
                )
            )
            for rank in range(layout.cp_size)
        ]
        with exactly(q):
            indices = lockstep(steps)
    if isinstance(indices[0], BlockListIndex):
        return BlockListIndex.of_ranks([index for index in indices if isinstance(index, BlockListIndex)])
    for other in indices[1:] if check_same else []:
        assert torch.equal(other.slash_words, indices[0].slash_words), "ranks disagree on the slash lines"
        assert torch.equal(other.column_words, indices[0].column_words), "ranks disagree on the columns"
    return indices[0]


def lockstep(steps: list[Generator[Collective, Tensor, Result]]) -> list[Result]:
    """Runs one computation per rank in one process, performing their collectives together.

    Raises:
        AssertionError: if the ranks do not ask for the same collectives.
    """
    answers: list[Any] = [None] * len(steps)
    while True:
        requests: list[Collective] = []
        results: list[Result] = []
        for rank, computation in enumerate(steps):
            try:
                requests.append(computation.send(answers[rank]))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            assert len(results) == len(steps), "some ranks ended before others"
            return results
        assert len({type(request) for request in requests}) == 1, "ranks ask for different collectives"
        answers = list(combine(requests))


class VirtualRing(torch.autograd.Function):
    """Autograd of all ranks of a ring. Inputs: the parts of q, then of k, then of v; outputs: those of out, then of lse."""

    @staticmethod
    def forward(ctx: Any, calls: list[RingCall], *parts: Tensor) -> tuple[Tensor, ...]:
        """Runs the forward rings of all ranks in lockstep."""
        size = len(calls)
        rings = [RingForward(calls[r], parts[r], parts[size + r], parts[2 * size + r]) for r in range(size)]
        with exactly(parts[0]):
            run(rings)
        ctx.calls = calls
        ctx.saved = [saved_of(ring) for ring in rings]
        ctx.mark_non_differentiable(*(ring.lse for ring in rings))
        return (*(ring.out for ring in rings), *(ring.lse for ring in rings))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Runs the backward rings of all ranks in lockstep."""
        rings = [
            RingBackward(call, saved, grad.contiguous())
            for call, saved, grad in zip(ctx.calls, ctx.saved, grads[: len(ctx.calls)], strict=True)
        ]
        with exactly(grads[0]):
            run(rings)
        gradients = [ring.gradients() for ring in rings]
        return (None, *(g[0] for g in gradients), *(g[1][0] for g in gradients), *(g[1][1] for g in gradients))


def saved_of(ring: RingForward) -> Saved:
    """What backward needs of a forward ring. Its outputs are detached: held themselves, they would hold their own graph,
    and no ring of a played call would ever be freed.
    """
    columns: Columns | None = ring.columns if ring.call.config.vertical_backward == "save" else None
    return Saved(ring.q, ring.k, ring.v, ring.out.detach(), ring.lse.detach(), ring.kept, columns)


def oracle(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, softmax_scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Dense attention under a mask, in fp64, with plain autograd.

    Args:
        q, k, v: ``[batch, seq, heads, head_dim]``, heads of k and v not expanded.
        mask: bool, broadcastable to ``[batch, heads, seq, seq]``; every row must keep a key.

    Returns:
        ``(out [batch, seq, heads, head_dim], lse [batch, heads, seq])`` in fp64.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[2] // k.shape[2]
    k, v = (x.double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k).mul(scale).masked_fill(~mask, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)
