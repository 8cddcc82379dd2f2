"""The ring as operators: opaque to ``torch.compile``, differentiable, with everything but tensors behind one number.

A compiler cannot trace point-to-point communication, and need not: the operators here take tensors and the number of a
:class:`Context`, so a model around them compiles to one graph.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from .bitmap import WORD
from .block_lists import index_of_words
from .buffers import pool
from .comm import GroupExchange, RingGroups, drive
from .config import ROW_LIST_POLICIES, MTrainingConfig
from .documents import Documents
from .estimate import Estimation, estimate_steps
from .index import VerticalSlashIndex
from .layout import Layout
from .metrics import timed
from .nvtx import nvtx_range
from .ops import operators
from .ops.schema import NAMESPACE
from .ring import RingBackward, RingForward, Saved, run
from .ring_call import Columns, RingCall, compact_capacity

MAX_CONTEXTS = 1024
"""Contexts that are remembered; a batch of packed documents needs one."""


@dataclass(frozen=True)
class Context:
    """What an attention call knows besides its tensors. Equal calls share one.

    Attributes:
        config, layout, documents, groups: see :func:`megatron_mtraining.mtraining_attention`.
        scale: softmax scale.
        inner_size: ranks of an inner ring.
        column_capacity: most kept columns of any head.
    """

    config: MTrainingConfig
    layout: Layout
    documents: Documents
    groups: RingGroups
    scale: float
    inner_size: int
    column_capacity: int

    @property
    def row_blocks(self) -> tuple[int, ...]:
        """The global blocks of this rank's rows."""
        return tuple(self.layout.block_position[self.groups.cp_rank].tolist())

    def ring_call(self, q: Tensor, slash_words: Tensor, column_words: Tensor) -> RingCall:
        """The call for inputs like ``q`` under an index."""
        rows = self.row_blocks
        return RingCall(
            index=index_of_words(slash_words, column_words, self.documents, self.column_capacity, rows),
            layout=self.layout,
            config=self.config,
            scale=self.scale,
            cp_rank=self.groups.cp_rank,
            inner_size=self.inner_size,
            ops=operators(self.config.kernel, q),
            exchange=GroupExchange(self.groups) if self.groups.cp_size > 1 else None,
            nodes=self.groups.nodes,
        )


_numbers: OrderedDict[Context, int] = OrderedDict()
_contexts: dict[int, Context] = {}
_next_number = count()


def number_of(context: Context, forever: bool = False) -> int:
    """The number of a context: the same for equal ones while it is among the last ``MAX_CONTEXTS`` used, or ``forever``."""
    if forever:
        number = next(_next_number)
        _contexts[number] = context
        return number
    if context not in _numbers:
        _numbers[context] = next(_next_number)
        _contexts[_numbers[context]] = context
        if len(_numbers) > MAX_CONTEXTS:
            _, oldest = _numbers.popitem(last=False)
            del _contexts[oldest]
    _numbers.move_to_end(context)
    return _numbers[context]


def release(number: int) -> None:
    """Forgets a context that was kept forever."""
    _contexts.pop(number, None)


def forget_contexts() -> None:
    """Forgets all contexts, and with them the process groups they hold, and the rings' buffers; for when groups are
    destroyed.
    """
    pool.clear()
    _numbers.clear()
    _contexts.clear()


def _context(number: int) -> Context:
    if number not in _contexts:
        raise RuntimeError(
            f"attention context {number} is no longer known: more than {MAX_CONTEXTS} others were used since, or the process "
            "groups were destroyed; compile the model again"
        )
    return _contexts[number]


