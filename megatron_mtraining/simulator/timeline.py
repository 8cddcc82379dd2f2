"""One pass of a ring, launch by launch, on all ranks at once: when each computes, sends, and waits.

The launches are those that the product runs (:mod:`megatron_mtraining.launches`, made from the steps of
:mod:`megatron_mtraining.schedule`). All ranks run the same plan seen from their own place, so the plan of rank 0, turned to
every rank, drives arrays over the ranks; a test compares it with the plan of each rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..launches import Plan, backward_plan, forward_plan
from .cost import Links


@dataclass(frozen=True)
class Ring:
    """How ranks are put into rings and nodes.

    Attributes:
        cp_size: ranks.
        inner_size: ranks of an inner ring; ``cp_size``: a flat ring.
        node_size: ranks of a node: transfers between nodes take the slow link.
    """

    cp_size: int
    inner_size: int
    node_size: int

    def __post_init__(self) -> None:
        for name in ("inner_size", "node_size"):
            size = getattr(self, name)
            if size < 1 or self.cp_size % size:
                raise ValueError(f"{name}={size}: must divide cp_size={self.cp_size}")

    def plan(self, backward: bool, chunks_per_launch: int) -> Plan:
        """The plan of rank 0."""
        make = backward_plan if backward else forward_plan
        return make(0, self.inner_size, self.cp_size // self.inner_size, chunks_per_launch)

    def turned(self, rank: int) -> np.ndarray:
        """int64 ``[cp_size]``: for every rank the one that stands to it as ``rank`` stands to rank 0. Not to be changed."""
        return _turned(self.cp_size, self.inner_size, rank)

    def opposite(self, rank: int) -> int:
        """The rank to which rank 0 stands as ``rank`` stands to rank 0."""
        inner, outer = self.inner_size, self.cp_size // self.inner_size
        return -(rank // inner) % outer * inner + -rank % inner


@lru_cache(maxsize=4096)
def _turned(cp_size: int, inner_size: int, rank: int) -> np.ndarray:
    """:meth:`Ring.turned`, computed once."""
    own = np.arange(cp_size)
    inner = (own + rank) % inner_size
    outer = (own // inner_size + rank // inner_size) % (cp_size // inner_size)
    found = outer * inner_size + inner
    found.setflags(write=False)
    return found


@dataclass(frozen=True)
class Timeline:
    """What a pass took. Times in seconds, ``[cp_size, launches]``.

    Attributes:
        compute: time in which the rank computes.
        exposed: time in which it waits for a transfer (and, through it, for other ranks).
        end: ``[cp_size]``, when each rank has finished.
    """

    compute: np.ndarray
    exposed: np.ndarray
    end: np.ndarray

    @property
    def seconds(self) -> float:
        """Until the last rank has finished."""
        return float(self.end.max())

    @property
    def compute_share(self) -> float:
        """Mean time of computing over that of the pass."""
        return float(self.compute.sum(1).mean() / self.seconds)


class _Exchanges:
    """The channels of all ranks: an exchange begins when all who take part have posted it and their channel is free."""

    def __init__(self, ring: Ring, links: Links, chunk_bytes: float) -> None:
        self.ring, self.links, self.bytes = ring, links, chunk_bytes
        self._free: dict[str, np.ndarray] = {}

    def post(self, channel: str, posted: np.ndarray, receivers: list[int]) -> np.ndarray:
        """When each rank has sent and received; ``receivers`` are those of rank 0."""
        ring = self.ring
        own = np.arange(ring.cp_size)
        ready = np.maximum(posted, self._free.get(channel, np.zeros(ring.cp_size)))
        begin, far = ready.copy(), np.zeros(ring.cp_size)
        targets = [ring.turned(rank) for rank in receivers]
        senders = [ring.turned(ring.opposite(rank)) for rank in receivers]
        for peer in (*targets, *senders):
            begin = np.maximum(begin, ready[peer])
        for target in targets:
            far += own // ring.node_size != target // ring.node_size
        sent = begin + np.maximum(
            self.links.intra.seconds((len(targets) - far) * self.bytes), self.links.inter.seconds(far * self.bytes)
        )
        end = sent.copy()
        for sender in senders:
            end = np.maximum(end, sent[sender])
        self._free[channel] = end
        return end


def simulate(
    ring: Ring, plan: Plan, work: np.ndarray, links: Links, key_bytes: float, grad_bytes: float, add_s: float = 0.0
) -> Timeline:
    """Runs a plan.

    Args:
        ring: the places.
        plan: that of rank 0.
        work: seconds of compute, ``[cp_size, launches]``.
        links: of the cluster.
        key_bytes: of one chunk's K and V.
        grad_bytes: of one chunk's dK and dV.
        add_s: seconds to add a partial gradient.
    """
    size = ring.cp_size
    keys, grads = _Exchanges(ring, links, key_bytes), _Exchanges(ring, links, grad_bytes)
    clock, exposed = np.zeros(size), np.zeros(work.shape)
    nothing = np.zeros(size)
    arriving, outer, inner_grad, outer_grad = nothing, nothing, nothing, nothing
    for number, launch in enumerate(plan.launches):
        before = clock
        clock = np.maximum(clock, arriving)
        if launch.awaits_outer:
            clock = np.maximum(clock, outer)
        exposed[:, number] += clock - before
        # A launch posts when it begins; the outer exchange first.
        if launch.outer is not None:
            outer = keys.post("outer", clock, [launch.outer.transfer.send_to])
        if launch.keys:
            arriving = keys.post("inner", clock, [move.transfer.send_to for move in launch.keys])
        clock = clock + work[:, number]
        for waits, arrived, count in (
            (bool(launch.adds), inner_grad, len(launch.adds)),
            (launch.adds_outer is not None, outer_grad, 1),
        ):
            if waits:
                summed = np.maximum(clock, arrived)
                exposed[:, number] += summed - clock
                clock = summed + add_s * count
        if launch.outer_grad is not None:
            outer_grad = grads.post("outer", clock, [launch.outer_grad.transfer.send_to])
        if launch.grads:
            inner_grad = grads.post("inner", clock, [move.transfer.send_to for move in launch.grads])
    return Timeline(work.copy(), exposed, clock)


def chunk_table(ring: Ring, plan: Plan) -> np.ndarray:
    """int64 ``[cp_size, steps]``: the chunk of every rank in every step of a plan."""
    return np.stack([ring.turned(chunk) for launch in plan.launches for chunk in launch.chunks], 1)


def by_launch(plan: Plan, steps: np.ndarray) -> np.ndarray:
    """``[cp_size, steps]`` summed over the steps of each launch."""
    return np.add.reduceat(steps, [launch.first_step for launch in plan.launches], axis=1)
