"""What the operator benchmark measures and in which order, and how often: fitted to the time that each row takes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from benchmarks.problems import Problem

FORWARD, BACKWARD = 4, 10
"""FLOPs per pair and head dimension."""

RATES = {
    "cudnn": (540, 520), "flash-attention-2": (320, 320), "flash-attention-4": (640, 600), "flex-slash-128": (380, 350),
    "flash-attention-4-slash-128": (600, 500), "mtraining-sm90": (480, 380), "mtraining-sm90-fast": (480, 380),
    "mtraining-sm80": (320, 215), "minference-triton": (340, 150),
}  # fmt: skip
"""TFLOP/s (forward, backward) that were measured on an H200: they foretell how long a row takes."""

COMPILING = {"flex-slash-128": 12.0, "flash-attention-4": 1.0, "flash-attention-4-slash-128": 1.0,
             "minference-triton": 8.0}  # fmt: skip
"""Seconds until the first call of an implementation that compiles itself for a shape (FlashAttention-4: with its cache;
minference-triton: with the two seconds in turn with ours)."""

LONGEST = 6.0
"""Seconds: a pass that takes longer is left out."""


@dataclass(frozen=True)
class Repeats:
    """How often a pass is run: once, or after a warm-up as often as is worth it."""

    warm_up: bool
    repeats: int
    budget_ms: float

    @classmethod
    def of(cls, seconds: float) -> Repeats:
        """For a pass that takes about so long."""
        if seconds > 1.0:
            return cls(False, 1, 0.0)
        if seconds > 0.15:
            return cls(True, 2, 1e6)
        return cls(True, 5, 500.0)

    def total(self, seconds: float) -> float:
        """Seconds that all runs take together."""
        return seconds * (self.repeats + self.warm_up)


def seconds_of(impl: str, kind: str, flops: float) -> float:
    """Foretold time of one pass."""
    return flops / 1e12 / RATES[impl][kind == "backward"]


@dataclass(frozen=True)
class Task:
    """One group of measurements of one implementation.

    Attributes:
        what: "dense", "slash", "sparse" (another implementation on the same mask), "ours", "index" or "share".
        impl: name of the implementation.
        problem: shape and density.
        cp_size: of a share.
        pairs: about how many query-key pairs.
    """

    what: str
    impl: str
    problem: Problem
    pairs: float
    cp_size: int = 1

    @property
    def name(self) -> str:
        """For messages."""
        p = self.problem
        density = "" if self.what in ("dense", "index") else f", density {p.density or 'of the reference pattern'}"
        share = f", share of W={self.cp_size}" if self.what == "share" else ""
        return f"{self.impl} {p.seq_len} {p.heads}/{p.kv_heads}/{p.head_dim}{density}{share}"

    @property
    def seconds(self) -> float:
        """A guess at what the task takes."""
        total = 0.5 + COMPILING.get(self.impl, 0.0)
        if self.what == "index":
            return total
        launches = 4 if self.what == "share" else 1  # one rank's work in launches of several sizes, and as a graph
        for kind, factor in (("forward", FORWARD), ("backward", BACKWARD)):
            once = seconds_of(self.impl, kind, factor * self.problem.head_dim * self.pairs)
            total += launches * Repeats.of(once).total(once) if once <= LONGEST else 0.0
        return total


class Available(Protocol):
    """What can be measured here."""

    kernels: list[str]
    dense_peers: list[str]
    slash_peers: list[str]
    sparse_peers: list[str]

    def wants(self, impl: str) -> bool:
        """Whether the user asked for it."""


def plan(bench: Available, args: argparse.Namespace) -> Iterator[Task]:
    """All measurements, the most telling first."""
    shapes = [Problem(seq_len, *map(int, heads.split("/"))) for heads in args.heads for seq_len in args.seq_lens]
    headline = next((x for x in shapes if x.seq_len == 131072), shapes[0])

    def differs(x: Problem) -> tuple[int, float]:
        others = (x.seq_len != headline.seq_len) + (x.heads != headline.heads)
        return others, x.seq_len**2 * x.heads * x.head_dim

    rest = sorted((x for x in shapes if x != headline), key=differs)
    order: list[tuple[Problem, str]] = []
    order += [(headline, stage) for stage in ("dense", "index", "reference", "slash", "flex", "shares", "densities")]
    order += [(x, stage) for x in rest for stage in ("dense", "index", "reference", "slash", "densities")]
    order += [(headline, "slash densities")]
    order += [(x, "flex") for x in rest]
    for shape, stage in order:
        for task in _stage(bench, shape, stage, args):
            if bench.wants(task.impl):
                yield task


def _stage(bench: Available, shape: Problem, stage: str, args: argparse.Namespace) -> Iterator[Task]:
    """The tasks of a shape that belong together."""
    whole = shape.heads * shape.seq_len**2 / 2
    reference = replace(shape, density=args.densities[0] or None)
    ours = [f"mtraining-{kernel}" for kernel in bench.kernels]
    short = shape.seq_len <= args.longest_slow

    def pairs(problem: Problem) -> float:
        return whole * (problem.density or 0.06)

    others = [replace(shape, density=density or None) for density in args.densities[1:]]
    if stage == "dense":
        yield from (Task("dense", x, shape, whole) for x in bench.dense_peers if short or x != "flash-attention-2")
    elif stage == "index":
        yield Task("index", "mtraining", shape, 0.0)
    elif stage == "reference":
        yield from (Task("ours", x, reference, pairs(reference)) for x in ours)
        if short:  # its lists take 8 bytes a pair of blocks
            yield from (Task("sparse", x, reference, pairs(reference)) for x in bench.sparse_peers)
    elif stage == "densities":
        yield from (Task("ours", x, p, pairs(p)) for p in others for x in ours)
    elif stage == "slash":
        yield from (
            Task("slash", x, reference, pairs(reference)) for x in bench.slash_peers if not x.startswith("flex")
        )
    elif stage == "slash densities":
        some = [p for p in others if p.density and p.density < 1]
        yield from (Task("slash", x, p, pairs(p)) for x in sorted(bench.slash_peers) for p in some)
    elif stage == "flex" and short:
        yield from (Task("slash", x, reference, pairs(reference)) for x in bench.slash_peers if x.startswith("flex"))
    elif stage == "shares":
        longest = replace(shape, seq_len=max(args.seq_lens))
        for cp_size in args.cp_sizes:
            local = 0.06 * longest.heads * longest.seq_len**2 / 2 / cp_size
            yield from (Task("share", x, longest, local, cp_size) for x in ours)
