"""Plans a ring on a cluster that is not at hand: ``python -m megatron_mtraining.simulate --help``.

    python -m megatron_mtraining.simulate --seq-len 524288 --inner 8 --outer 4
    python -m megatron_mtraining.simulate --preset paper
    python -m megatron_mtraining.simulate --model qwen2.5-3b --gpu-memory 141

docs/simulator.md says what is modelled, how far it was checked, and what is assumed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .index_dump import load_index
from .simulator import (
    H200_LINKS,
    H200_RATES,
    PAPER,
    Choice,
    Cluster,
    IndexProfile,
    Link,
    Links,
    Pattern,
    Predictor,
    Rates,
    Shape,
    fit_rates,
    head_parallel_imbalance,
    make_profile,
)
from .simulator.memory import MODELS, Parallel, memory_plan, smallest_cp
from .simulator.predict import LAYOUTS

PLANNED_LENGTHS = (131072, 262144, 524288, 1048576)
SHOWN = 8

OF_MODEL = frozenset({"gpu_memory", "tp"})
OF_STRIPES = frozenset({"stripe_size", "stripe_rotation"})
OF_CHOICE = OF_STRIPES | {"ring", "chunks"}
MADE_UP = frozenset({"seq_len", "heads", "density", "vertical", "band", "longest_run", "spread"})
"""Options that go with another one, or that a measured index takes the place of."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="python -m megatron_mtraining.simulate", description=(__doc__ or "").split("\n")[0]
    )
    add = made.add_argument
    add("--preset", choices=("h200", "paper"), default="h200", help="paper: the step times of the paper's breakdown")
    add("--model", choices=sorted(MODELS), help="plan memory of this model instead of a ring")
    add("--gpu-memory", type=float, default=141.0, help="GB of one GPU, with --model (default: %(default)s)")
    add("--tp", type=int, default=1, help="tensor-parallel ranks, with --model (default: %(default)s)")
    add("--seq-len", type=int, default=524288, help="global tokens (default: %(default)s)")
    add("--heads", type=int, default=16, help="query heads of one rank (default: %(default)s)")
    add("--kv-heads", type=int, default=2, help="key heads of one rank (default: %(default)s)")
    add("--head-dim", type=int, default=128, help="(default: %(default)s)")
    add("--inner", type=int, default=8, help="ranks of a node (default: %(default)s)")
    add("--outer", type=int, default=4, help="nodes (default: %(default)s)")
    add("--index", type=Path, help="a measured index: a file of megatron_mtraining.index_dump")
    add(
        "--density",
        type=float,
        default=0.05,
        help="of a made-up index: share of the causal pairs (default: %(default)s)",
    )
    add(
        "--vertical",
        type=float,
        default=0.005,
        help="... share of the positions kept as columns (default: %(default)s)",
    )
    add(
        "--band", type=float, default=0.5, help="... share of the distances that are the nearest (default: %(default)s)"
    )
    add("--longest-run", type=int, default=4, help="... longest run of other distances (default: %(default)s)")
    add("--spread", type=float, default=0.0, help="... deviation of the logarithm of the heads' densities")
    add("--rates", type=Path, help="a result file of benchmarks.bench_ops to fit the compute rates to")
    add("--impl", default="mtraining-sm90", help="... of these kernels (default: %(default)s)")
    add("--forward-tflops", type=float, help="useful TFLOP/s of a launch forward, in place of the fitted rate")
    add("--backward-tflops", type=float, help="... backward")
    add("--intra-gbs", type=float, default=225.0, help="GB/s of a GPU inside a node (default: %(default)s)")
    add("--inter-gbs", type=float, default=40.0, help="GB/s of a GPU between nodes (default: %(default)s, assumed)")
    add("--intra-us", type=float, default=50.0, help="latency inside a node (default: %(default)s)")
    add("--inter-us", type=float, default=50.0, help="latency between nodes (default: %(default)s)")
    add("--layout", choices=LAYOUTS, help="predict this choice alone, with the four below")
    add("--ring", choices=("flat", "hierarchical"), default="hierarchical", help="(default: %(default)s)")
    add("--stripe-size", type=int, default=64, help="of striped, tokens (default: %(default)s)")
    add("--stripe-rotation", type=int, default=1, help="of striped (default: %(default)s)")
    add("--chunks", type=int, default=1, help="most chunks of a launch (default: %(default)s)")
    add("--json", action="store_true", help="print everything as JSON")
    return made


