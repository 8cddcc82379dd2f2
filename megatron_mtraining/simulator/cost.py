"""What a cluster and its kernels cost: links, compute rates, shapes, and the presets."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

SPARSE, LONG = 0.5, 131072
"""Rows that rates are fitted to: densities below, tokens from."""


@dataclass(frozen=True)
class Link:
    """A link of one GPU, each way: seconds before the first byte, and bytes per second."""

    latency: float
    bandwidth: float

    def seconds(self, sent: np.ndarray) -> np.ndarray:
        """Time to send so many bytes; none for nothing."""
        return np.where(sent > 0, self.latency + sent / self.bandwidth, 0.0)


@dataclass(frozen=True)
class Links:
    """The links inside a node and between nodes."""

    intra: Link
    inter: Link


@dataclass(frozen=True)
class Rates:
    """Compute rates on useful pairs, and what every launch and every call costs besides.

    Attributes:
        forward, backward: FLOP/s; a pair costs ``4 * head_dim`` and ``10 * head_dim``.
        forward_launch, backward_launch: seconds per launch.
        index: seconds of index estimation per call.
        host: seconds of a forward call in which the device waits for the host.
        memory: bytes per second of device memory, for adding partial gradients.
    """

    forward: float
    backward: float
    forward_launch: float = 0.0
    backward_launch: float = 0.0
    index: float = 0.0
    host: float = 0.0
    memory: float = 4e12


@dataclass(frozen=True)
class Shape:
    """One attention call of the whole context-parallel group, per tensor-parallel rank.

    Attributes:
        seq_len: global tokens.
        heads, kv_heads, head_dim: of one rank.
        element_bytes: of K and V; gradients travel in fp32.
    """

    seq_len: int
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 128
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) < 1:
                raise ValueError(f"{item.name}={getattr(self, item.name)}: must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads}: must be a multiple of kv_heads={self.kv_heads}")

    def chunk_bytes(self, cp_size: int, element_bytes: int | None = None) -> float:
        """Bytes of one chunk's K and V (or, at four bytes an element, of their gradients)."""
        size = self.element_bytes if element_bytes is None else element_bytes
        return 2.0 * self.seq_len / cp_size * self.kv_heads * self.head_dim * size


H200_RATES = Rates(forward=597e12, backward=393.5e12, forward_launch=0.122e-3, backward_launch=0.179e-3, index=1.08e-3)
"""Fitted by :func:`fit_rates` to ``benchmarks/results/ops-2026-11-30-nvidia-h200-second.json`` (sm90 kernels, head dimension
128; within 16% forward, 10% backward, the worst at densities of 10% and 2%); index: one rank with 128K tokens."""

H200_LINKS = Links(Link(0.05e-3, 225e9), Link(0.05e-3, 40e9))
"""Inside a node: batched send and receive of 64 MiB over NVLink between two H200, 225 GB/s measured. Between nodes:
assumed, 400 Gbit/s per GPU at 80%; latencies assumed."""


def fit_rates(rows: list[dict[str, Any]], impl: str, passed: str, head_dim: int = 128) -> tuple[float, float]:
    """``(FLOP/s, seconds per launch)`` that explain the rows of ``benchmarks.bench_ops`` best, relative errors squared.

    Of sparse attention (density below one half) of at least 128K tokens: dense attention has another rate, and short
    sequences mostly launches.

    Args:
        rows: of the result file.
        impl: such as ``mtraining-sm90``.
        passed: ``forward`` or ``backward``.
        head_dim: of the rows.

    Raises:
        ValueError: if there are fewer than two such rows.
    """
    found = [
        row for row in rows
        if (row["impl"], row["pass"], row["head_dim"]) == (impl, passed, head_dim)
        and row["density"] < SPARSE and row["seq_len"] >= LONG
    ]  # fmt: skip
    if len(found) < 2:
        raise ValueError(
            f"impl={impl!r}, pass={passed!r}: {len(found)} rows, at least 2 are needed (head_dim={head_dim}, density "
            f"below {SPARSE}, seq_len from {LONG})"
        )
    seconds = np.array([row["ms"] / 1e3 for row in found])
    flops = np.array([row["tflops"] * 1e12 for row in found]) * seconds
    launches = np.array([(row.get("cp_size") or 1) / (row.get("chunks_per_launch") or 1) for row in found])
    table = np.stack([flops, launches], 1) / seconds[:, None]
    (per_flop, per_launch), *_ = np.linalg.lstsq(table, np.ones(len(found)), rcond=None)
    return float(1 / per_flop), float(per_launch)
