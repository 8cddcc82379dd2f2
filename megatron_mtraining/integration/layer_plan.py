"""Which layers attend how, and when: dense layers, dense first steps, top-p by layer and over the steps.

Everything follows from the number of the layer in the whole model (from 0, whatever pipeline stage holds it) and from the
number of steps done, so a resumed run goes on where it stopped, and nothing has to be stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from megatron_mtraining.config import MTrainingConfig

from .errors import RefusedError
from .options import option_name

SHARE_STEP = 0.001
"""A schedule changes top-p by multiples of this, so that it passes through few different configs."""


WITHOUT_TOP_P = ("fixed", "moba")
"""Index policies that a top-p says nothing to."""


@dataclass(frozen=True)
class LayerPlan:
    """What differs from the attention's config by layer and by step.

    Attributes:
        dense_layers: layers, from 0, that are always dense.
        dense_steps: steps from the beginning of training in which every layer is dense.
        layer_top_p: (layer, top-p) of layers, from 0, with a share of their own.
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


MOST_NUMBERS = 10_000_000
"""The largest number where nothing else bounds it: a range is written out, so it must end somewhere."""


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
        if not match or last < first or first < low or last > (MOST_NUMBERS if high is None else high):
            bounds = f"from {low}" + (f" up (at most {MOST_NUMBERS})" if high is None else f" to {high}")
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
    if len(parts) != 3 or not parts[2].isdecimal() or int(parts[2]) < 1:
        raise RefusedError(f"{option} {text}: must be FIRST:LAST:STEPS such as 1:0.95:1000, with at least one step")
    return _share(option, text, parts[0]), _share(option, text, parts[1]), int(parts[2])


PLAN_OPTIONS = ("dense_layers", "dense_steps", "layer_top_p", "top_p_schedule")
"""The fields of :class:`LayerPlan`, which are the names of its options, too."""


def parse_plan_option(name: str, option: str, value: Any, layers: int) -> Any:
    """The value of a field of :class:`LayerPlan` that an option stands for.

    Args:
        name: of the field.
        option: the option as the user writes it, for messages.
        value: its text; a number for ``dense_steps``.
        layers: of the whole model, with those of multi-token prediction.

    Raises:
        RefusedError: naming the option, its value and the valid ones.
    """
    if name == "dense_layers":
        return frozenset(parse_numbers(option, value, 0, layers - 1))
    if name == "layer_top_p":
        return _parse_layer_top_p(option, value, layers)
    if name == "top_p_schedule":
        return _parse_schedule(option, value)
    if not str(value).isdecimal():
        raise RefusedError(f"{option} {value}: must be a number of steps, 0 or more")
    return int(value)


def plan_from_args(args: Any, config: MTrainingConfig) -> LayerPlan:
    """The plan that the options describe.

    Args:
        args: Megatron's validated argument namespace.
        config: the attention's config.

    Raises:
        RefusedError: for a value that is not valid or options that contradict each other; names them.
    """
    layers = layers_of(args)
    given = {name: value for name in PLAN_OPTIONS if (value := getattr(args, "mtraining_" + name)) not in (None, 0)}
    plan = LayerPlan(
        **{name: parse_plan_option(name, option_name(name), value, layers) for name, value in given.items()}
    )
    check_plan(plan, config, layers, option_name)
    for name in given.keys() & {"dense_layers", "layer_top_p"}:
        _check_attention(f"{option_name(name)} {given[name]}", {*plan.dense_layers, *dict(plan.layer_top_p)}, args)
    return plan


WITHOUT_ATTENTION = "MG-E"
"""Letters of ``--hybrid-layer-pattern`` whose layers have no softmax attention: state space, gated delta net, MLP, experts."""


def _check_attention(option: str, named: set[int], args: Any) -> None:
    """Refuses layers of a hybrid model none of which has attention: the option would do nothing."""
    letters = (getattr(args, "hybrid_layer_pattern", None) or "").replace("|", "").replace("/", "")
    having = [layer for layer, letter in enumerate(letters) if letter not in WITHOUT_ATTENTION]
    if letters and not named & set(having):
        raise RefusedError(
            f"{option}: none of these layers of --hybrid-layer-pattern {args.hybrid_layer_pattern} has attention; "
            f"{_ranges(having) or 'none'} have"
        )


def layers_of(model: Any) -> int:
    """Layers of the whole model, those of multi-token prediction after the others; of Megatron's arguments or config.

    A hybrid model's depth of multi-token prediction has all layers of its pattern.

    Raises:
        RefusedError: if the number is not known yet.
    """
    if not model.num_layers:
        raise RefusedError("num_layers is not set: a plan by layer or step needs it")
    predicting = "".join((getattr(model, "hybrid_layer_pattern", None) or "").split("/")[1:])
    return int(model.num_layers) + (len(predicting) or getattr(model, "mtp_num_layers", None) or 0)


def check_plan(plan: LayerPlan, config: MTrainingConfig, layers: int, named: Callable[[str], str]) -> None:
    """Refuses a plan that does not fit the model or contradicts the config or itself.

    Args:
        plan: from options or made in code.
        config: the attention's config.
        layers: of the whole model.
        named: the option of a field of the plan or of the config as the user writes it, for messages.

    Raises:
        RefusedError: naming the option, its value and what to do.
    """
    own = dict(plan.layer_top_p)
    for name, numbers in (("dense_layers", plan.dense_layers), ("layer_top_p", own)):
        beyond = [number for number in numbers if not 0 <= number < layers]
        if beyond:
            raise RefusedError(f"{named(name)}: there is no layer {beyond[0]}; valid: 0 to {layers - 1}")
    both = sorted(own.keys() & set(plan.dense_layers))
    if both:
        shown = _ranges(plan.dense_layers)
        raise RefusedError(f"{named('dense_layers')} {shown}: layer {both[0]} also has {named('layer_top_p')}")
    if config.dense and plan != LayerPlan():
        given = next(name for name in PLAN_OPTIONS if getattr(plan, name))
        raise RefusedError(f"{named(given)}: {named('dense')} makes every layer and step dense; drop one of them")
    shares = next((name for name in ("layer_top_p", "top_p_schedule") if getattr(plan, name)), None)
    if shares and config.index_policy in WITHOUT_TOP_P:
        raise RefusedError(
            f"{named(shares)}: {named('index_policy')} {config.index_policy} has no top-p; drop one of them"
        )
    if plan.top_p_schedule is not None:
        _check_schedule(plan.top_p_schedule, config, named)


def _check_schedule(schedule: tuple[float, float, int], config: MTrainingConfig, named: Callable[[str], str]) -> None:
    """Refuses a share of its own beside a schedule, which would silently win or lose."""
    option = f"{named('top_p_schedule')} {':'.join(f'{number:g}' for number in schedule)}"
    for name in ("vertical_top_p", "slash_top_p"):
        if getattr(config, name) is not None:
            raise RefusedError(f"{option}: {named(name)} {getattr(config, name)} would not follow it; drop one")
    if config.top_p not in (MTrainingConfig.top_p, schedule[1]):
        raise RefusedError(f"{option}: ends at {schedule[1]}, {named('top_p')} is {config.top_p}; make them the same")


def _ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 27]`` -> ``0-1,27``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
