"""Sparse ring attention: one executor for the launches of a plan, forward and backward (paper, sections 3.3 and 3.4).

All of a launch's transfers are posted before its compute, from buffers that are at hand, and are waited for after it; the
host never waits for the device, and nothing is allocated between the first launch and the last (but where a sequence keeps
more columns than ``max_compact_columns``: each launch then gathers its own, in pieces).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .buffers import pool
from .launches import FIRST, KEPT, OWN, Launch, Move, Plan
from .nvtx import nvtx_range
from .ring_call import Columns, RingCall, compact_capacity
from .ring_profile import CallProfile, active_profile


class Traffic:
    """The exchanges of one pass of one rank, and the times of its launches if :func:`profile_ring` is active."""

    def __init__(self, call: RingCall, phase: str, launches: tuple[Launch, ...], device: torch.device) -> None:
        profile = active_profile()
        self._exchange: Any = call.exchange
        self._profile: CallProfile | None = None
        if profile is not None:
            self._profile = profile.start(phase, call.cp_rank, launches, device, call.exchange)
        if self._profile is not None:
            self._exchange = self._profile

    def post(self, moves: Sequence[Move], slot: Callable[[int], Tensor]) -> Any:
        """Starts moves of one channel as one exchange; returns what to wait for."""
        return self._exchange.post([(move.transfer, slot(move.source), slot(move.target)) for move in moves])

    def wait(self, handle: Any) -> None:
        """Waits for an exchange (on CUDA the current stream does, not the host)."""
        self._exchange.wait(handle)

    def mark(self, point: str) -> None:
        """Notes that the launch has come to a point of :data:`ring_profile.POINTS`."""
        if self._profile is not None:
            self._profile.mark(point)


class KeyRing:
    """Moves K|V chunks (``[2, batch, seq, kv_heads, dim]``, one message each) along a plan.

    Args:
        traffic: carries the exchanges.
        plan: the launches.
        k, v: the rank's own keys and values ``[batch, seq, kv_heads, dim]``.
        first: the chunk that the pass begins with; not given: the rank's own, which is packed into a buffer if it travels.

    Attributes:
        kept: the chunk held last in forward, in its own allocation; ``None`` on a single rank.
    """

    def __init__(self, traffic: Traffic, plan: Plan, k: Tensor, v: Tensor, first: Tensor | None = None) -> None:
        self.traffic, self.own = traffic, (k, v)
        self.kept: Tensor | None = None
        self._last = plan.launches[-1]
        self._first = first
        self._buffer: Tensor | None = None
        self._inner: Any = None
        self._outer: Any = None
        packs = first is None and len(plan.launches) > 1
        if slots := plan.key_slots + packs:
            self._buffer = pool.take((slots, 2, *k.shape), k.dtype, k.device)
        if packs:
            assert self._buffer is not None
            self._first = torch.stack((k, v), out=self._buffer[plan.key_slots])
            self.kept = k.new_empty((2, *k.shape))
        self._starts_with_own = first is None

    def _slot(self, slot: int) -> Tensor:
        found = self._first if slot == FIRST else self.kept if slot == KEPT else None
        if found is not None:
            return found
        assert self._buffer is not None
        return self._buffer[slot]

    def wait(self, launch: Launch) -> None:
        """Waits for the launch's chunks."""
        if self._inner is not None:
            self.traffic.wait(self._inner)
            self._inner = None
        if launch.awaits_outer:
            self.traffic.wait(self._outer)
            self._outer = None

    def post(self, launch: Launch) -> None:
        """Starts the launch's transfers, outer before inner."""
        if launch.outer is not None:
            self._outer = self.traffic.post((launch.outer,), self._slot)
        if launch.keys:
            self._inner = self.traffic.post(launch.keys, self._slot)

    def chunks(self, launch: Launch) -> tuple[Tensor, Tensor]:
        """K and V of the launch as the operators take them: ``[chunks, batch, seq, kv_heads, dim]``, views."""
        if launch.slot == OWN or (launch.slot == FIRST and self._starts_with_own):
            return self.own[0][None], self.own[1][None]
        if launch.slot < 0:
            chunk = self._slot(launch.slot)
            return chunk[0][None], chunk[1][None]
        assert self._buffer is not None
        held = self._buffer[launch.slot : launch.slot + len(launch.chunks)]
        return held[:, 0], held[:, 1]

    def close(self) -> None:
        """Gives the buffers back; in forward the chunk held last is kept."""
        if self._buffer is None:
            return
        if self.kept is not None and self._last.slot != KEPT:
            self.kept.copy_(self._buffer[self._last.slot + len(self._last.chunks) - 1])
        pool.give(self._buffer)
        self._buffer = self._first = None


