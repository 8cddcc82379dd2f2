"""Turning a Bridge ``ConfigContainer`` to MTraining attention."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.integration import RefusedError
from megatron_mtraining.integration.dataset_helpers import accept_compiled_helpers
from megatron_mtraining.integration.layer_plan import LayerPlan
from megatron_mtraining.integration.options import BACKEND, LAYOUT_MODES
from megatron_mtraining.integration.rebind import Rebinding, rebind

from .callback import MTrainingCallback
from .hook import PreWrapHook, Settings, has_hook_field, hooks_of, name_no_backend, through_layer_spec

_installed: list[Rebinding] = []

_builders: list[tuple[weakref.ref[Any], Settings]] = []
"""Configs of model builders that were enabled: Bridge's own overrides empty their lists of hooks."""


def enable(
    cfg: Any,
    config: MTrainingConfig | None = None,
    *,
    layout_mode: str = "auto",
    inner_across_hosts: bool = False,
    plan: LayerPlan | None = None,
    **options: Any,
) -> MTrainingCallback:
    """Turns a ``ConfigContainer`` to MTraining attention. Call it again to change the options.

    Nothing is decided before the model is built, so overrides may follow. Then, on every rank: what is not supported is
    refused by name, the process groups of the rings are made, batch and rotary embedding are dealt in the attention's
    layout (or attention converts), every ``self_attention.core_attention`` is swapped, and the model is refused unless
    all of them were. What Bridge saves of the config does not mention this package.

    Args:
        cfg: the container; its ``model`` is a provider (``GPTModelProvider`` ...) or the config of a model builder.
            ``model.attention_backend="mtraining"`` is accepted (Bridge by itself takes any word, and does nothing).
        config: the attention's config; made from ``options`` if left out.
        layout_mode: ``auto``, ``native`` or ``convert``, as ``--mtraining-layout-mode``.
        inner_across_hosts: whether an inner ring may cross hosts.
        plan: dense layers, top-p by layer, and what changes over the steps; the latter needs the callback.
        options: fields of :class:`MTrainingConfig`.

    Returns:
        A callback for Bridge's training loop that logs density and imbalance; handing it over is not required.

    Raises:
        RefusedError: if ``cfg`` has no model, or for an option or value that is not known.
    """
    settings = Settings(_config(config, options), _mode(layout_mode), inner_across_hosts, plan or LayerPlan())
    if getattr(cfg, "model", None) is None:
        raise RefusedError("cfg.model is None: set it before calling enable")
    accept_compiled_helpers()  # else Bridge exits with a megatron-core from the registry
    name_no_backend(cfg.model)
    hooks = hooks_of(cfg.model)
    hooks[:] = [hook for hook in hooks if not isinstance(hook, PreWrapHook)]
    hooks.insert(0, PreWrapHook(settings, cfg))  # first: what is refused is refused before weights are loaded
    through_layer_spec(cfg.model, settings)
    if has_hook_field(cfg.model):
        _remember(cfg.model, settings)
    return MTrainingCallback()


def is_enabled(cfg: Any) -> bool:
    """Whether :func:`enable` was called on ``cfg`` (or on what it is a copy of)."""
    return any(isinstance(hook, PreWrapHook) for hook in hooks_of(cfg.model))


def describe(cfg: Any) -> str:
    """What :func:`enable` was told for ``cfg`` last, in one line: options that are not the defaults, layout mode and plan."""
    settings = next((hook.settings for hook in hooks_of(cfg.model) if isinstance(hook, PreWrapHook)), None)
    if settings is None:
        return "Bridge's own"
    default = MTrainingConfig()
    values = {name: getattr(settings.config, name) for name in MTrainingConfig.__dataclass_fields__}
    shown = [f"top_p={settings.config.top_p}"]
    shown += [
        f"{name}={value}" for name, value in values.items() if name != "top_p" and value != getattr(default, name)
    ]
    shown.append(f"layout_mode={settings.layout_mode}")
    shown += ["inner_across_hosts=True"] if settings.inner_across_hosts else []
    plan = settings.plan.describe()
    return ", ".join(shown) + (plan and "; " + plan)


def _remember(model_config: Any, settings: Settings) -> None:
    """Keeps the settings of a builder's config, and makes Bridge's training loop look whether its hook is still there."""
    _builders[:] = [(ref, kept) for ref, kept in _builders if ref() is not None and ref() is not model_config]
    _builders.append((weakref.ref(model_config), settings))
    install()


def _config(config: MTrainingConfig | None, options: dict[str, Any]) -> MTrainingConfig:
    if config is not None and options:
        raise RefusedError(f"give either config or options, not both (options given: {', '.join(options)})")
    if config is not None:
        return config
    unknown = sorted(set(options) - set(MTrainingConfig.__dataclass_fields__))
    if unknown:
        raise RefusedError(f"{unknown[0]}: no such option; valid: {', '.join(MTrainingConfig.__dataclass_fields__)}")
    try:
        return MTrainingConfig(**options)
    except ValueError as error:
        raise RefusedError(str(error)) from error


def _mode(layout_mode: str) -> str:
    if layout_mode not in LAYOUT_MODES:
        raise RefusedError(f"layout_mode={layout_mode!r}: must be one of {', '.join(LAYOUT_MODES)}")
    return layout_mode


def install() -> None:
    """Makes ``model.attention_backend="mtraining"`` enough in this process: Bridge's training loop then calls
    :func:`enable` with its defaults. Without it, and without :func:`enable`, Bridge ignores the word. Idempotent.
    """
    if not _installed:
        from megatron.bridge.training import config

        name = config.__name__
        _installed.append(rebind(name, "runtime_config_update", _wrap_update(config.runtime_config_update)))


def uninstall() -> None:
    """Takes out what :func:`install` put in."""
    while _installed:
        _installed.pop().undo()


def _wrap_update(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Bridge's last look at a config before it sets up anything."""

    @functools.wraps(original)
    def runtime_config_update(cfg: Any) -> None:
        if getattr(cfg.model, "attention_backend", None) == BACKEND and not is_enabled(cfg):
            enable(cfg)
        for ref, settings in list(_builders):
            if ref() is cfg.model and not is_enabled(cfg):
                enable(
                    cfg,
                    settings.config,
                    layout_mode=settings.layout_mode,
                    inner_across_hosts=settings.inner_across_hosts,
                    plan=settings.plan,
                )
        for hook in hooks_of(cfg.model):
            if isinstance(hook, PreWrapHook):
                hook.refuse(cfg)
        original(cfg)

    return runtime_config_update
