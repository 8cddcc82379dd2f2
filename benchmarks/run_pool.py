"""Runs training commands beside one another on the GPUs of one host, and reads what Megatron logged.

Most of a short run is start-up on the CPU, so the next run starts while the last one computes; how closely depends on
what the runs are for (`Run.kind`).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .preloaded import ready_file

ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\): ([\d.]+)")
VALUES = {
    "loss": re.compile(r"lm loss: ([-+\d.Ena]+)"),
    "grad_norm": re.compile(r"grad norm: ([-+\d.Ena]+)"),
}
RING = re.compile(r"> megatron_mtraining: ((?:flat|hierarchical) ring, .* communicators made)")
DENSITY = re.compile(r"\| density: ([\d.]+)")
VALIDATION = re.compile(r"validation loss at .*?lm loss value: ([-+\d.Ena]+)")
LIMITS = {"curve": 2, "check": 5, "single": 6, "alone": 1, "gated": 3, "small": 8, "four": 4}
"""Most runs of each kind at a time."""
STAGGER = {"curve": 9.0, "check": 1.0, "single": 0.0, "alone": 0.0, "gated": 0.0, "small": 0.3, "four": 4.0}
"""Seconds from one start to the next."""


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: of its log.
        kind: `curve` (many steps on several GPUs), `single` (many steps on one), `check` (few steps, not timed), `small`
            (the same, loaded already), `four` (the same on four ranks), `alone` (timed) or `gated` (timed: starts up beside
            others and trains alone).
        command: what to start.
        variables: of the environment, besides those of this process.
        timeout: seconds.
        after: the run that must have ended before, if it is among those that are run.
        gate: of a gated run: the file for which it waits before it trains (`benchmarks.preloaded`).
    """

    name: str
    kind: str
    command: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    timeout: float = 120.0
    after: str | None = None
    gate: Path | None = None


class _Started:
    """A run on its way."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run = run
        self.log = folder / f"{run.name}.log"
        self.begin = time.monotonic()
        self.asked = False
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                run.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | run.variables,
                start_new_session=True,
            )

    def status(self) -> int | None:
        """The exit status; None while it runs. A run past its time is stopped: 124."""
        if time.monotonic() - self.begin > self.run.timeout and self.process.poll() is None:
            self.stop()
            return 124
        return self.process.poll()

    def ask_to_stop(self) -> None:
        """One signal and no second, which would keep torchrun from stopping its workers."""
        if not self.asked and self.process.poll() is None:
            self.asked = True
            os.killpg(self.process.pid, signal.SIGTERM)

    def stop(self) -> None:
        """Ends the run with all its processes."""
        self.ask_to_stop()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def run_all(
    runs: Sequence[Run], folder: Path, on_result: Callable[[dict[str, Any]], None], at_once: bool = False
) -> None:
    """Runs everything, in this order as far as the kinds allow, or `at_once`; calls `on_result` with each outcome.

    Runs that an exception cuts short are stopped and told as well, with status 124.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting, running = list(runs), list[_Started]()
    unfinished = {run.name for run in runs}
    last_start = 0.0
    try:
        while waiting or running:
            for started in list(running):
                status = started.status()
                if status is not None:
                    running.remove(started)
                    unfinished.discard(started.run.name)
                    on_result(outcome(started.run, started.log, status, time.monotonic() - started.begin))
            _open_gate(running)
            run = next((run for run in waiting if run.after not in unfinished), None)
            if run is not None and (at_once or _may_start(run, running, time.monotonic() - last_start)):
                waiting.remove(run)
                last_start = time.monotonic()
                running.append(_Started(run, folder))
            else:
                time.sleep(0.1)
    finally:
        for started in running:
            started.ask_to_stop()
        for started in running:
            started.stop()
            on_result(outcome(started.run, started.log, 124, time.monotonic() - started.begin))


def _open_gate(running: Sequence[_Started]) -> None:
    """Lets the first gated run train once it is ready and nothing else trains."""
    gates = [started.run.gate for started in running]
    shut = [gate for gate in gates if gate is not None and not gate.exists()]
    if shut and len(shut) == len(gates) and ready_file(shut[0]).exists():
        shut[0].touch()


def _may_start(run: Run, running: Sequence[_Started], since_last: float) -> bool:
    if run.kind == "alone" or any(other.run.kind == "alone" for other in running):
        return not running
    if run.kind != "gated" and any(other.run.kind == "gated" for other in running):
        return False  # it is to train alone
    busy = [other for other in running if other.run.kind == run.kind]
    if run.kind in ("curve", "check") and any(
        other.run.kind == "single" and not read_log(other.log)["steps"] for other in running
    ):
        return False  # the GPUs are still busy for a while
    return len(busy) < LIMITS[run.kind] and since_last >= STAGGER[run.kind]


def read_log(path: Path) -> dict[str, Any]:
    """What Megatron logged by step: `steps`, `ms`, `loss`, `grad_norm`; if any, the `ring`, the last density and the last
    validation loss.
    """
    found: dict[str, Any] = {"steps": [], "ms": [], **{name: [] for name in VALUES}}
    for line in path.read_text(errors="replace").splitlines():
        match = ITERATION.search(line)
        if match:
            found["steps"].append(int(match[1]))
            found["ms"].append(float(match[2]))
            for name, pattern in VALUES.items():
                value = pattern.search(line)
                found[name].append(float(value[1]) if value else None)
            density = DENSITY.search(line)
            if density:
                found["density"] = float(density[1])
        ring = RING.search(line)
        if ring:
            found["ring"] = ring[1]
        validation = VALIDATION.search(line)
        if validation:
            found["validation_loss"] = float(validation[1])
    return found


def outcome(run: Run, log: Path, status: int, seconds: float) -> dict[str, Any]:
    """One run's result: its command, exit status, seconds, and what it logged."""
    return {
        "name": run.name,
        "kind": run.kind,
        "status": status,
        "seconds": round(seconds, 1),
        "command": list(run.command),
        "variables": run.variables,
        **read_log(log),
    }
