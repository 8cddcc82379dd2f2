"""The places where the plugin reaches into Megatron, all of them.

:func:`install` wraps the argument parser only. The rest is put in place by :func:`activate`, when the arguments say
``--attention-backend mtraining``; without it Megatron runs as if the plugin were not there.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from typing import Any

from megatron_mtraining.config import MTrainingConfig

from . import runtime
from .errors import RefusedError
from .layout_mode import check_sequence_length, choose_layout_mode
from .options import BACKEND, add_mtraining_arguments, changed_options, config_from_args
from .rebind import rebind, replace_method
from .refusals import refuse, refuse_environment
from .runtime import Runtime
from .versions import check_megatron_version

_parser_hooks: list[Callable[[], None]] = []
_active_hooks: list[Callable[[], None]] = []
_parsed_config: MTrainingConfig | None = None


def install() -> None:
    """Teaches Megatron's argument parser the plugin's backend and options. Calling it again does nothing.

    Raises:
        RefusedError: if megatron-core is missing or too old.
    """
    if _parser_hooks:
        return
    check_megatron_version()
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training import arguments

    name = arguments.__name__
    _parser_hooks.extend(
        [
            rebind(name, "add_megatron_arguments", _wrap_add_arguments(arguments.add_megatron_arguments)).undo,
            rebind(name, "validate_args", _wrap_validate(arguments.validate_args)).undo,
            replace_method(TransformerConfig, "__post_init__", _wrap_post_init),
        ]
    )


def uninstall() -> None:
    """Takes every hook out again and ends the use of the plugin in this process."""
    tear_down()
    while _parser_hooks:
        _parser_hooks.pop()()


def _wrap_add_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        add_mtraining_arguments(parser)
        _add_backend_choice(parser)
        _accept_after_parsing(parser)
        return parser

    return add_megatron_arguments


def _add_backend_choice(parser: argparse.ArgumentParser) -> None:
    """Makes ``--attention-backend`` take one word more. Megatron's enum stays: checkpoints hold its members."""
    from megatron.core.transformer.enums import AttnBackend

    action = next(action for action in parser._actions if action.dest == "attention_backend")
    names = [*AttnBackend.__members__, BACKEND]

    def parse(text: str) -> Any:
        if text not in names:
            raise argparse.ArgumentTypeError(f"invalid choice: '{text}' (choose from {', '.join(names)})")
        return BACKEND if text == BACKEND else AttnBackend[text]

    action.type = parse
    action.choices = None
    action.metavar = "{" + ",".join(names) + "}"


def _accept_after_parsing(parser: argparse.ArgumentParser) -> None:
    """Looks at the arguments the moment they are parsed, before Megatron does anything with them."""
    original = parser.parse_known_args

    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        namespace, rest = original(*args, **kwargs)
        _note_options(namespace)
        accept(namespace)
        return namespace, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def _note_options(args: argparse.Namespace) -> None:
    """Keeps the attention's options for a backend that is chosen only later, in a ``TransformerConfig``."""
    global _parsed_config
    _parsed_config = config_from_args(args)


def accept(args: argparse.Namespace) -> None:
    """Takes note of a request for the plugin and rewrites it to ``auto``, which every Megatron and checkpoint knows.

    Raises:
        RefusedError: for anything in the arguments or the environment that is not supported.
    """
    from megatron.core.transformer.enums import AttnBackend

    if args.attention_backend != BACKEND:
        tear_down()
        unused = changed_options(args)
        if unused:
            _report(args, f"{', '.join(unused)} has no effect without --attention-backend {BACKEND}")
        return
    refuse_environment()
    refuse(args)
    config = config_from_args(args)
    if getattr(args, "deterministic_mode", False) and not config.deterministic:
        raise RefusedError("--no-mtraining-deterministic: conflicts with --deterministic-mode; drop one of them")
    args.attention_backend = AttnBackend.auto
    if args.create_attention_mask_in_dataloader:
        args.create_attention_mask_in_dataloader = False
        _report(args, "set --no-create-attention-mask-in-dataloader: a mask of seq_length^2 entries is not needed")
    runtime.use(Runtime(config, inner_across_hosts=args.mtraining_inner_across_hosts))


def _wrap_validate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, *rest: Any, **kwargs: Any) -> Any:
        if args.attention_backend == BACKEND:  # set after parsing
            accept(args)
        validated = original(args, *rest, **kwargs)
        if runtime.is_set_up():
            activate(args if validated is None else validated)
        return validated

    return validate_args


def _wrap_post_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """A config made in Python may name the plugin as well; Megatron itself would ignore the unknown word."""

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        from megatron.core.transformer.enums import AttnBackend

        named = self.attention_backend == BACKEND
        if named:
            self.attention_backend = AttnBackend.auto
        original(self)
        if named and not runtime.is_set_up():
            set_up(_parsed_config or MTrainingConfig(), self)

    return __post_init__


def activate(args: argparse.Namespace) -> None:
    """Puts every hook of a run with MTraining attention in place, after Megatron has validated the arguments.

    Raises:
        RefusedError: for what only shows after validation; names the option, its value and the valid ones.
    """
    state = runtime.current()
    refuse(args)
    state.layout_mode = choose_layout_mode(args.mtraining_layout_mode, args, state.config)
    check_sequence_length(args.seq_length, args, state.config, state.layout_mode)
    put_in_place()
    _report(args, f"layout {state.config.layout}, {state.layout_mode.mode}: {state.layout_mode.reason}")


def set_up(config: MTrainingConfig, model: Any, layout_mode: str = "auto", inner_across_hosts: bool = False) -> Runtime:
    """Puts the plugin to use in a script of one's own, without command-line options. Every rank must call it.

    Call it before the models are built; before or after Megatron's process groups are made.

    Args:
        config: the attention's config.
        model: the ``TransformerConfig`` (or an argument namespace), checked for what is not supported and for other
            users of Megatron's zigzag layout.
        layout_mode: ``auto``, ``native`` or ``convert``.
        inner_across_hosts: whether an inner ring may cross hosts.

    Returns:
        The runtime now in use; :func:`tear_down` ends it.

    Raises:
        RefusedError: for what is not supported.
    """
    check_megatron_version()
    refuse_environment()
    refuse(model)
    runtime.use(Runtime(config, choose_layout_mode(layout_mode, model, config), inner_across_hosts))
    put_in_place()
    return runtime.current()


def tear_down() -> None:
    """Ends the use of the plugin: takes its hooks out, except those of the parser."""
    deactivate()
    runtime.use(None)


def put_in_place() -> None:
    """Hooks up the models, the process groups and, in native mode, the dealing of batch and rotary embedding."""
    from . import model_hooks, sharding

    deactivate()
    if runtime.current().deals_natively:
        _active_hooks.extend(binding.undo for binding in sharding.deal_natively())
        _active_hooks.append(sharding.drop_cached_rotary)
    _active_hooks.extend(model_hooks.hook_models())
    _active_hooks.extend(model_hooks.hook_process_groups())


def deactivate() -> None:
    """Takes out what :func:`put_in_place` put there."""
    while _active_hooks:
        _active_hooks.pop()()


def _report(args: argparse.Namespace, line: str) -> None:
    """One line of log, on rank 0."""
    if int(getattr(args, "rank", os.environ.get("RANK", 0))) == 0:
        print(f"> megatron_mtraining: {line}", flush=True)