def refuse_unused(options: argparse.Namespace, given: frozenset[str]) -> None:
    """Raises ValueError for the first option that was given and would change nothing, by name.

    Args:
        options: all of them.
        given: the names of those on the command line.
    """
    if options.preset == "paper":
        ruled_out = [(given - {"preset", "json"}, "--preset paper has its own cluster and takes nothing else")]
    elif options.model is not None:
        ruled_out = [
            (given - OF_MODEL - {"preset", "model", "json"}, "--model plans memory and takes --gpu-memory and --tp")
        ]
    else:
        ruled_out = [(OF_MODEL, "needs --model")]
        if options.index is not None:
            ruled_out.append((MADE_UP, "--index has its own"))
        if options.rates is None:
            ruled_out.append((frozenset({"impl"}), "needs --rates"))
        if options.layout is None:
            ruled_out.append((OF_CHOICE, "needs --layout (without, all choices are tried)"))
        elif options.layout != "striped":
            ruled_out.append((OF_STRIPES, f"--layout {options.layout} has no stripes"))
    for names, why in ruled_out:
        for name in sorted(given & names):
            raise ValueError(f"--{name.replace('_', '-')}: {why}")


def _given(arguments: Sequence[str] | None) -> frozenset[str]:
    """The names of the options on a command line: those that are set where no option has a default."""
    made = parser()
    for action in made._actions:
        action.default = argparse.SUPPRESS
    return frozenset(vars(made.parse_args(arguments)))


def _check(options: argparse.Namespace, *names: str, low: float, above: bool = False) -> None:
    """Raises ValueError for an option that is no finite number of at least (``above``: more than) ``low``."""
    for name in names:
        value = getattr(options, name)
        if not math.isfinite(value) or value < low or (above and value == low):
            wanted = (f"above {low:g}" if above else f"at least {low:g}") + " and finite" * (value == math.inf)
            raise ValueError(f"--{name.replace('_', '-')}={value}: must be {wanted}")


def _rates(options: argparse.Namespace) -> Rates:
    given = [name for name in ("forward_tflops", "backward_tflops") if getattr(options, name) is not None]
    _check(options, *given, low=0.0, above=True)
    rates = _fitted_rates(options)
    return replace(rates, **{name.removesuffix("_tflops"): getattr(options, name) * 1e12 for name in given})


