"""Trains with an unmodified Megatron-LM on four ranks, from processes that have loaded it (`benchmarks.preloaded`).

    python -m benchmarks.megatron_four --megatron DIR --older DIR --data PREFIX --out DIR [--groups ...] [--only ...]

Context parallelism over four ranks, in a flat ring and in inner rings of two, and over two with two ways of tensor, pipeline
and data parallelism; beside each the run of one GPU from the same weights. With four GPUs the ranks are on one host;
with two (or three) on two pretended hosts that share them (`benchmarks.run_hosts`): the values count then, times mean nothing,
and the group `speed` is left out. Models, options and results are those of `benchmarks.megatron_runs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import megatron_single, run_hosts
from .megatron_runs import (
    CP2,
    DRAWN,
    EXPERTS,
    LOAD,
    LOAD_DRAWN,
    LOCAL,
    OURS,
    P1,
    P95,
    SAVE,
    SMALL,
    SPARSE,
    SPEED_STEPS,
    START_DRAWN,
    TE,
    TP2,
)
from .megatron_single import CURVE, DENSE, LONGER, Single, parse, run_groups
from .run_pool import Run

RANKS = 4
CP4, INNER_2 = "--context-parallel-size 4", "--hierarchical-context-parallel-sizes 2 2"
PP2 = "--pipeline-model-parallel-size 2"
SPLITS = {
    "cp4_2x2": f"{CP4} {INNER_2}",
    "cp4_flat": f"{CP4} --mtraining-ring flat",
    "tp2_cp2": f"{TP2} {CP2} {START_DRAWN}",
    "pp2_cp2": f"{PP2} {CP2} {LOAD_DRAWN}",
    "dp2_cp2": f"{CP2} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}
"""How four ranks share the work. Ranks that draw their own weights load what one GPU has drawn."""
RINGS = {"cp4_2x2": "hierarchical ring, inner size 2 ", "cp4_flat": "flat ring, inner size 4 "}
RING_OF_2 = "flat ring, inner size 2 "
"""What the plugin is to say of its rings: the beginning of the line."""
SHARES = {
    "p95": f"{TE} {OURS} {P95}",
    "p1": f"{TE} {OURS} {P1}",
    "capped": f"{TE} {OURS} {P95} --mtraining-max-vertical 256 --mtraining-max-slash 16",
}
"""How much is kept. A model of five steps attends evenly, so that top-p alone keeps nearly every line: hence the caps."""

DENSE_RUNS = {
    "dense_cp4": f"{DENSE} {CP4}",
    "dense_cp4_2x2": f"{DENSE} {CP4} {INNER_2} --cp-comm-type a2a+p2p",
    "dense_tp2_cp2": f"{DENSE} {TP2} {CP2} {START_DRAWN}",
}
"""Transformer Engine's context parallelism, flat and its own hierarchical one (heads within the inner group, ring outside)."""
ONE = {"one_dense": DENSE, "one_dense_again": DENSE, **{f"one_{share}": words for share, words in SHARES.items()}}
"""One GPU, the same weights and batches."""
NOISE = {
    "one_capped_local": SHARES["capped"].replace(TE, LOCAL),
    "one_capped_pairs": f"{SHARES['capped']} --micro-batch-size 2",
}
"""What a change of rounding alone does on one GPU: another implementation of the layers, two sequences at a time."""
BY_AGENTS = {"cp4_2x2_capped", "cp4_2x2_p95"}  # the others are forked
SMALL_DRAWN = "drawn_small"

CURVES = {
    "p1_cp4_2x2": f"{SHARES['p1']} {SPLITS['cp4_2x2']}",
    "p95_cp4_2x2": f"{SHARES['p95']} {SPLITS['cp4_2x2']}",
}
"""50 steps of the larger model, as the curves of `megatron_runs`."""

BEGINS_DENSE = f"{TE} {SPARSE} --mtraining-dense-steps 6 --mtraining-log none"
SPEED = {
    "speed_cp4_dense": DENSE_RUNS["dense_cp4"],
    "speed_cp4_dense_2x2": DENSE_RUNS["dense_cp4_2x2"],
    "speed_cp4_flat": f"{BEGINS_DENSE} {SPLITS['cp4_flat']}",
    "speed_cp4_2x2": f"{BEGINS_DENSE} {SPLITS['cp4_2x2']}",
}
"""One long sequence a step, on four GPUs: Transformer Engine's two ways, and ours, which begin dense."""


def four_runs() -> dict[str, str]:
    """The runs of four ranks, those that matter most first: name -> options."""
    names = [f"{split}_{share}" for share in ("capped", "p95", "p1") for split in SPLITS]
    ours = {name: f"{SHARES[share]} {SPLITS[split]}" for name in names for split, _, share in [name.rpartition("_")]}
    return {**ours, **DENSE_RUNS, "older_cp4_2x2_p95": ours["cp4_2x2_p95"]}