class RingForward:
    """Forward pass of one rank. After the last launch: ``out``, ``lse``, and what backward starts from.

    Attributes:
        launches, device: what :func:`run` goes through, and where.
        out: ``[batch, local_seq, heads, dim]``, dtype of q.
        lse: ``[batch, heads, local_seq]``, natural log.
        columns: compact keys of the whole sequence, or ``None``.
        kept: the chunk held last; ``None`` on a single rank.
    """

    def __init__(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.call, self.q, self.k, self.v = call, q, k, v
        plan = call.plan(backward=False)
        self.launches, self.device = plan.launches, q.device
        self.traffic = Traffic(call, "forward", plan.launches, q.device)
        batch, seq, heads, _ = q.shape
        accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.lse = q.new_empty((batch, heads, seq), dtype=accumulate)
        self.out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.columns = self._whole_columns()
        self._pieces_per_launch = call.index.column_capacity > 0 and self.columns is None
        self._partial: Tensor | None = None
        if len(plan.launches) > 1 or self._pieces_per_launch:
            self._partial = torch.empty_like(self.out, dtype=accumulate)
        self._written = False
        self._ring = KeyRing(self.traffic, plan, k, v)
        self.kept = self._ring.kept

    def _whole_columns(self) -> Columns | None:
        capacity = compact_capacity(self.call.index.column_capacity, self.call.config)
        if not capacity:
            return None
        index = self.call.index
        every = torch.arange(index.num_blocks, dtype=torch.int32, device=self.q.device)
        return Columns.empty(self.q, self.call.ops.list_columns(index.column_words, every, capacity, 0)[0])

    def post(self, launch: Launch) -> None:
        """Waits for the launch's chunks and starts its transfers."""
        self.traffic.mark("begin")
        self._ring.wait(launch)
        self._ring.post(launch)

    def compute(self, launch: Launch) -> None:
        """Works off the launch's chunks; the last launch attends the compact columns too and rounds the result."""
        self.traffic.mark("arrived")  # here: of ranks that are played in one process, others post in between
        k, v = self._ring.chunks(launch)
        blocks = self.call.blocks(*launch.chunks)
        last = launch is self.launches[-1]
        if self._pieces_per_launch:
            pieces = list(self.call.column_pieces(launch.chunks))
            for place, positions in enumerate(pieces):
                columns = self._gather(Columns.empty(self.q, positions), k, v, blocks)
                # The slash blocks go with the first piece.
                part = slice(None) if place == 0 else slice(0, 0)
                self._launch(k[part], v[part], blocks[part], columns, last and place + 1 == len(pieces))
        else:
            if self.columns is not None:
                self._gather(self.columns, k, v, blocks)
            self._launch(k, v, blocks, self.columns if last else None, last)
        self.traffic.mark("computed")

    def _gather(self, columns: Columns, k: Tensor, v: Tensor, blocks: Tensor) -> Columns:
        self.call.ops.gather_columns_(k, v, blocks, columns.positions, columns.keys, columns.values)
        return columns

    def _launch(self, k: Tensor, v: Tensor, blocks: Tensor, columns: Columns | None, last: bool) -> None:
        compact = (columns.keys, columns.values, columns.positions) if columns is not None else (None, None, None)
        call = self.call
        call.ops.attention_forward_(
            self.q, k, v, *call.lines, blocks, *compact, call.scale, self._written, call.ops.arch,
            self._partial, self.out if last else None, self.lse,
        )  # fmt: skip
        self._written = True

    def finish(self, launch: Launch) -> None:
        """After the last launch gives the buffers back."""
        if launch is not self.launches[-1]:
            return
        self.traffic.mark("summed")  # of ranks that are played in one process, others have computed in between
        self._ring.close()
        self._partial = None
        self.traffic.mark("end")


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
    """Backward pass of one rank. After the last launch :meth:`gradients` has dQ, dK and dV.

    Attributes:
        launches, device: what :func:`run` goes through, and where.
    """

    def __init__(self, call: RingCall, saved: Saved, dout: Tensor) -> None:
        self.call, self.saved, self.dout = call, saved, dout
        plan = call.plan(backward=True)
        self.launches, self.device = plan.launches, dout.device
        self.traffic = Traffic(call, "backward", plan.launches, dout.device)
        self._delta = call.ops.attention_delta(saved.out, dout)
        self._dq = torch.empty_like(saved.q, dtype=saved.lse.dtype, memory_format=torch.contiguous_format)
        self._dq_written = False
        self._ring = KeyRing(self.traffic, plan, saved.k, saved.v, saved.kept)
        self._grads = pool.take((plan.grad_slots, 2, *saved.k.shape), saved.lse.dtype, saved.k.device)
        self._inner: Any = None
        self._outer: Any = None
        self._d_columns: Columns | None = None
        self._result: tuple[Tensor, Tensor] | None = None

    def post(self, launch: Launch) -> None:
        """Waits for the launch's chunks and starts its key transfers."""
        self.traffic.mark("begin")
        self._ring.wait(launch)
        self._ring.post(launch)

    def compute(self, launch: Launch) -> None:
        """Gradients of the launch's chunks, then the partial sums that have arrived for the first of them."""
        call, saved = self.call, self.saved
        self.traffic.mark("arrived")
        if launch is self.launches[0] and saved.columns is not None:
            self._d_columns = Columns.empty(self._dq, saved.columns.positions)
            self._vertical(saved.columns, self._d_columns)
        k, v = self._ring.chunks(launch)
        grads = self._grads[launch.grad_slot : launch.grad_slot + len(launch.chunks)]
        dk, dv, blocks = grads[:, 0], grads[:, 1], call.blocks(*launch.chunks)
        call.ops.attention_backward_(
            saved.q, k, v, self.dout, saved.lse, self._delta, *call.lines, blocks, call.scale,
            self._dq_written, call.config.deterministic, call.ops.arch, self._dq, dk, dv,
        )  # fmt: skip
        self._dq_written = True
        self._add_columns(launch.chunks, k, v, blocks, (dk, dv))
        self.traffic.mark("computed")

    def _vertical(self, columns: Columns, d_columns: Columns) -> None:
        call, saved = self.call, self.saved
        call.ops.vertical_backward_(
            saved.q, self.dout, saved.lse, self._delta, columns.keys, columns.values, columns.positions, *call.lines,
            call.scale, self._dq_written, call.config.deterministic, call.ops.arch,
            self._dq, d_columns.keys, d_columns.values,
        )  # fmt: skip
        self._dq_written = True

    def _add_columns(
        self, chunks: tuple[int, ...], k: Tensor, v: Tensor, blocks: Tensor, grads: tuple[Tensor, Tensor]
    ) -> None:
        """Adds the chunks' share of the column gradients: computed before the ring, or now from columns gathered again."""
        ops = self.call.ops
        if self._d_columns is not None:
            d = self._d_columns
            ops.scatter_columns_(d.keys, d.values, d.positions, blocks, *grads)
            return
        for positions in self.call.column_pieces(chunks):
            columns = Columns.empty(self.saved.q, positions)
            ops.gather_columns_(k, v, blocks, positions, columns.keys, columns.values)
            d = Columns.empty(self._dq, positions)
            self._vertical(columns, d)
            ops.scatter_columns_(d.keys, d.values, positions, blocks, *grads)

    def finish(self, launch: Launch) -> None:
        """Adds the partial sums of others to the first chunk's, and sends the launch's on."""
        if self._inner is not None:
            self.traffic.wait(self._inner)
            self._inner = None
        if launch.adds_outer is not None:
            self.traffic.wait(self._outer)
            self._outer = None
        self.traffic.mark("summed")
        total = self._grads[launch.grad_slot]
        with nvtx_range("mtraining merge", self.device):
            for slot in (*launch.adds, *((launch.adds_outer,) if launch.adds_outer is not None else ())):
                total += self._grads[slot]
        if launch.outer_grad is not None:
            self._outer = self.traffic.post((launch.outer_grad,), self._grads.__getitem__)
        if launch.grads:
            self._inner = self.traffic.post(launch.grads, self._grads.__getitem__)
        if launch is self.launches[-1]:
            self._result = self._dq.to(self.saved.q.dtype), total.to(self.saved.q.dtype, copy=True)
            self._ring.close()
            pool.give(self._grads)
        self.traffic.mark("end")

    def gradients(self) -> tuple[Tensor, Tensor]:
        """``(dq, dk | dv)`` after the last launch, rounded once; ``dk | dv`` is ``[2, batch, seq, kv_heads, dim]``."""
        assert self._result is not None
        return self._result


def run(ranks: Sequence[RingForward] | Sequence[RingBackward]) -> None:
    """Runs rings launch by launch: this process's rank alone, or all ranks of a ring played in one process."""
    device = ranks[0].device
    for number in range(len(ranks[0].launches)):
        with nvtx_range(f"mtraining launch {number}", device):
            for rank in ranks:
                rank.post(rank.launches[number])
            for rank in ranks:
                rank.compute(rank.launches[number])
            for rank in ranks:
                rank.finish(rank.launches[number])
