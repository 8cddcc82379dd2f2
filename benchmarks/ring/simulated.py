"""Attention of one layer on clusters that were not at hand: the simulator with rates measured on one and two GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.problems import Problem
from benchmarks.ring.step import Attention, Rows
from megatron_mtraining.launches import chunks_per_launch
from megatron_mtraining.simulator import (
    H200_LINKS,
    H200_RATES,
    Choice,
    Cluster,
    IndexProfile,
    Predictor,
    Rates,
    Shape,
)

DENSITY = 0.05
NODE = 8
"""GPUs of a node."""


def dense_rates(rows: Rows, case: str, seq_len: int) -> Rates:
    """FLOP/s of a dense ring that was run on real ranks, waits included: launches and index cost nothing besides.

    Raises:
        KeyError: if the case has no forward or backward at this length.
    """
    found = {row["pass"]: row for row in rows if row["case"] == case and row["seq_len"] == seq_len}
    rates = {}
    for phase, factor in (("forward", 4), ("backward", 10)):
        row = found[phase]
        rates[phase] = factor * row["head_dim"] * row["heads"] * seq_len**2 / 2 / row["cp_size"] / (row["ms"] / 1e3)
    return Rates(**rates)


def predict(predictor: Predictor, choice: Choice) -> Attention:
    """One way to run it, with the product's automatic number of chunks a launch."""
    size, local = predictor.cluster.cp_size, predictor.shape.seq_len // predictor.cluster.cp_size
    forward, backward = (
        predictor.predict(replace(choice, chunks_per_launch=min(size, chunks_per_launch(local, phase))))
        for phase in (False, True)
    )
    return Attention(
        forward.call_seconds * 1e3, forward.forward.seconds * 1e3, backward.backward.seconds * 1e3
    )  # fmt: skip


def simulated_attention(
    shape: Shape, sizes: tuple[int, ...], dense: Rates
) -> Iterator[tuple[tuple[str, int], Attention]]:
    """``((system, ranks), milliseconds)`` at a density of 5% (the reference pattern with fewer lines), nodes of eight."""
    index = Problem(shape.seq_len, shape.heads, shape.kv_heads, shape.head_dim, DENSITY, "cpu").index()
    sparse, full = IndexProfile.of(index), IndexProfile.dense(shape.seq_len, shape.heads)
    for size in sizes:
        cluster = Cluster(size, min(size, NODE), H200_LINKS, H200_RATES)
        lines = Predictor(shape, sparse, cluster)
        ours = Choice(stripe_rotation=NODE) if size > NODE else Choice(ring="flat")
        yield ("ours", size), predict(lines, ours)
        if size > NODE:
            yield ("striped, flat ring", size), predict(lines, Choice(ring="flat"))
        yield ("zigzag, flat ring", size), predict(lines, Choice("zigzag", "flat"))
        everything = Predictor(shape, full, replace(cluster, rates=dense))
        yield ("dense, zigzag", size), predict(everything, Choice("zigzag", "flat"))
