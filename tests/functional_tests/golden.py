"""Golden values in the format of Megatron-LM's functional tests: read from TensorBoard, written, compared.

The rules are those of Megatron's own comparison: the loss and the number of zero gradients must be equal, or, where the
case allows algorithms that are not deterministic, within 5 % and 20 % but for one step in a hundred (at least one);
memory and the median time of the steady steps are within 5 % where the case asks for them.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIGITS = 5  # Megatron rounds what it reads from TensorBoard
DEFAULT_METRICS = ("lm loss", "num-zeros")
RECORDED = (*DEFAULT_METRICS, "iteration-time", "mem-allocated-bytes", "mem-max-allocated-bytes")
FREE_FAILURES = 100  # one step in so many may miss an approximate bound


@dataclass(frozen=True)
class Rule:
    """How one metric is compared: exactly where that is asked for and possible, else within a relative bound."""

    exact: bool
    bound: float


RULES = {
    "lm loss": Rule(True, 0.05),
    "num-zeros": Rule(True, 0.20),
    "iteration-time": Rule(False, 0.05),
    "mem-allocated-bytes": Rule(False, 0.05),
    "mem-max-allocated-bytes": Rule(False, 0.05),
}

Values = dict[int, float]


class UnreadableError(ValueError):
    """A file that does not hold golden values."""


def read_tensorboard(folder: Path, steps: int) -> dict[str, Values]:
    """The recorded metrics of the steps 1 ... ``steps`` from the first event file with scalars in ``folder``.

    Raises:
        FileNotFoundError: if there is none.
    """
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    for path in sorted(folder.rglob("events*tfevents*"), key=lambda path: path.stat().st_mtime):
        events = EventAccumulator(str(path), size_guidance={SCALARS: 0})
        events.Reload()
        names = set(events.Tags()["scalars"])
        if names:
            return {
                name: {
                    event.step: round(event.value, DIGITS) for event in events.Scalars(name) if 1 <= event.step <= steps
                }
                for name in RECORDED
                if name in names
            }
    raise FileNotFoundError(f"{folder}: no TensorBoard file with scalars")


def write(metrics: dict[str, Values], path: Path) -> None:
    """Writes golden values, steps of 1."""
    document: dict[str, Any] = {}
    for name, values in metrics.items():
        steps = sorted(values)
        document[name] = {
            "start_step": steps[0],
            "end_step": steps[-1],
            "step_interval": 1,
            "values": {str(step): values[step] for step in steps},
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=4, allow_nan=False))


def read(path: Path) -> dict[str, Values]:
    """The metrics of a file of golden values.

    Raises:
        UnreadableError: if it is not one.
    """
    try:
        document = json.loads(path.read_text())
        return {
            name: {int(step): float(value) for step, value in metric["values"].items()}
            for name, metric in document.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f"{path}: not a file of golden values ({type(error).__name__}: {error})") from error


def incomplete(metrics: dict[str, Values], names: tuple[str, ...], steps: int) -> str | None:
    """What is missing for golden values of ``names`` in the steps 1 ... ``steps``, in a phrase; None if nothing is."""
    for name in names:
        values = metrics.get(name, {})
        lacking = [step for step in range(1, steps + 1) if not math.isfinite(values.get(step, math.nan))]
        if lacking:
            return f"{name} has no finite value in {len(lacking)} of {steps} steps, first step {lacking[0]}"
    return None


def cut_off(golden: dict[str, Values], names: tuple[str, ...], steps: int) -> str | None:
    """Which golden values would let a run pass that was never looked at to its end, in a phrase; None if none would.

    Megatron's own recordings may hold every fifth step only.
    """
    for name in names:
        last = max((step for step, value in golden.get(name, {}).items() if math.isfinite(value)), default=0)
        if last < steps:
            return f"{name} ends at step {last} of {steps}" if last else f"no {name} in it"
    return None


def compare(
    golden: dict[str, Values], actual: dict[str, Values], metrics: tuple[str, ...], approximate: bool
) -> list[str]:
    """One line per metric that fails; empty if all are met.

    Args:
        golden: what was recorded.
        actual: what the run gave.
        metrics: the names to compare.
        approximate: the case allows algorithms that are not deterministic.
    """
    failures = []
    for name in metrics:
        missing = [side for side, values in (("golden values", golden), ("the run", actual)) if not values.get(name)]
        if missing:
            failures.append(f"{name}: not in {' and '.join(missing)}")
            continue
        line = _compare_metric(name, golden[name], actual[name], approximate)
        if line:
            failures.append(line)
    return failures


def _compare_metric(name: str, golden: Values, actual: Values, approximate: bool) -> str | None:
    rule = RULES[name]
    if name == "iteration-time":
        steady = steady_steps(golden)
        golden = {0: statistics.median(golden[step] for step in steady)}
        actual = {0: statistics.median(actual.get(step, math.inf) for step in steady)}
    exact = rule.exact and not approximate
    bound = 0.0 if exact else rule.bound
    wrong = [
        step for step, value in golden.items() if not abs(actual.get(step, math.inf) - value) <= bound * abs(value)
    ]
    free = 0 if exact or len(golden) == 1 else max(len(golden) // FREE_FAILURES, 1)
    if len(wrong) <= free:
        return None
    step = wrong[0]
    return (
        f"{name}: {len(wrong)} of {len(golden)} steps differ{'' if exact else f' by more than {bound:.0%}'}, first "
        f"step {step}: {actual.get(step, math.nan)} against {golden[step]}"
    )


def steady_steps(values: Values) -> list[int]:
    """The steps whose time counts: without the warm-up."""
    steps = sorted(step for step, value in values.items() if math.isfinite(value))
    window = range(5, 21) if steps[-1] <= 25 else range(30, 46)
    return [step for step in steps if step in window] or [step for step in steps if step >= window.start][:4]
