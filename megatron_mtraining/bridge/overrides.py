"""Command-line overrides in Bridge's way (``train.train_iters=100 model.seq_length=65536``), and ours beside them."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.integration import RefusedError
from megatron_mtraining.integration.layer_plan import PLAN_OPTIONS, LayerPlan, check_plan, layers_of, parse_plan_option

from .callback import MTrainingCallback
from .enabling import enable
from .hook import PREFIX, PreWrapHook, Settings, hooks_of

OURS = ("layout_mode", "inner_across_hosts")
"""Arguments of :func:`.enable` that are no fields of the attention's config, nor of the plan."""


def apply_overrides(cfg: Any, overrides: Sequence[str]) -> MTrainingCallback:
    """Applies ``key=value`` overrides and enables MTraining attention, keeping what :func:`.enable` was told before.

    ``mtraining.top_p=0.95`` sets an option of the attention (a field of :class:`MTrainingConfig`, ``layout_mode`` or
    ``inner_across_hosts``) or of the plan, written as Megatron's options are (``mtraining.dense_layers=7,18``, layers from
    0; ``dense_steps``, ``layer_top_p``, ``top_p_schedule``); all others go to Bridge, in Hydra's syntax. Setting
    ``model.seq_length`` also sets ``dataset.seq_length`` unless that is given, because Bridge demands that they agree.

    Args:
        cfg: Bridge's ``ConfigContainer``; changed in place.
        overrides: the words of the command line.

    Returns:
        The callback of :func:`.enable`.

    Raises:
        RefusedError: for an ``mtraining.`` option that does not exist or a value that it does not take.
        OverridesError: Bridge's, for the others.
    """
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    ours = [word for word in overrides if word.startswith(PREFIX)]
    theirs = [word for word in overrides if not word.startswith(PREFIX)]
    before = next((hook.settings for hook in hooks_of(cfg.model) if isinstance(hook, PreWrapHook)), None)
    others = [hook for hook in hooks_of(cfg.model) if not isinstance(hook, PreWrapHook)]
    if theirs:
        process_config_with_overrides(cfg, cli_overrides=_with_sequence_length(theirs))
        hooks_of(cfg.model)[:] = others  # Bridge rebuilds a builder config's list without the functions in it
    settings = _changed(before or Settings(MTrainingConfig()), ours, cfg.model)
    return enable(
        cfg,
        settings.config,
        layout_mode=settings.layout_mode,
        inner_across_hosts=settings.inner_across_hosts,
        plan=settings.plan,
    )


def _with_sequence_length(words: list[str]) -> list[str]:
    given = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    if "model.seq_length" in given and "dataset.seq_length" not in given:
        return [*words, f"dataset.seq_length={given['model.seq_length']}"]
    return words


def _changed(settings: Settings, words: list[str], model_config: Any) -> Settings:
    hints = typing.get_type_hints(MTrainingConfig) | {"layout_mode": str, "inner_across_hosts": bool}
    values: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.removeprefix(PREFIX).partition("=")
        if name not in hints and name not in PLAN_OPTIONS:
            raise RefusedError(f"{PREFIX}{name}: no such option; valid: {', '.join(sorted({*hints, *PLAN_OPTIONS}))}")
        if not equals:
            raise RefusedError(f"{word}: write {word}=VALUE")
        if name in PLAN_OPTIONS:
            plan[name] = _parse_plan(name, text, model_config)
        else:
            values[name] = _parse(name, text, hints[name])
    mine = {name: values.pop(name) for name in OURS if name in values}
    try:
        config = dataclasses.replace(settings.config, **values)
    except ValueError as error:
        raise RefusedError(PREFIX + str(error)) from error
    changed = dataclasses.replace(settings, config=config, plan=dataclasses.replace(settings.plan, **plan), **mine)
    if plan:
        check_plan(changed.plan, config, layers_of(model_config), PREFIX.__add__)
    return changed


def _parse_plan(name: str, text: str, model_config: Any) -> Any:
    """A field of the plan; ``none`` takes back what was set before."""
    if text.lower() in ("none", "null"):
        return getattr(LayerPlan(), name)
    return parse_plan_option(name, PREFIX + name, text, layers_of(model_config))


def _parse(name: str, text: str, hint: Any) -> Any:
    """The value that a word stands for, by the type of its field."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    kind = next(kind for kind in kinds if kind is not type(None))
    if kind is bool:
        words = {"true": True, "false": False}
        if text.lower() not in words:
            raise RefusedError(f"{PREFIX}{name}={text}: must be true or false")
        return words[text.lower()]
    try:
        return kind(text)
    except (TypeError, ValueError) as error:
        raise RefusedError(f"{PREFIX}{name}={text}: must be {kind.__name__}") from error
