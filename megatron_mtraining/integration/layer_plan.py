"""Which layers attend how, and when: dense layers, dense first steps, top-p by layer and over the steps.

Everything follows from the number of the layer in the whole model (from 0, whatever pipeline stage holds it) and from the
number of steps done, so a resumed run goes on where it stopped, and nothing has to be stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from megatron_mtraining.config import MTrainingConfig

from .errors import RefusedError
from .options import option_name

SHARE_STEP = 0.001
"""A schedule changes top-p by multiples of this, so that it passes through few different configs."""


@dataclass(frozen=True)
class LayerPlan:
    """What differs from the attention's config by layer and by step.

    Attributes:
        dense_layers: layers that are always dense.
        dense_steps: steps from the beginning of training in which every layer is dense.
        layer_top_p: (layer, top-p) of layers with a share of their own.
        top_p_schedule: (first, last, steps): top-p of the other layers goes from one to the other over the first steps of
            training, linearly, and stays there.
    """

    dense_layers: frozenset[int] = frozenset()
    dense_steps: int = 0
    layer_top_p: tuple[tuple[int, float], ...] = ()
    top_p_schedule: tuple[float, float, int] | None = None

    def config_for(self, base: MTrainingConfig, layer: int, step: int) -> MTrainingConfig:
        """The config of a layer in a step; the same object for equal ones.

        Args:
            base: the attention's config.
            layer: from 0.
            step: steps done before.
        """
        if layer in self.dense_layers or step < self.dense_steps:
            return _changed(base, True, None)
        top_p = dict(self.layer_top_p).get(layer)
        if top_p is None and self.top_p_schedule is not None:
            first, last, steps = self.top_p_schedule
            share = first + (last - first) * min(step / steps, 1.0)
            top_p = min(max(round(share / SHARE_STEP) * SHARE_STEP, SHARE_STEP), 1.0)
        return base if top_p is None else _changed(base, base.dense, round(top_p, 6))

    def describe(self) -> str:
        """One phrase for the log; empty for a plan that changes nothing."""
        parts = []
        if self.dense_layers:
            parts.append(f"layers {_ranges(self.dense_layers)} dense")
        if self.dense_steps:
            parts.append(f"all layers dense in the first {self.dense_steps} steps")
        if self.layer_top_p:
            parts.append("top-p " + ", ".join(f"{p} in layer {layer}" for layer, p in self.layer_top_p))
        if self.top_p_schedule:
            first, last, steps = self.top_p_schedule
            parts.append(f"top-p from {first} to {last} over the first {steps} steps")
        return "; ".join(parts)


@lru_cache(maxsize=4096)
def _changed(base: MTrainingConfig, dense: bool, top_p: float | None) -> MTrainingConfig:
    if top_p is None:
        return replace(base, dense=dense)
    return replace(base, dense=dense, top_p=top_p, vertical_top_p=None, slash_top_p=None)


def parse_numbers(option: str, text: str, low: int, high: int | None) -> list[int]:
    """``0-1,27`` -> ``[0, 1, 27]``.

    Raises:
        RefusedError: naming the option, its value and the valid ones.
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first = int(match[1]) if match else -1
        last = int(match[2] or match[1]) if match else -1
        if not match or last < first or first < low or (high is not None and last > high):
            bounds = f"from {low}" + (f" to {high}" if high is not None else " up")
            raise RefusedError(f"{option} {text}: must be numbers and ranges such as 2,5-7, {bounds}")
        numbers += range(first, last + 1)
    return numbers


def _share(option: str, text: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise RefusedError(f"{option} {text}: a top-p must be a number in (0, 1], not {value!r}")
    return share


def _parse_layer_top_p(option: str, text: str, layers: int) -> tuple[tuple[int, float], ...]:
    """``0:0.99,1-3:0.95`` -> ``((0, 0.99), (1, 0.95), (2, 0.95), (3, 0.95))``."""
    shares: dict[int, float] = {}
    for part in text.split(","):
        numbers, colon, value = part.partition(":")
        if not colon:
            raise RefusedError(f"{option} {text}: must be LAYERS:TOP_P pairs such as 0:0.99,1-3:0.95")
        for layer in parse_numbers(option, numbers, 0, layers - 1):
            if layer in shares:
                raise RefusedError(f"{option} {text}: layer {layer} is named twice; name it once")
            shares[layer] = _share(option, text, value)
    return tuple(sorted(shares.items()))


def _parse_schedule(option: str, text: str) -> tuple[float, float, int]:
    """``1:0.95:1000`` -> ``(1.0, 0.95, 1000)``."""
    parts = text.split(":")
    if len(parts) != 3 or not parts[2].isdigit() or int(parts[2]) < 1:
        raise RefusedError(f"{option} {text}: must be FIRST:LAST:STEPS such as 1:0.95:1000, with at least one step")
    return _share(option, text, parts[0]), _share(option, text, parts[1]), int(parts[2])


def plan_from_args(args: Any, config: MTrainingConfig) -> LayerPlan:
    """The plan that the options describe.

    Args:
        args: Megatron's validated argument namespace.
        config: the attention's config.

    Raises:
        RefusedError: for a value that is not valid or options that contradict each other; names them.
    """
    dense_layers, dense_steps = args.mtraining_dense_layers, args.mtraining_dense_steps
    layer_top_p, schedule = args.mtraining_layer_top_p, args.mtraining_top_p_schedule
    names = {name: option_name(name) for name in ("dense_layers", "dense_steps", "layer_top_p", "top_p_schedule")}
    if dense_steps < 0:
        raise RefusedError(f"{names['dense_steps']} {dense_steps}: must be a number of steps, 0 or more")
    layers = args.num_layers + (getattr(args, "mtp_num_layers", None) or 0)
    plan = LayerPlan(
        frozenset(parse_numbers(names["dense_layers"], dense_layers, 0, layers - 1) if dense_layers else ()),
        dense_steps,
        _parse_layer_top_p(names["layer_top_p"], layer_top_p, layers) if layer_top_p else (),
        _parse_schedule(names["top_p_schedule"], schedule) if schedule else None,
    )
    both = sorted(plan.dense_layers & dict(plan.layer_top_p).keys())
    if both:
        raise RefusedError(f"{names['dense_layers']} {dense_layers}: layer {both[0]} also has {names['layer_top_p']}")
    if config.dense and plan != LayerPlan():
        given = next(names[name] for name in names if getattr(args, "mtraining_" + name))
        raise RefusedError(f"{given}: {option_name('dense')} makes every layer and step dense; drop one of them")
    if schedule:
        _check_schedule(names["top_p_schedule"], schedule, plan, config)
    return plan


def _check_schedule(option: str, text: str, plan: LayerPlan, config: MTrainingConfig) -> None:
    """Refuses a share of its own beside a schedule, which would silently win or lose."""
    for name in ("vertical_top_p", "slash_top_p"):
        if getattr(config, name) is not None:
            raise RefusedError(
                f"{option} {text}: {option_name(name)} {getattr(config, name)} would not follow it; drop one"
            )
    assert plan.top_p_schedule is not None
    if config.top_p not in (MTrainingConfig.top_p, plan.top_p_schedule[1]):
        raise RefusedError(
            f"{option} {text}: ends at {plan.top_p_schedule[1]}, {option_name('top_p')} is {config.top_p}; drop one of them"
        )


def _ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 27]`` -> ``0-1,27``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
