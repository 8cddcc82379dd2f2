"""The profiling switch: times of the ring passes of chosen training steps, for ``python -m megatron_mtraining.report``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_mtraining.ring_profile import RingProfile, profile_ring

from .errors import RefusedError
from .layer_plan import parse_numbers
from .options import option_name

FILE = "ring.jsonl"
"""The file's name; it lies beside that of the metrics."""

PASSES = 64
"""Passes of each phase that are timed in a step: more layers and micro-batches show nothing new, and times take memory."""


@dataclass(frozen=True)
class RingProfiler:
    """Times ring passes.

    Attributes:
        path: file that rank 0 appends to: a line per pass and rank of the first context-parallel group with attention.
        steps: the steps that are timed, from 1 as in Megatron's log.
    """

    path: Path
    steps: frozenset[int]

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Times the passes of a step and writes them after it. Collective over the world; waits for the device then."""
        profile = RingProfile(PASSES)
        with profile_ring(profile):
            yield
        counts: dict[str, int] = {}
        lines = []
        for times in profile.read():
            counts[times.phase] = counts.get(times.phase, -1) + 1
            lines.append(times.to_json() | {"step": step, "call": counts[times.phase]})
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (profile.ranks or (dist.get_rank(),), lines))
        if dist.get_rank() != 0:
            return
        shown = next((ranks for ranks, lines in everyone if lines), ())
        with self.path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for ranks, lines in everyone if ranks == shown for line in lines)


def profiler_from_args(args: Any, metrics: Path | None) -> RingProfiler | None:
    """The profiler that the options describe, if any.

    Args:
        args: Megatron's arguments.
        metrics: file of the metrics, in whose folder the profile goes.

    Raises:
        RefusedError: for a value that is not valid, or no folder to write to; names the option and the value.
    """
    steps = args.mtraining_profile_steps
    if steps is None:
        return None
    numbers = frozenset(parse_numbers(option_name("profile_steps"), steps, 1, None))
    if metrics is None:
        raise RefusedError(
            f"{option_name('profile_steps')} {steps}: writes {FILE} beside the metrics; give {option_name('metrics')} FILE"
        )
    return RingProfiler(metrics.parent / FILE, numbers)
