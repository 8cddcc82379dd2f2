"""What the simulator says of a case, for the launches that the product runs: a column beside each measured row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from benchmarks.problems import Problem
from benchmarks.ring.cases import Case, Row, case_index, describe, in_pairs
from benchmarks.ring.gathered import gather_ms
from benchmarks.ring.throttle import Throttle
from megatron_mtraining import VerticalSlashIndex
from megatron_mtraining.launches import Plan
from megatron_mtraining.layout import Layout
from megatron_mtraining.simulator import (
    H200_LINKS,
    H200_RATES,
    Choice,
    Cluster,
    IndexProfile,
    Links,
    Predictor,
    Rates,
    Shape,
)
from megatron_mtraining.simulator.timeline import Ring

Forecast = dict[str, dict[str, float]]
"""Predicted columns by pass."""

PHASES = ("forward", "backward")
FACTORS = {"forward": 4, "backward": 10, "call": 14}
"""FLOP of a pair over the head dimension."""

CUDNN_RATES = Rates(506.5e12, 539.7e12)
"""cuDNN's dense causal attention of 262,144 tokens on one H200
(``benchmarks/results/ring-2026-11-30-1-gpu.json``)."""


def links_of(throttle: Throttle | None) -> Links:
    """The links of one host of H200, with a slow one between its pretended nodes if asked for."""
    real = H200_LINKS.intra
    return Links(real, real if throttle is None else throttle.link(real))


def shape_of(problem: Problem) -> Shape:
    """The simulator's shape of a problem."""
    return Shape(problem.seq_len, problem.heads, problem.kv_heads, problem.head_dim)


@lru_cache(maxsize=16)
def _predictor(shape: Shape, index: VerticalSlashIndex, cp_size: int, node_size: int, links: Links) -> Predictor:
    return Predictor(shape, IndexProfile.of(index), Cluster(cp_size, node_size, links, H200_RATES))


def predicted(
    problem: Problem, case: Case, ring: Ring, index: VerticalSlashIndex, throttle: Throttle | None = None
) -> Forecast:
    """By pass, columns ``predicted_ms`` and, of forward and backward, ``predicted_exposed_ms`` (mean rank).

    The call of a dense case has no index. Rates are the stock ones of one H200 (``H200_RATES``).
    """
    links = links_of(throttle)
    predictor = _predictor(shape_of(problem), index, ring.cp_size, ring.node_size, links)
    found: Forecast = {}
    total = 0.0 if case.dense else H200_RATES.index * 1e3
    if not case.dense:
        found["index"] = {"predicted_ms": round(total, 3)}
    for phase in PHASES:
        backward = phase == "backward"
        choice = Choice(
            case.layout,
            "hierarchical" if case.hierarchical else "flat",
            stripe_rotation=ring.node_size if case.rotated else 1,
            chunks_per_launch=case.launched(ring, problem.seq_len // ring.cp_size, backward),
        )
        prediction = predictor.predict(choice)
        line = prediction.backward if backward else prediction.forward
        total += line.seconds * 1e3
        found[phase] = {
            "predicted_ms": round(line.seconds * 1e3, 3),
            "predicted_exposed_ms": round(float(line.exposed.sum(1).mean()) * 1e3, 3),
        }
    found["call"] = {"predicted_ms": round(total, 3)}
    return found


def predicted_gathered(problem: Problem, cp_size: int, node_size: int) -> Forecast:
    """Gathered dense by pass: cuDNN at the rate of one GPU, and the gathering, nothing of it hidden."""
    traffic = gather_ms(shape_of(problem), cp_size, node_size, links_of(None))
    found: Forecast = {}
    total = 0.0
    for phase, exposed in zip(PHASES, traffic, strict=True):
        flops = FACTORS[phase] * problem.head_dim * problem.heads * problem.seq_len**2 / 2 / cp_size
        ms = flops / getattr(CUDNN_RATES, phase) * 1e3 + exposed
        total += ms
        found[phase] = {"predicted_ms": round(ms, 3)}
    found["call"] = {"predicted_ms": round(total, 3)}
    return found


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in a pass, by ring."""

    inner: float
    outer: float

    def columns(self, prefix: str = "") -> Row:
        """In MiB."""
        return {
            f"{prefix}inner_mib": round(self.inner / 2**20, 3),
            f"{prefix}outer_mib": round(self.outer / 2**20, 3),
        }


def planned_traffic(plan: Plan, key_bytes: float, grad_bytes: float) -> Traffic:
    """What the launches of a plan send, given the bytes of one chunk's keys and of its gradients."""
    launches = plan.launches
    inner = sum(len(x.keys) * key_bytes + len(x.grads) * grad_bytes for x in launches)
    outer = sum((x.outer is not None) * key_bytes + (x.outer_grad is not None) * grad_bytes for x in launches)
    return Traffic(inner, outer)


def tflops(problem: Problem, index: VerticalSlashIndex, cp_size: int, name: str, ms: float) -> float:
    """Useful TFLOP/s a rank: of kept pairs alone, whatever else the time holds."""
    return round(FACTORS[name] * problem.head_dim * float(index.pairs().sum()) / cp_size / ms / 1e9, 1)


def common_columns(problem: Problem, case: Case, ring: Ring, index: VerticalSlashIndex, layout: Layout) -> Row:
    """What a row of a ring says first."""
    return describe(problem, case.name, ring, index) | in_pairs(index, layout, ring)


def dense_columns(name: str, problem: Problem, ring: Ring) -> Row:
    """The same for dense attention that is not ours."""
    return {
        "case": name, "seq_len": problem.seq_len, "heads": problem.heads, "kv_heads": problem.kv_heads,
        "head_dim": problem.head_dim, "cp_size": ring.cp_size, "inner_size": ring.inner_size, "density": 1.0,
    }  # fmt: skip


def gathered_name(cp_size: int) -> str:
    """The case of cuDNN's dense attention."""
    return "cuDNN dense, one rank" if cp_size == 1 else "cuDNN dense, gathered keys"


def ring_rows(
    problem: Problem, case: Case, ring: Ring, index: VerticalSlashIndex, throttle: Throttle | None
) -> list[Row]:
    """Rows of a case that nobody has run."""
    index = case_index(problem, case, index)
    common = common_columns(problem, case, ring, index, case.layout_of(problem.seq_len, ring)) | link_columns(throttle)
    return [
        common | {"pass": name} | columns for name, columns in predicted(problem, case, ring, index, throttle).items()
    ]


def gathered_rows(problem: Problem, ring: Ring) -> list[Row]:
    """The same for dense attention of cuDNN over gathered keys."""
    common = dense_columns(gathered_name(ring.cp_size), problem, ring) | link_columns(None)
    found = predicted_gathered(problem, ring.cp_size, ring.node_size)
    return [common | {"pass": name} | columns for name, columns in found.items()]


def link_columns(throttle: Throttle | None) -> Row:
    """What a row says of the links between nodes."""
    return {"links": "as it is" if throttle is None else throttle.label}