@torch.library.custom_op(f"{NAMESPACE}::estimate", mutates_args=())
def estimate(q: Tensor, k: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """``(slash_words, column_words)`` of the index: of lines, the same on every rank, or of the rank's row lists."""
    c = _context(context)
    if c.config.dense:
        index = VerticalSlashIndex.dense(q.shape[0], q.shape[2], c.documents, q.device)
        return index.slash_words, index.column_words
    with exactly(q), nvtx_range("mtraining index", q.device), timed("index", q.device):
        estimation = Estimation(
            q=aligned(q), k=aligned(k), config=c.config, layout=c.layout, documents=c.documents, cp_rank=c.groups.cp_rank,
            scale=c.scale, ops=operators(c.config.kernel, q),
        )  # fmt: skip
        found = drive(estimate_steps(estimation), c.groups.cp)
    return found.slash_words, found.column_words


@estimate.register_fake
def _(q: Tensor, k: Tensor, context: int) -> tuple[Tensor, Tensor]:
    c = _context(context)
    blocks, shape = c.documents.num_blocks, (q.shape[0], q.shape[2])
    rows = (c.layout.local_blocks,) if c.config.index_policy in ROW_LIST_POLICIES and not c.config.dense else ()
    return (
        q.new_empty((*shape, *rows, -(-blocks // WORD)), dtype=torch.int64),
        q.new_empty((*shape, blocks), dtype=torch.int64),
    )


RingResults = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""``out, lse``, and for backward: the chunk held last and the compact columns (keys, values, positions), or empty."""


@torch.library.custom_op(f"{NAMESPACE}::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, slash_words: Tensor, column_words: Tensor, context: int
) -> RingResults:
    """The forward ring of this rank."""
    call = _context(context).ring_call(q, slash_words, column_words)
    ring = RingForward(call, aligned(q), aligned(k), aligned(v))
    with exactly(q), nvtx_range("mtraining forward", q.device), timed("forward", q.device) as recorder:
        run([ring])
    if recorder is not None:
        recorder.count("forward", q, call.index.documents, call.layout.cp_size)
    columns = ring.columns if call.config.vertical_backward == "save" else None
    kept = q.new_empty(0) if ring.kept is None else ring.kept
    if columns is None:
        return ring.out, ring.lse, kept, q.new_empty(0), q.new_empty(0), q.new_empty(0, dtype=torch.int32)
    return ring.out, ring.lse, kept, columns.keys, columns.values, columns.positions


@ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, slash_words: Tensor, column_words: Tensor, context: int) -> RingResults:
    c = _context(context)
    batch, seq, heads, dim = q.shape
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse = q.new_empty(q.shape), q.new_empty((batch, heads, seq), dtype=accumulate)
    kept = q.new_empty((2, *k.shape) if c.layout.cp_size > 1 else 0)
    slots = compact_capacity(c.column_capacity, c.config) if c.config.vertical_backward == "save" else 0
    if not slots:
        return out, lse, kept, q.new_empty(0), q.new_empty(0), q.new_empty(0, dtype=torch.int32)
    shape = (batch, heads, slots)
    positions = q.new_empty(shape, dtype=torch.int32)
    return out, lse, kept, q.new_empty((*shape, dim)), q.new_empty((*shape, dim)), positions


@torch.library.custom_op(f"{NAMESPACE}::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slash_words: Tensor,
    column_words: Tensor,
    results: list[Tensor],
    context: int,
) -> tuple[Tensor, Tensor]:
    """The backward ring of this rank: ``(dq, dk | dv)``. ``results`` are those of :func:`ring_attention`."""
    out, lse, kept, keys, values, positions = results
    saved = Saved(
        aligned(q), aligned(k), aligned(v), out, lse,
        kept=kept if kept.numel() else None,
        columns=Columns(keys, values, positions) if positions.numel() else None,
    )  # fmt: skip
    call = _context(context).ring_call(q, slash_words, column_words)
    with exactly(q), nvtx_range("mtraining backward", q.device), timed("backward", q.device) as recorder:
        ring = RingBackward(call, saved, aligned(dout))
        run([ring])
    if recorder is not None:
        recorder.count("backward", q, call.index.documents, call.layout.cp_size)
    return ring.gradients()


@ring_attention_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, slash_words: Tensor, column_words: Tensor, results: Any, context: int
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty((2, *k.shape))


def _save(ctx: Any, inputs: tuple[Any, ...], output: RingResults) -> None:
    # As saved tensors, so that activation offloading and recompute see them. The context itself is held too: its number
    # may be forgotten before backward runs.
    q, k, v, slash_words, column_words, context = inputs
    ctx.save_for_backward(q, k, v, slash_words, column_words, *output)
    ctx.context = _context(context)


def _backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, slash_words, column_words, *results = ctx.saved_tensors
    number = number_of(ctx.context)
    dq, dkv = ring_attention_backward(dout, q, k, v, slash_words, column_words, results, number)
    return dq, dkv[0], dkv[1], None, None, None


ring_attention.register_autograd(_backward, setup_context=_save)


def exactly(x: Tensor) -> torch.autocast:
    """Switches autocast off: the numbers of attention depend on the dtype of its inputs alone."""
    return torch.autocast(x.device.type, enabled=False)


def aligned(x: Tensor) -> Tensor:
    """A copy where a kernel could not read ``x``: last dimension strided, broadcast rows, or rows off 16 bytes."""
    unit = 16 // x.element_size()
    strides = x.stride()
    fits = strides[-1] == 1 and all(s > 0 and s % unit == 0 for s in strides[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()
