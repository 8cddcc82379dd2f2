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
    """Adds one option per config field, and those of the integration itself, as an argument group."""
    group = parser.add_argument_group(
        "mtraining", f"Distributed dynamic sparse attention; used with --attention-backend {BACKEND}."
    )
    hints = typing.get_type_hints(MTrainingConfig)
    for item in fields(MTrainingConfig):
        group.add_argument(option_name(item.name), **_argument(item, hints[item.name]))
    group.add_argument(
        option_name("layout_mode"),
        choices=LAYOUT_MODES,
        default="auto",
        help="native: batch and rotary embedding are dealt in the attention's layout; convert: they stay in Megatron's "
        "and every attention call converts; auto: native unless another user of Megatron's layout is present",
    )
    group.add_argument(
        option_name("metrics"),
        metavar="FILE",
        default=None,
        help="append a line of JSON per logging interval to FILE: loss, tokens/s, density, imbalance, index time "
        "(default: no metrics)",
    )
    group.add_argument(
        option_name("inner_across_hosts"),
        action=argparse.BooleanOptionalAction,
        default=False,
        help="allow an inner ring whose ranks lie on several hosts",
    )


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


def changed_options(args: argparse.Namespace) -> list[str]:
    """The ``--mtraining-*`` options whose value is not the default."""
    return [
        option_name(item.name) for item in fields(MTrainingConfig) if getattr(args, PREFIX + item.name) != item.default
    ]
