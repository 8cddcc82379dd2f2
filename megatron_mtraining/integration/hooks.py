"""The places where the plugin reaches into Megatron, all of them.

:func:`install` wraps the argument parser only. The rest is put in place by :func:`activate`, when the arguments say
``--attention-backend mtraining``; without it Megatron runs as if the plugin were not there.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_mtraining.config import MTrainingConfig

from . import runtime
from .errors import RefusedError
from .layer_plan import plan_from_args
from .layout_mode import check_sequence_length, choose_layout_mode
from .options import BACKEND, add_mtraining_arguments, changed_options, config_from_args
from .rebind import rebind, replace_method
from .refusals import refuse, refuse_environment, without_effect
from .runtime import Runtime
from .versions import check_megatron_version, check_training_package


@dataclass(frozen=True)
class Parsed:
    """What the command line says of the plugin. Megatron may parse it several times; the newest counts.

    Attributes:
        requested: whether ``--attention-backend mtraining`` is there.
        config: the attention's config.
        drops_mask: whether the data loader would have made an attention mask.
    """

    requested: bool
    config: MTrainingConfig
    drops_mask: bool = False


_parser_hooks: list[Callable[[], None]] = []
_active_hooks: list[Callable[[], None]] = []
_parsed: Parsed | None = None
_validating = False


def install() -> None:
    """Teaches Megatron's argument parser the plugin's backend and options. Calling it again does nothing.

    Raises:
        RefusedError: if megatron-core or its training package is missing, or too old.
    """
    check_megatron_version()
    check_training_package()
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training import arguments

    if _parser_hooks:  # looked at last: loading Megatron may install the hooks (megatron_mtraining.startup_hook)
        return
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
    global _parsed
    _parsed = None
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
        accept(namespace)
        return namespace, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def accept(args: argparse.Namespace) -> None:
    """Takes note of a request for the plugin and rewrites it to ``auto``, which every Megatron and checkpoint knows.

    Raises:
        RefusedError: for anything in the arguments or the environment that is not supported.
    """
    from megatron.core.transformer.enums import AttnBackend

    global _parsed
    config = config_from_args(args)
    if args.attention_backend != BACKEND:
        _parsed = Parsed(False, config)
        return
    refuse_environment()
    refuse(args)
    if getattr(args, "deterministic_mode", False) and not config.deterministic:
        raise RefusedError("--no-mtraining-deterministic: conflicts with --deterministic-mode; drop one of them")
    _parsed = Parsed(True, config, args.create_attention_mask_in_dataloader)
    args.attention_backend = AttnBackend.auto
    args.create_attention_mask_in_dataloader = False


def _wrap_validate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, *rest: Any, **kwargs: Any) -> Any:
        if args.attention_backend == BACKEND:  # set after parsing
            accept(args)
        global _validating
        _validating = True
        try:
            validated = original(args, *rest, **kwargs)
        finally:
            _validating = False
        args = args if validated is None else validated
        if _parsed is not None and _parsed.requested:
            activate(args, _parsed)
        else:
            tear_down()
            unused = changed_options(args)
            if unused:
                _report(args, f"{', '.join(unused)} has no effect without --attention-backend {BACKEND}")
        return validated

    return validate_args


def _wrap_post_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """A config made in Python may name the plugin as well (Megatron itself would ignore the unknown word), and one that
    is made from arguments which were parsed but never validated must not be without it.
    """

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        from megatron.core.transformer.enums import AttnBackend

        named = self.attention_backend == BACKEND
        if named:
            self.attention_backend = AttnBackend.auto
        original(self)
        requested = named or (_parsed is not None and _parsed.requested)
        if requested and not _validating and not runtime.is_set_up():
            set_up(MTrainingConfig() if _parsed is None else _parsed.config, self)

    return __post_init__


def activate(args: argparse.Namespace, parsed: Parsed) -> None:
    """Puts every hook of a run with MTraining attention in place, after Megatron has validated the arguments.

    Raises:
        RefusedError: for what only shows after validation; names the option, its value and the valid ones.
    """
    refuse(args)
    from . import dumping, guard, training_log

    mode = choose_layout_mode(args.mtraining_layout_mode, args, parsed.config)
    check_sequence_length(args.seq_length, args, parsed.config, mode)
    state = Runtime(
        parsed.config,
        mode,
        args.mtraining_inner_across_hosts,
        plan=plan_from_args(args, parsed.config),
        steps_done=steps_done,
        guard=guard.guard_from_args(args, parsed.config),
        dump=dumping.dump_from_args(args, parsed.config),
    )
    log = training_log.log_from_args(args)
    runtime.use(state)
    put_in_place(args.context_parallel_size)
    if state.guard is not None:
        _active_hooks.append(guard.install(state.guard))
    if log is not None:
        _active_hooks.append(training_log.install(log))
    _report(args, f"layout {parsed.config.layout}, {mode.mode}: {mode.reason}")
    if state.plan.describe():
        _report(args, state.plan.describe())
    unused = without_effect(args)
    if unused:
        _report(args, f"{', '.join(unused)} has no effect with --attention-backend {BACKEND}")
    if parsed.drops_mask:
        _report(args, "the data loader makes no attention mask (--no-create-attention-mask-in-dataloader)")


def steps_done() -> int:
    """Training steps that Megatron's loop has done: also right after a resume, and in the evaluation that follows a step."""
    from megatron.training import get_args

    args = get_args()
    return int(getattr(args, "curr_iteration", getattr(args, "iteration", 0)))


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
        The runtime now in use; :func:`tear_down` ends it. Its ``plan``, ``guard``, ``dump`` and ``steps_done`` may be set.

    Raises:
        RefusedError: for what is not supported.
    """
    check_megatron_version()
    refuse_environment()
    refuse(model)
    runtime.use(Runtime(config, choose_layout_mode(layout_mode, model, config), inner_across_hosts))
    put_in_place(model.context_parallel_size)
    return runtime.current()


def tear_down() -> None:
    """Ends the use of the plugin: takes its hooks out, except those of the parser, and destroys the ring groups."""
    from .groups import destroy_ring_groups

    deactivate()
    destroy_ring_groups()
    runtime.use(None)


def put_in_place(cp_size: int) -> None:
    """Hooks up the models, the process groups, packed data and, in native mode, the dealing of batch and rotary embedding."""
    from . import model_hooks, sft_padding, sharding

    deactivate()
    _active_hooks.extend(sft_padding.pad_documents(cp_size))
    if runtime.current().layout_mode.replaces_slicing:
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