def more_runs() -> dict[str, str]:
    """What else is to work on four ranks: name -> options."""
    two_by_two, p95 = four_runs()["cp4_2x2_p95"], SHARES["p95"]
    fits = "--make-vocab-size-divisible-by 64"  # per rank: 384 as on one
    return {
        "saved_cp4_2x2_p1": f"{four_runs()['cp4_2x2_p1']} {LONGER} 5 {SAVE} OUT/from_four",
        "packed_cp4_2x2": f"{two_by_two} --mock-data",
        "resumed_tp2_cp2_p1": f"{SHARES['p1']} {TP2} {CP2} {fits} {LONGER} 10 {LOAD} OUT/from_four",
        "interleaved_pp2_cp2_p95": f"{p95} {SPLITS['pp2_cp2']} --num-layers-per-virtual-pipeline-stage 1",
        "full_recompute_cp4_2x2_p95": (
            f"{two_by_two} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        ),
        "zigzag_cp4_2x2_p95": f"{two_by_two} --mtraining-layout zigzag",
        "mtp_cp4_2x2": f"{two_by_two} --mtp-num-layers 1",
        "dp2_ep2_cp2": f"{p95} {CP2} {EXPERTS} --expert-model-parallel-size 2",
    }


AFTER = {"resumed_tp2_cp2_p1": "saved_cp4_2x2_p1"}
ONE_LONGER = {"one_longer": f"{SHARES['p1']} {LONGER} 10"}
LONGER_RUNS = {"saved_cp4_2x2_p1", "resumed_tp2_cp2_p1"}


def reference_of(name: str) -> str | None:
    """The run of one GPU, of the same model on the same data, that a run is compared with; None if there is none."""
    if name in LONGER_RUNS:
        return "one_longer"
    if name in ("one_dense", "one_longer"):
        return None
    if name in NOISE:
        return "one_capped"
    if name.startswith(("dense_", "one_")):
        return "one_dense"
    share = name.rpartition("_")[2]
    return f"one_{share}" if share in SHARES else None


def variables(four: Single) -> dict[str, str]:
    """The environment of a run."""
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **run_hosts.variables(four.hosts)}


def one(four: Single) -> Iterator[Run]:
    """The runs of one GPU, and the weights that it draws."""
    yield from _on_one(four, {SMALL_DRAWN: DRAWN.replace("OUT/drawn", f"OUT/{SMALL_DRAWN}"), **ONE, **NOISE})


def _on_one(four: Single, words: dict[str, str]) -> Iterator[Run]:
    single = replace(four, ranks=1, hosts=1)
    for number, (name, own) in enumerate(words.items()):
        chosen = variables(single) | {"CUDA_VISIBLE_DEVICES": str(number % 2)}
        yield Run(name, "small", single.start(name, f"{SMALL} {own}"), chosen)


def splits(four: Single) -> Iterator[Run]:
    """A few steps of each way to share the work."""
    yield from _on_four(four, four_runs())


def more(four: Single) -> Iterator[Run]:
    """A few steps of what else is to work, and of one GPU."""
    yield from _on_one(four, ONE_LONGER)
    yield from _on_four(four, more_runs())


def _on_four(four: Single, runs: dict[str, str]) -> Iterator[Run]:
    for name, own in runs.items():
        words = f"{SMALL} {own}".replace("OUT/drawn", f"OUT/{SMALL_DRAWN}")
        command = four.start(name, words, by_agents=name in BY_AGENTS)
        after = SMALL_DRAWN if LOAD_DRAWN in own else AFTER.get(name)
        yield Run(name, "four", command, variables(four), timeout=100, after=after)


def curves(four: Single) -> Iterator[Run]:
    """50 steps, 32,768 tokens each."""
    for name, own in CURVES.items():
        command = four.start(name, f"{CURVE} {own} --mtraining-log no-recall")
        yield Run(name, "curve", command, variables(four), timeout=400)


def speed(four: Single) -> Iterator[Run]:
    """Steps of one long sequence; each run has the GPUs to itself."""
    if four.hosts > 1:
        print("speed: left out; ranks that share a GPU take turns", flush=True)
        return
    for name, own in SPEED.items():
        yield four.long(name, f"{own} --train-iters {SPEED_STEPS} --lr-warmup-iters 5", variables(four))


def judge(result: dict[str, Any], logs: Path) -> dict[str, Any]:
    """As `megatron_single.judge`; the plugin must have formed the rings that a run is about, too."""
    result = megatron_single.judge(result, logs)
    name = result["name"]
    if result["kind"] in ("four", "curve") and not name.startswith("dense_"):
        expected = next((ring for split, ring in RINGS.items() if split in name), RING_OF_2)
        result["status"] = result["status"] or int(not result.get("ring", "").startswith(expected))
    return result


def hosts_for(gpus: int) -> int:
    """On how many hosts four ranks are, pretended ones if several."""
    if gpus < 2:
        raise SystemExit(f"megatron_four: needs two GPUs at least, found {gpus}")
    return 1 if gpus >= RANKS else 2


NAMES = (*ONE, *NOISE, *ONE_LONGER, *four_runs(), *more_runs())
"""Of all runs that are reported beside one GPU, in order."""
GROUPS = {"one": one, "splits": splits, "more": more, "curves": curves, "speed": speed}


def main() -> None:
    """Runs the groups."""
    import torch

    given = parse(str(__doc__), list(GROUPS))
    run_groups(given, GROUPS, ranks=RANKS, hosts=hosts_for(torch.cuda.device_count()), judge=judge)


if __name__ == "__main__":
    main()