def _fitted_rates(options: argparse.Namespace) -> Rates:
    if options.rates is None:
        return H200_RATES
    try:
        rows = json.loads(options.rates.read_text())["rows"]
        known = all({"impl", "pass", "head_dim", "density", "seq_len", "ms", "tflops"} <= set(row) for row in rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--rates={options.rates}: must be a JSON file of benchmarks.bench_ops ({error})") from error
    if not known:
        raise ValueError(f"--rates={options.rates}: must be a JSON file of benchmarks.bench_ops, this is another one's")
    forward, forward_launch = fit_rates(rows, options.impl, "forward", options.head_dim)
    backward, backward_launch = fit_rates(rows, options.impl, "backward", options.head_dim)
    return replace(
        H200_RATES, forward=forward, backward=backward, forward_launch=forward_launch, backward_launch=backward_launch
    )


def _links(options: argparse.Namespace) -> Links:
    _check(options, "intra_gbs", "inter_gbs", low=0.0, above=True)
    _check(options, "intra_us", "inter_us", low=0.0)
    return replace(
        H200_LINKS,
        intra=Link(options.intra_us * 1e-6, options.intra_gbs * 1e9),
        inter=Link(options.inter_us * 1e-6, options.inter_gbs * 1e9),
    )


def _measured_profile(path: Path) -> IndexProfile:
    try:
        return IndexProfile.of(load_index(path)[0])
    except OSError as error:
        raise ValueError(f"--index={path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--index={path}: {error}") from error


def _predictor(options: argparse.Namespace) -> Predictor:
    _check(options, "seq_len", "heads", "kv_heads", "head_dim", "inner", "outer", "chunks", low=1)
    if options.index is not None:
        profile = _measured_profile(options.index)
    else:
        pattern = Pattern(options.density, options.vertical, options.band, options.longest_run, options.spread)
        profile = make_profile(pattern, options.seq_len, options.heads)
    shape = Shape(profile.seq_len, profile.heads, options.kv_heads, options.head_dim)
    cluster = Cluster(options.inner * options.outer, options.inner, _links(options), _rates(options))
    return Predictor(shape, profile, cluster)


def predict_ring(options: argparse.Namespace) -> dict[str, Any]:
    """All choices (or the one asked for), the fastest first, and what else is known of the index."""
    predictor = _predictor(options)
    if options.layout is not None:
        asked = Choice(options.layout, options.ring, options.stripe_size, options.stripe_rotation, options.chunks)
        found = [predictor.predict(asked)]
    else:
        found = predictor.recommend()
    heads = predictor.profile.head_pairs()
    return {
        "seq_len": predictor.shape.seq_len,
        "cp_size": predictor.cluster.cp_size,
        "density": predictor.profile.density(),
        "head_parallel_imbalance": {
            ranks: head_parallel_imbalance(heads, ranks) for ranks in (2, 4, 8, 16) if heads.size % ranks == 0
        },
        "choices": [prediction.summary() for prediction in found],
        "launches": found[0].launches(),
    }


def predict_paper() -> dict[str, Any]:
    """The paper's forward call from its step times, beside what it reports."""
    return {
        "flat_ms": PAPER.forward_seconds(32, 8, "flat") * 1e3,
        "hierarchical_ms": PAPER.forward_seconds(32, 8, "hierarchical") * 1e3,
        "paper_flat_ms": 34.10,
        "paper_hierarchical_ms": 19.53,
    }


def plan_memory(options: argparse.Namespace) -> dict[str, Any]:
    """Fewest context-parallel ranks by length, and where their memory goes."""
    _check(options, "gpu_memory", low=0.0, above=True)
    _check(options, "tp", low=1)
    model = MODELS[options.model]
    gib = options.gpu_memory * 1e9 / 2**30
    plans = []
    for seq_len in PLANNED_LENGTHS:
        cp = smallest_cp(model, seq_len, gib, options.tp)
        parts = {} if cp is None else memory_plan(model, seq_len, Parallel(options.tp, cp))
        plans.append({"seq_len": seq_len, "tp": options.tp, "cp": cp, "gib": parts})
    return {"model": options.model, "gpu_memory_gb": options.gpu_memory, "plans": plans}


def text(result: dict[str, Any]) -> str:
    """A result for people."""
    if "plans" in result:
        lines = [f"{result['model']} on GPUs of {result['gpu_memory_gb']:g} GB, full recomputation, 10% in reserve"]
        for plan in result["plans"]:
            parts = ", ".join(f"{name} {size:.1f}" for name, size in plan["gib"].items())
            found = f"cp {plan['cp']}: {parts} GiB" if parts else "does not fit, with any number of cp ranks"
            lines.append(f"{plan['seq_len']:>8} tokens: tp {plan['tp']}, {found}")
        return "\n".join(lines)
    if "flat_ms" in result:
        return "\n".join(f"{name:22}{value:8.2f}" for name, value in result.items())
    lines = [f"{result['seq_len']} tokens on {result['cp_size']} ranks, density {result['density']:.4f}", ""]
    lines.append("   ms  forward backward | exposed ms | computing | worker critical step | buffers | choice")
    for row in result["choices"][:SHOWN]:
        lines.append(
            f"{row['ms']:7.2f} {row['forward_ms']:7.2f} {row['backward_ms']:7.2f} | {row['forward_exposed_ms']:4.2f} "
            f"{row['backward_exposed_ms']:5.2f} | {row['forward_compute_share']:.0%} {row['backward_compute_share']:4.0%} | "
            f"{row['imbalance_worker']:.3f} {row['imbalance_critical']:.3f} {row['imbalance_step']:5.2f} | "
            f"{row['buffer_mib']:5.0f} MiB | --mtraining-layout {row['layout']} --mtraining-ring {row['ring']} "
            f"--mtraining-stripe-size {row['stripe_size']} --mtraining-stripe-rotation {row['stripe_rotation']} "
            f"--mtraining-chunks-per-launch {row['chunks_per_launch']}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a prediction; a wrong value ends it with one line."""
    options = parser().parse_args(arguments)
    try:
        refuse_unused(options, _given(arguments))
        if options.model is not None:
            result = plan_memory(options)
        else:
            result = predict_paper() if options.preset == "paper" else predict_ring(options)
    except (ValueError, OSError) as error:
        sys.exit(f"simulate: {error}")
    print(json.dumps(result, indent=1) if options.json else text(result))


if __name__ == "__main__":
    main()
