"""Predictions of attention calls, and the choice between layouts, rings, stripes and launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from ..config import BLOCK
from ..layout import Layout
from ..metrics import imbalance_degrees
from .cost import Link, Links, Rates, Shape
from .memory import ring_buffer_bytes
from .timeline import Ring, Timeline, by_launch, chunk_table, simulate
from .work import IndexProfile, RankWork

LAYOUTS = ("striped", "zigzag", "contiguous")


@dataclass(frozen=True)
class Choice:
    """What a user can set: see :class:`megatron_mtraining.MTrainingConfig`.

    Attributes:
        ring: ``flat`` or ``hierarchical``.
    """

    layout: str = "striped"
    ring: str = "hierarchical"
    stripe_size: int = BLOCK
    stripe_rotation: int = 1
    chunks_per_launch: int = 1

    def make_layout(self, seq_len: int, cp_size: int) -> Layout:
        """The product's layout.

        Raises:
            ValueError: for an unknown layout, or one that the length does not allow.
        """
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r}: must be one of {', '.join(LAYOUTS)}")
        if self.layout == "striped":
            return Layout.striped(seq_len, cp_size, self.stripe_size, self.stripe_rotation)
        made: Layout = getattr(Layout, self.layout)(seq_len, cp_size)
        return made

    def inner_size(self, cp_size: int, node_size: int) -> int:
        """Ranks of an inner ring."""
        return cp_size if self.ring == "flat" else node_size

    def as_run(self, cp_size: int, node_size: int) -> Choice:
        """What the product makes of it: a flat ring over several nodes launches chunk by chunk (``RingCall.plan``).

        Raises:
            ValueError: for a number of chunks below 1.
        """
        if self.chunks_per_launch < 1:
            raise ValueError(f"chunks_per_launch={self.chunks_per_launch}: must be at least 1")
        return replace(self, chunks_per_launch=1) if self.ring == "flat" and cp_size > node_size else self


@dataclass(frozen=True)
class Cluster:
    """Ranks, and what they cost."""

    cp_size: int
    node_size: int
    links: Links
    rates: Rates


@dataclass(frozen=True)
class Balance:
    """Imbalance of a table of work ``[cp_size, steps]``; 1 is perfect.

    Attributes:
        worker: largest over mean rank of a step, mean over the steps (the paper's worker level).
        critical: sum over the steps of the slowest rank, over that of the mean rank.
        step: heaviest over mean step, by the slowest rank of each (the paper's step level).
    """

    worker: float
    critical: float
    step: float

    @classmethod
    def of(cls, work: np.ndarray) -> Balance:
        """The three degrees, as the product's metrics define them."""
        degrees = imbalance_degrees(torch.from_numpy(work))
        return cls(degrees["worker"], degrees["critical"], degrees["step"])


@dataclass(frozen=True)
class Prediction:
    """One choice.

    Attributes:
        choice: what was predicted.
        forward, backward: the passes.
        balance: of the slash pairs of the forward steps, which the transfers hide behind.
        total_imbalance: slowest over mean rank, all pairs of the call.
        buffer_bytes: keys and gradients of the rings' buffers, one rank.
        call_seconds: index and host of a call.
    """

    choice: Choice
    forward: Timeline
    backward: Timeline
    balance: Balance
    total_imbalance: float
    buffer_bytes: float
    call_seconds: float

    @property
    def seconds(self) -> float:
        """Forward and backward of a call."""
        return self.call_seconds + self.forward.seconds + self.backward.seconds

    def summary(self) -> dict[str, Any]:
        """As plain values."""
        return {
            **asdict(self.choice),
            "ms": self.seconds * 1e3,
            "call_ms": self.call_seconds * 1e3,
            **{
                f"{name}_{what}": value
                for name, line in (("forward", self.forward), ("backward", self.backward))
                for what, value in (
                    ("ms", line.seconds * 1e3),
                    ("exposed_ms", float(line.exposed.sum(1).mean()) * 1e3),
                    ("compute_share", line.compute_share),
                )
            },
            **{f"imbalance_{name}": value for name, value in asdict(self.balance).items()},
            "imbalance_total": self.total_imbalance,
            "buffer_mib": self.buffer_bytes / 2**20,
        }

    def launches(self) -> list[dict[str, Any]]:
        """Every launch: mean and slowest compute, mean exposed time."""
        return [
            {"pass": name, "launch": number, "compute_ms": float(line.compute[:, number].mean()) * 1e3,
             "slowest_ms": float(line.compute[:, number].max()) * 1e3,
             "exposed_ms": float(line.exposed[:, number].mean()) * 1e3}
            for name, line in (("forward", self.forward), ("backward", self.backward))
            for number in range(line.compute.shape[1])
        ]  # fmt: skip


class Predictor:
    """Predicts choices for one shape and index on one cluster; what they share is computed once."""

    def __init__(self, shape: Shape, profile: IndexProfile, cluster: Cluster) -> None:
        if profile.seq_len != shape.seq_len or profile.heads != shape.heads:
            raise ValueError(
                f"index is for {profile.seq_len} tokens and {profile.heads} heads: the shape has {shape.seq_len} and "
                f"{shape.heads}"
            )
        self.shape, self.profile, self.cluster = shape, profile, cluster
        self._column_rows = profile.column_rows()
        self._work: dict[Any, RankWork] = {}

    def work(self, choice: Choice) -> RankWork:
        """Pairs by rank."""
        key = (choice.layout, choice.stripe_size, choice.stripe_rotation)
        if key not in self._work:
            layout = choice.make_layout(self.shape.seq_len, self.cluster.cp_size)
            self._work[key] = RankWork.of(self.profile, layout, self._column_rows)
        return self._work[key]

    def predict(self, choice: Choice) -> Prediction:
        """One choice, as the product runs it."""
        choice = choice.as_run(self.cluster.cp_size, self.cluster.node_size)
        cluster, rates, dim = self.cluster, self.cluster.rates, self.shape.head_dim
        ring = Ring(cluster.cp_size, choice.inner_size(cluster.cp_size, cluster.node_size), cluster.node_size)
        work = self.work(choice)
        key_bytes = self.shape.chunk_bytes(cluster.cp_size)
        grad_bytes = self.shape.chunk_bytes(cluster.cp_size, 4)
        lines, plans, pairs = [], [], np.zeros((1, 1))
        for backward in (False, True):
            plan = ring.plan(backward, choice.chunks_per_launch)
            steps = work.by_step(chunk_table(ring, plan))
            pairs = pairs if backward else steps.astype(float)
            launched = by_launch(plan, steps).astype(float)
            # Columns: with forward's last launch, before backward's first.
            launched[:, 0 if backward else -1] += work.columns
            rate, launch, flops = (
                (rates.backward, rates.backward_launch, 10 * dim) if backward
                else (rates.forward, rates.forward_launch, 4 * dim)
            )  # fmt: skip
            seconds = launched * flops / rate + launch
            lines.append(
                simulate(ring, plan, seconds, cluster.links, key_bytes, grad_bytes, 3 * grad_bytes / 2 / rates.memory)
            )
            plans.append(plan)
        whole = pairs.sum(1) + work.columns
        return Prediction(
            choice, lines[0], lines[1], Balance.of(pairs), float(whole.max() / whole.mean()),
            ring_buffer_bytes(plans[0], plans[1], key_bytes, grad_bytes),
            rates.index + rates.host,
        )  # fmt: skip

    def choices(self) -> Iterator[Choice]:
        """What is worth trying: layouts, stripes that the length allows, rotation, rings, chunks a launch."""
        size, node = self.cluster.cp_size, self.cluster.node_size
        rings = ("flat", "hierarchical") if 1 < node < size else ("flat",)
        for ring in rings:
            most = 1 if ring == "flat" and size > node else min(size, 8)
            for chunks in [c for c in (1, 2, 4, 8) if c <= most]:
                yield from self._layouts(Choice(ring=ring, chunks_per_launch=chunks))

    def _layouts(self, base: Choice) -> Iterator[Choice]:
        size, node, seq = self.cluster.cp_size, self.cluster.node_size, self.shape.seq_len
        for stripe in (64, 128, 256):
            if seq % (stripe * size) == 0:
                yield replace(base, stripe_size=stripe)
                if base.ring == "hierarchical":
                    yield replace(base, stripe_size=stripe, stripe_rotation=node)
        if seq % (2 * BLOCK * size) == 0:
            yield replace(base, layout="zigzag")
        yield replace(base, layout="contiguous")

    def recommend(self) -> list[Prediction]:
        """All choices, the fastest first; of equal ones the simplest (the order of :meth:`choices`)."""
        return sorted((self.predict(choice) for choice in self.choices()), key=lambda p: round(p.seconds, 6))


@dataclass(frozen=True)
class StepTimes:
    """Times of one ring step that were measured elsewhere, in seconds: no index and no rates are needed."""

    compute: float
    intra: float
    inter: float
    index: float = 0.0
    host: float = 0.0

    def forward_seconds(self, cp_size: int, node_size: int, ring: str) -> float:
        """A forward call with the same compute in all steps of all ranks."""
        place = Ring(cp_size, Choice(ring=ring).inner_size(cp_size, node_size), node_size)
        plan = place.plan(False, 1)
        work = np.full((cp_size, len(plan.launches)), self.compute)
        links = Links(Link(0.0, 1 / self.intra), Link(0.0, 1 / self.inter))
        return self.index + self.host + simulate(place, plan, work, links, 1.0, 1.0).seconds


PAPER = StepTimes(compute=0.51e-3, intra=0.13e-3, inter=0.98e-3, index=1.13e-3, host=2.08e-3)
"""The paper's breakdown: 4 nodes of 8 A100; it reports 34.10 ms flat and 19.53 ms hierarchical."""
