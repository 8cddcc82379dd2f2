"""Ring schedules as data (paper, section 3.4): which chunk a rank works on in each step, and what it sends and receives.

CP rank = ``outer * inner_size + inner``. A flat ring is one inner ring of all ranks. :func:`forward_schedule` and
:func:`backward_schedule` are pure; :mod:`megatron_mtraining.ring` runs their steps, and tests simulate them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


class Channel(Enum):
    """What a transfer carries, and over which ring; each has a communicator of its own."""

    INNER = "inner"
    OUTER = "outer"
    INNER_GRAD = "inner_grad"
    OUTER_GRAD = "outer_grad"


@dataclass(frozen=True)
class Transfer:
    """One send and the receive that belongs to it. Ranks and chunks are CP ranks."""

    channel: Channel
    send_to: int
    receive_from: int
    sent_chunk: int
    received_chunk: int


@dataclass(frozen=True)
class Step:
    """One step of a ring.

    Attributes:
        chunk: the ``kv_owner`` of the keys that this step works on.
        window_start: whether the chunk is the first of a window (it came over the outer ring, or is the ring's first).
        inner: key transfer over the inner ring: posted before the compute, waited for after it. It brings the next
            step's chunk. Backward leaves out the transfers that would bring a rank its own chunk.
        outer: key transfer over the outer ring: posted before the compute of a window's first step, waited for after the
            window's last step. It brings the next window's first chunk.
        inner_grad: backward only; gradient transfer posted after the compute: sends this chunk's partial on, and brings
            the partial of the *next* step's chunk, to be added after that step's compute.
        outer_grad: backward only, at a window's last step; posted after the compute: sends the window's sum on, and brings
            the partial to be added at the end of the *next* window.
        window_end: whether the chunk is the last of a window.
    """

    chunk: int
    window_start: bool
    window_end: bool
    inner: Transfer | None = None
    outer: Transfer | None = None
    inner_grad: Transfer | None = None
    outer_grad: Transfer | None = None


@dataclass(frozen=True)
class Place:
    """A rank in a hierarchy of rings: ``inner`` of ``inner_size`` within its node, node ``outer`` of ``outer_size``."""

    inner: int
    outer: int
    inner_size: int
    outer_size: int

    @classmethod
    def of(cls, rank: int, inner_size: int, outer_size: int) -> Place:
        """The place of a CP rank."""
        return cls(rank % inner_size, rank // inner_size, inner_size, outer_size)

    def at(self, inner: int, outer: int) -> int:
        """The CP rank ``inner`` ranks and ``outer`` nodes further on, each around its ring."""
        return (self.outer + outer) % self.outer_size * self.inner_size + (self.inner + inner) % self.inner_size


@lru_cache(maxsize=4096)
def forward_schedule(rank: int, inner_size: int, outer_size: int) -> tuple[Step, ...]:
    """Steps of the forward pass: in window ``w``, inner step ``t``, the chunk of the rank ``t`` places and ``w`` nodes back.

    The first chunk is the rank's own, the last that of the next rank of the next node; backward starts from it.
    """
    place = Place.of(rank, inner_size, outer_size)
    steps = []
    for window in range(outer_size):
        outer = None
        if window + 1 < outer_size:
            outer = Transfer(
                Channel.OUTER, place.at(0, 1), place.at(0, -1), place.at(0, -window), place.at(0, -window - 1)
            )
        for turn in range(inner_size):
            chunk = place.at(-turn, -window)
            inner = None
            if turn + 1 < inner_size:
                inner = Transfer(Channel.INNER, place.at(1, 0), place.at(-1, 0), chunk, place.at(-turn - 1, -window))
            steps.append(
                Step(chunk, turn == 0, turn + 1 == inner_size, inner=inner, outer=outer if turn == 0 else None)
            )
    return tuple(steps)


@lru_cache(maxsize=4096)
def backward_schedule(rank: int, inner_size: int, outer_size: int) -> tuple[Step, ...]:
    """Steps of the backward pass: the chunks of forward in reverse, both rings turning the other way.

    The partial dK, dV of a chunk follows it from rank to rank within a node, then from node to node, and the last step
    works on the rank's own chunk, where the sum is complete: ``inner_size * outer_size - 1`` hops.
    """
    place = Place.of(rank, inner_size, outer_size)
    steps = []
    for window in reversed(range(outer_size)):
        outer = outer_grad = None
        if window > 0:
            # The window's first chunk lies one place further on; that of the next window one node further on.
            first, following = place.at(1, -window), place.at(1, 1 - window)
            if following != rank:
                outer = Transfer(Channel.OUTER, place.at(0, -1), place.at(0, 1), first, following)
            outer_grad = Transfer(
                Channel.OUTER_GRAD, place.at(0, -1), place.at(0, 1), place.at(0, -window), place.at(0, 1 - window)
            )
        for turn in reversed(range(inner_size)):
            chunk = place.at(-turn, -window)
            inner = inner_grad = None
            if turn > 0:
                following = place.at(1 - turn, -window)
                if following != rank:
                    inner = Transfer(Channel.INNER, place.at(-1, 0), place.at(1, 0), chunk, following)
                inner_grad = Transfer(Channel.INNER_GRAD, place.at(-1, 0), place.at(1, 0), chunk, following)
            steps.append(
                Step(
                    chunk,
                    window_start=turn + 1 == inner_size,
                    window_end=turn == 0,
                    inner=inner,
                    outer=outer if turn + 1 == inner_size else None,
                    inner_grad=inner_grad,
                    outer_grad=outer_grad if turn == 0 else None,
                )
            )
    return tuple(steps)
