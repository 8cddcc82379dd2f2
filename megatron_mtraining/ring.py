"""Sparse ring attention: one executor for the steps of a schedule, forward and backward (paper, sections 3.3 and 3.4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .block_lists import Index
from .comm import Exchange
from .config import BLOCK, MTrainingConfig
from .index import document_table
from .layout import Layout
from .ops import Operators
from .schedule import Step, Transfer, backward_schedule, forward_schedule


@dataclass(frozen=True)
class RingCall:
    """What one attention call works with, besides its tensors: the same in forward and backward.

    Attributes:
        index: kept lines, or the row lists of this rank.
        layout: placement of the sequence.
        config: options.
        scale: softmax scale.
        cp_rank: this rank.
        inner_size: ranks of an inner ring (``layout.cp_size``: a flat ring).
        ops: implementation of the operators.
        exchange: carries the transfers; ``None`` on a single rank.
    """

    index: Index
    layout: Layout
    config: MTrainingConfig
    scale: float
    cp_rank: int
    inner_size: int
    ops: Operators
    exchange: Exchange | None

    def schedule(self, backward: bool) -> tuple[Step, ...]:
        """This rank's steps."""
        make = backward_schedule if backward else forward_schedule
        return make(self.cp_rank, self.inner_size, self.layout.cp_size // self.inner_size)

    def blocks(self, chunk: int) -> Tensor:
        """int32 ``[local_blocks]``: global blocks of a chunk."""
        return self.layout.table(self.index.slash_words.device)[chunk]

    @cached_property
    def lines(self) -> tuple[Tensor, Tensor, Tensor]:
        """``(slash_words, doc_start, q_blocks)``, the arguments of every attention operator."""
        words = self.index.slash_words
        return words, document_table(self.index.documents, "doc_start", words.device), self.blocks(self.cp_rank)

    def column_pieces(self, chunk: int) -> Iterator[Tensor]:
        """The kept columns of one chunk in pieces of at most ``max_compact_columns`` slots: int32 ``[batch, heads, slots]``."""
        most = min(self.index.column_capacity, self.layout.local_blocks * BLOCK)
        size = min(-(-most // BLOCK) * BLOCK, self.config.max_compact_columns)
        for first in range(0, most, max(size, 1)):
            yield self.ops.list_columns(self.index.column_words, self.blocks(chunk), size, first)[0]


def compact_capacity(column_capacity: int, config: MTrainingConfig) -> int:
    """Slots of the compact keys of the whole sequence, a multiple of 64; 0 if it keeps no column or they do not fit."""
    capacity = -(-column_capacity // BLOCK) * BLOCK
    return capacity if capacity <= config.max_compact_columns else 0


@dataclass(frozen=True)
class Columns:
    """Compact keys and values of some columns, per query head: ``[batch, heads, slots, dim]``, and their positions."""

    keys: Tensor
    values: Tensor
    positions: Tensor

    @classmethod
    def empty(cls, q: Tensor, positions: Tensor) -> Columns:
        """Slots to gather into. Unused slots stay 0: a masked score times a NaN would still be NaN."""
        shape = (*positions.shape, q.shape[-1])
        return cls(q.new_zeros(shape), q.new_zeros(shape), positions)


class Buffers:
    """Buffers of one shape, reused within a call."""

    def __init__(self, shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> None:
        self._shape, self._like, self._dtype = tuple(shape), like, dtype
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """A buffer with unspecified contents."""
        return self._free.pop() if self._free else self._like.new_empty(self._shape, dtype=self._dtype)

    def give(self, buffer: Tensor) -> None:
        """Returns a buffer whose last use has been ordered before whatever comes next."""
        self._free.append(buffer)


@dataclass
class Pending:
    """A transfer under way."""

    handle: Any
    sent: Tensor
    received: Tensor


class KeyRing:
    """Moves K|V chunks (``[2, batch, seq, kv_heads, dim]``, one message) along a schedule.

    Attributes:
        current: the chunk of the present step; ``None`` where that is the rank's own and it did not travel.
    """

    def __init__(self, call: RingCall, first: Tensor | None) -> None:
        self.call, self.current, self._first = call, first, first
        self._buffers: Buffers | None = None if first is None else Buffers(first.shape, first, first.dtype)
        self._inner: Pending | None = None
        self._outer: Pending | None = None

    def post(self, step: Step) -> None:
        """Starts the step's transfers, outer before inner, before anything is computed."""
        if step.outer is not None:
            self._outer = self._start(step.outer)
        if step.inner is not None:
            self._inner = self._start(step.inner)

    def _start(self, transfer: Transfer) -> Pending:
        assert self.call.exchange is not None and self.current is not None and self._buffers is not None
        received = self._buffers.take()
        return Pending(self.call.exchange.post(transfer, self.current, received), self.current, received)

    def advance(self, step: Step) -> None:
        """Waits for the next step's chunk and frees the buffers that nothing reads any more."""
        done, arrived, sent_outer = self.current, None, None
        if self._inner is not None:
            arrived, self._inner = self._wait(self._inner), None
        if step.window_end and self._outer is not None:
            arrived, sent_outer, self._outer = self._wait(self._outer), self._outer.sent, None
        in_flight = self._outer.sent if self._outer is not None else None
        for buffer in {id(x): x for x in (done, sent_outer)}.values():
            # The first chunk has an owner of its own: the caller in forward, what was saved in backward.
            if buffer is not None and buffer is not self._first and buffer is not in_flight:
                assert self._buffers is not None
                self._buffers.give(buffer)
        self.current = arrived

    def _wait(self, pending: Pending) -> Tensor:
        assert self.call.exchange is not None
        self.call.exchange.wait(pending.handle)
        return pending.received


def chunk_keys(chunk: Tensor | None, own_k: Tensor, own_v: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of a chunk, or the rank's own, as the operators take them: ``[1, batch, seq, kv_heads, dim]``."""
    return (own_k[None], own_v[None]) if chunk is None else (chunk[0][None], chunk[1][None])


class RingForward:
    """Forward pass of one rank. After the last step: ``out``, ``lse``, and what backward starts from.

    Attributes:
        out: ``[batch, local_seq, heads, dim]``, dtype of q.
        lse: ``[batch, heads, local_seq]``, natural log.
        columns: compact keys of the whole sequence, or ``None``.
        kept: the chunk held last; ``None`` on a single rank.
    """

    def __init__(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.call, self.q, self.k, self.v = call, q, k, v
        self.steps = call.schedule(backward=False)
        batch, seq, heads, _ = q.shape
        accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.lse = q.new_empty((batch, heads, seq), dtype=accumulate)
        self.out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.columns = self._whole_columns()
        self._pieces_per_step = call.index.column_capacity > 0 and self.columns is None
        self._partial: Tensor | None = None
        self._written = False
        # One rank sends nothing, and so needs no copy that holds K and V in one message.
        self._ring = KeyRing(call, torch.stack((k, v)) if len(self.steps) > 1 else None)
        self.kept: Tensor | None = None

    def _whole_columns(self) -> Columns | None:
        capacity = compact_capacity(self.call.index.column_capacity, self.call.config)
        if not capacity:
            return None
        index = self.call.index
        every = torch.arange(index.num_blocks, dtype=torch.int32, device=self.q.device)
        return Columns.empty(self.q, self.call.ops.list_columns(index.column_words, every, capacity, 0)[0])

    def post(self, number: int) -> None:
        """Starts the transfers of a step."""
        self._ring.post(self.steps[number])

    def compute(self, number: int) -> None:
        """Works off the step's chunk; the last step attends the compact columns too and rounds the result."""
        k, v = chunk_keys(self._ring.current, self.k, self.v)
        blocks = self.call.blocks(self.steps[number].chunk)[None]
        last = number + 1 == len(self.steps)
        if self._pieces_per_step:
            pieces = list(self.call.column_pieces(self.steps[number].chunk))
            for place, positions in enumerate(pieces):
                columns = self._gather(Columns.empty(self.q, positions), k, v, blocks)
                # The slash blocks go with the first piece.
                part = slice(None) if place == 0 else slice(0, 0)
                self._launch(k[part], v[part], blocks[part], columns, last and place + 1 == len(pieces))
            return
        if self.columns is not None:
            self._gather(self.columns, k, v, blocks)
        self._launch(k, v, blocks, self.columns if last else None, last)

    def _gather(self, columns: Columns, k: Tensor, v: Tensor, blocks: Tensor) -> Columns:
        self.call.ops.gather_columns_(k, v, blocks, columns.positions, columns.keys, columns.values)
        return columns

    def _launch(self, k: Tensor, v: Tensor, blocks: Tensor, columns: Columns | None, last: bool) -> None:
        compact = (columns.keys, columns.values, columns.positions) if columns is not None else (None, None, None)
        if self._partial is None and not (last and not self._written):
            self._partial = torch.empty_like(self.out, dtype=self.lse.dtype)
        call = self.call
        call.ops.attention_forward_(
            self.q, k, v, *call.lines, blocks, *compact, call.scale, self._written, call.ops.arch,
            self._partial, self.out if last else None, self.lse,
        )  # fmt: skip
        self._written = True

    def finish(self, number: int) -> None:
        """Waits for the next step's chunk; after the last step keeps the chunk at hand for backward."""
        if number + 1 < len(self.steps):
            self._ring.advance(self.steps[number])
        else:
            self.kept, self._partial = self._ring.current, None


@dataclass(frozen=True)
class Saved:
    """What backward needs of forward."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    kept: Tensor | None
    columns: Columns | None


class RingBackward:
    """Backward pass of one rank. After the last step :meth:`gradients` has dQ, dK and dV."""

    def __init__(self, call: RingCall, saved: Saved, dout: Tensor) -> None:
        self.call, self.saved, self.dout = call, saved, dout
        self.steps = call.schedule(backward=True)
        self._delta = call.ops.attention_delta(saved.out, dout)
        self._dq = torch.empty_like(saved.q, dtype=saved.lse.dtype, memory_format=torch.contiguous_format)
        self._dq_written = False
        self._ring = KeyRing(call, saved.kept)
        self._grads = Buffers((2, *saved.k.shape), saved.k, saved.lse.dtype)
        self._inner: Pending | None = None
        self._outer: Pending | None = None
        self._d_columns: Columns | None = None
        self._sum: Tensor | None = None

    def post(self, number: int) -> None:
        """Starts the key transfers of a step."""
        self._ring.post(self.steps[number])

    def compute(self, number: int) -> None:
        """Gradients of the step's chunk, then the partial sums that have arrived for it."""
        if number == 0 and self.saved.columns is not None:
            columns = self.saved.columns
            self._d_columns = Columns.empty(self._dq, columns.positions)
            self._vertical(columns, self._d_columns)
        call, saved, step = self.call, self.saved, self.steps[number]
        k, v = chunk_keys(self._ring.current, saved.k, saved.v)
        grads = self._grads.take()
        dk, dv, blocks = grads[0][None], grads[1][None], call.blocks(step.chunk)[None]
        call.ops.attention_backward_(
            saved.q, k, v, self.dout, saved.lse, self._delta, *call.lines, blocks, call.scale,
            self._dq_written, call.config.deterministic, call.ops.arch, self._dq, dk, dv,
        )  # fmt: skip
        self._dq_written = True
        self._add_columns(step.chunk, k, v, blocks, (dk, dv))
        self._sum = self._collect(step, grads)

    def _vertical(self, columns: Columns, d_columns: Columns) -> None:
        call, saved = self.call, self.saved
        call.ops.vertical_backward_(
            saved.q, self.dout, saved.lse, self._delta, columns.keys, columns.values, columns.positions, *call.lines,
            call.scale, self._dq_written, call.config.deterministic, call.ops.arch,
            self._dq, d_columns.keys, d_columns.values,
        )  # fmt: skip
        self._dq_written = True

    def _add_columns(self, chunk: int, k: Tensor, v: Tensor, blocks: Tensor, grads: tuple[Tensor, Tensor]) -> None:
        """Adds the chunk's share of the column gradients: computed before the ring, or now from columns gathered again."""
        ops = self.call.ops
        if self._d_columns is not None:
            d = self._d_columns
            ops.scatter_columns_(d.keys, d.values, d.positions, blocks, *grads)
            return
        for positions in self.call.column_pieces(chunk):
            columns = Columns.empty(self.saved.q, positions)
            ops.gather_columns_(k, v, blocks, positions, columns.keys, columns.values)
            d = Columns.empty(self._dq, positions)
            self._vertical(columns, d)
            ops.scatter_columns_(d.keys, d.values, positions, blocks, *grads)

    def _collect(self, step: Step, grads: Tensor) -> Tensor:
        """Adds the partial of this step's chunk that the inner ring brought, and at a window's end that of the outer."""
        if not step.window_start and self._inner is not None:
            self._add_arrived(self._inner, grads)
            self._inner = None
        if step.window_end and self._outer is not None:
            self._add_arrived(self._outer, grads)
            self._outer = None
        return grads

    def _add_arrived(self, pending: Pending, grads: Tensor) -> None:
        assert self.call.exchange is not None
        self.call.exchange.wait(pending.handle)
        grads += pending.received
        self._grads.give(pending.received)
        self._grads.give(pending.sent)

    def finish(self, number: int) -> None:
        """Sends the sum on, and waits for the next step's keys."""
        step = self.steps[number]
        assert self._sum is not None
        for transfer in (step.outer_grad, step.inner_grad):
            if transfer is None:
                continue
            assert self.call.exchange is not None
            received = self._grads.take()
            pending = Pending(self.call.exchange.post(transfer, self._sum, received), self._sum, received)
            if transfer is step.inner_grad:
                self._inner = pending
            else:
                self._outer = pending
        self._ring.advance(step)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """``(dq, dk | dv)`` after the last step, rounded once; ``dk | dv`` is ``[2, batch, seq, kv_heads, dim]``."""
        assert self._sum is not None
        return self._dq.to(self.saved.q.dtype), self._sum.to(self.saved.q.dtype)


def run(ranks: Sequence[RingForward] | Sequence[RingBackward]) -> None:
    """Runs rings step by step: this process's rank alone, or all ranks of a ring played in one process."""
    for number in range(len(ranks[0].steps)):
        for rank in ranks:
            rank.post(number)
        for rank in ranks:
            rank.compute(number)
        for rank in ranks:
            rank.finish(number)
