"""The ``--mtraining-*`` options, made from the fields of :class:`MTrainingConfig`: one truth for both."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Any

from megatron_mtraining.config import MTrainingConfig

from .errors import RefusedError

BACKEND = "mtraining"
"""The value of ``--attention-backend`` that selects the plugin."""

PREFIX = "mtraining_"

LAYOUT_MODES = ("auto", "native", "convert")


def option_name(field_name: str) -> str:
    """``top_p`` -> ``--mtraining-top-p``."""
    return "--" + (PREFIX + field_name).replace("_", "-")


def add_mtraining_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one option per config field, and those of a run, as an argument group."""
    group = parser.add_argument_group(
        "mtraining", f"Distributed dynamic sparse attention; used with --attention-backend {BACKEND}."
    )
    hints = typing.get_type_hints(MTrainingConfig)
    for item in fields(MTrainingConfig):
        group.add_argument(option_name(item.name), **_argument(item, hints[item.name]))
    for name, settings in RUN_OPTIONS.items():
        group.add_argument(option_name(name), **settings)


RUN_OPTIONS: dict[str, dict[str, Any]] = {
    "layout_mode": {
        "choices": LAYOUT_MODES,
        "default": "auto",
        "help": "native: batch and rotary embedding are dealt in the attention's layout; convert: they stay in Megatron's "
        "and every attention call converts; auto: native unless another user of Megatron's layout is present",
    },
    "metrics": {
        "metavar": "FILE",
        "default": None,
        "help": "append a line of JSON per logging interval to FILE: loss, tokens/s, density, imbalance, index time "
        "(default: no metrics)",
    },
    "inner_across_hosts": {
        "action": argparse.BooleanOptionalAction,
        "default": False,
        "help": "allow an inner ring whose ranks lie on several hosts",
    },
    "log": {
        "choices": ("all", "no-recall", "none"),
        "default": "all",
        "help": "metrics in Megatron's log line, TensorBoard and W&B: all, all but the recall of the probe, or none "
        "(default: all)",
    },
    "profile_steps": {
        "metavar": "ITERATIONS",
        "default": None,
        "help": "iterations whose ring passes are timed, such as 3,10; written to ring.jsonl beside the file of "
        "--mtraining-metrics (default: none)",
    },
    "dense_layers": {
        "metavar": "LAYERS",
        "default": None,
        "help": "layers that are dense, as numbers and ranges such as 0-1,27, from 0 (default: none)",
    },
    "dense_steps": {
        "metavar": "STEPS",
        "type": int,
        "default": 0,
        "help": "steps from the beginning of training in which all layers are dense (default: 0)",
    },
    "layer_top_p": {
        "metavar": "LAYERS:TOP_P,...",
        "default": None,
        "help": "top-p of some layers, such as 0:0.99,1-3:0.95 (default: that of all)",
    },
    "top_p_schedule": {
        "metavar": "FIRST:LAST:STEPS",
        "default": None,
        "help": "top-p goes from FIRST to LAST over the first STEPS steps of training and stays there (default: constant)",
    },
    "guard_recall": {
        "metavar": "SHARE",
        "type": float,
        "default": None,
        "help": "a layer goes dense for a call if its index keeps less than this share of the probe's attention "
        "(default: not watched)",
    },
    "guard_density": {
        "metavar": "DENSITY",
        "type": float,
        "default": None,
        "help": "a layer goes dense for a call if its density is above this; dense is 1 (default: not watched)",
    },
    "guard_action": {
        "choices": ("dense", "stop"),
        "default": "dense",
        "help": "stop: end the run after a step in which the guard made a layer dense (default: dense)",
    },
    "guard_scope": {
        "choices": ("layer", "head"),
        "default": "layer",
        "help": "what goes dense: the layer, or every head for itself by its own recall (default: layer)",
    },
    "guard_segments": {
        "metavar": "PARTS",
        "type": int,
        "default": 1,
        "help": "judge recall by the rows at the ends of so many parts of each document, also those that did not choose the "
        "index: 1 to 64 (default: 1, the document's end alone)",
    },
    "dump_index": {
        "metavar": "DIR",
        "default": None,
        "help": "write indices to files in DIR; read them with python -m megatron_mtraining.index_dump (default: none)",
    },
    "dump_steps": {
        "metavar": "ITERATIONS",
        "default": "1",
        "help": "iterations whose indices are written, from 1 as in Megatron's log (default: 1)",
    },
    "dump_layers": {
        "metavar": "LAYERS",
        "default": None,
        "help": "layers whose indices are written, from 0 (default: all)",
    },
}
"""Options of a run rather than of attention, with the keywords of ``add_argument``."""


def _argument(item: Field[Any], hint: Any) -> dict[str, Any]:
    """The keywords of ``add_argument`` for one config field."""
    if item.default is MISSING:
        raise TypeError(f"MTrainingConfig.{item.name} has no default, so no option can be made of it")
    help_text = str(item.metadata["help"]).replace("%", "%%")
    common: dict[str, Any] = {
        "dest": PREFIX + item.name,
        "default": item.default,
        "help": f"{help_text} (default: {item.default})",
    }
    if hint is bool:
        return common | {"action": argparse.BooleanOptionalAction}
    if item.metadata.get("choices"):
        return common | {"choices": item.metadata["choices"]}
    if isinstance(hint, types.UnionType):
        inner = next(kind for kind in typing.get_args(hint) if kind is not type(None))
        return common | {"type": _or_none(inner), "metavar": f"{inner.__name__}|none"}
    return common | {"type": hint, "metavar": hint.__name__}


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of ``kind`` that also takes the word ``none``."""

    def parse(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    parse.__name__ = f"{kind.__name__} or none"
    return parse


def config_from_args(args: argparse.Namespace) -> MTrainingConfig:
    """The config that the parsed options describe.

    Raises:
        RefusedError: for a value outside its range; names the option, the value and the valid ones.
    """
    values = {item.name: getattr(args, PREFIX + item.name) for item in fields(MTrainingConfig)}
    try:
        return MTrainingConfig(**values)
    except ValueError as error:
        raise RefusedError(_name_option(str(error))) from error


def _name_option(message: str) -> str:
    """``top_p=2: must ...`` -> ``--mtraining-top-p=2: must ...``."""
    name, equals, rest = message.partition("=")
    return f"{option_name(name)}={rest}" if equals else message


LINE_POLICIES = ("top_p", "fixed")
"""Index policies that keep lines, the same for all rows; the others choose row by row."""


def require_lines(option: str, config: MTrainingConfig) -> None:
    """Refuses an option that is about lines beside a policy that keeps none.

    Raises:
        RefusedError: naming both.
    """
    if config.index_policy not in LINE_POLICIES:
        raise RefusedError(
            f"{option}: {option_name('index_policy')} {config.index_policy} chooses row by row; it works with "
            f"{' and '.join(LINE_POLICIES)}"
        )


def changed_options(args: argparse.Namespace) -> list[str]:
    """The ``--mtraining-*`` options whose value is not the default."""
    defaults = {item.name: item.default for item in fields(MTrainingConfig)}
    defaults |= {name: settings["default"] for name, settings in RUN_OPTIONS.items()}
    return [option_name(name) for name, default in defaults.items() if getattr(args, PREFIX + name) != default]
