"""Trains with an unmodified Megatron-LM on two GPUs, from processes that have loaded it (`benchmarks.preloaded`).

    python -m benchmarks.megatron_pair --megatron DIR --older DIR --data PREFIX --out DIR [--groups curves,golden,...]

The runs of `benchmarks.megatron_runs` that need both GPUs: loss curves with context and tensor parallelism, the functional
tests, the speed beside Transformer Engine's ring, what composes. Models, options and results are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .megatron_runs import CHECKS, CP2, CURVES, DRAWN, ONE_GPU, OURS, SMALL, SPEED, SPEED_STEPS, START_DRAWN, VARIABLES
from .megatron_single import CURVE, RECORDINGS, SPARSE_SMALL, Single, parse, run_groups
from .run_pool import Run

CASES = ("gpt_153m_mtraining_cp2", "gpt_153m_mtraining_tp2_sp")
REDONE_ON_ONE = {"local_spec", "mock_data", "fp16", "selective_recompute", "hybrid", "qk_norm_yarn"}
"""Checks that `megatron_single` makes as well; they come last."""


def variables(name: str) -> dict[str, str]:
    """The environment of a run."""
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **VARIABLES.get(name, {})}


def curves(pair: Single) -> Iterator[Run]:
    """50 steps, 32,768 tokens each; few at a time, since collectives of many wait for each other's time slices."""
    for name, (kind, words) in CURVES.items():
        if kind == "curve":
            log = "--mtraining-log no-recall" if OURS in words else ""
            command = pair.start(name, f"{CURVE} {words} {log}")
            after = "drawn" if START_DRAWN in words else None
            yield Run(name, kind, command, variables(name), timeout=240, after=after)


def drawn(pair: Single) -> Iterator[Run]:
    """The weights that one GPU draws, for curves with tensor parallelism."""
    one = replace(pair, ranks=1)
    yield Run("drawn", "small", one.start("drawn", f"{CURVE} {DRAWN}"), variables("drawn"))


def golden(pair: Single) -> Iterator[Run]:
    """The functional tests, each recorded twice side by side."""
    for case in CASES:
        for step in RECORDINGS:
            yield pair.functional_test(case, step)


def repeated(pair: Single) -> Iterator[Run]:
    """The functional tests, compared with the golden values."""
    for case in CASES:
        yield pair.functional_test(case, "repeated")


def speed(pair: Single) -> Iterator[Run]:
    """Steps of one long sequence; each pair of processes has the GPUs to itself."""
    for name, words in SPEED.items():
        yield pair.long(name, f"{words} --train-iters {SPEED_STEPS} --lr-warmup-iters 5", variables(name))


def checks(pair: Single) -> Iterator[Run]:
    """A few steps of each combination."""
    names = [name for name in CHECKS if name not in ONE_GPU and name not in ("sparse_from_dense", *REDONE_ON_ONE)]
    for name in [*names, *sorted(REDONE_ON_ONE)]:
        command = pair.start(name, f"{SMALL} {CHECKS[name]}")
        yield Run(name, "small", command, variables(name), timeout=75)
    packed = pair.start("packed_cp2", f"{SMALL} {SPARSE_SMALL} {CP2} --mock-data")
    yield Run("packed_cp2", "small", packed, variables("packed_cp2"), timeout=75)


GROUPS = {"drawn": drawn, "curves": curves, "speed": speed, "golden": golden, "checks": checks, "repeated": repeated}


def main() -> None:
    """Runs the groups; the next begins while the last one ends."""
    run_groups(parse(str(__doc__), list(GROUPS)), GROUPS, ranks=2)


if __name__ == "__main__":
    main()
