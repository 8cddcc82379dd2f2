"""Native or converted: whether Megatron deals the sequence in the attention's layout or in its own.

Megatron deals the sequence in zigzag. *Native*: the batch and the rotary embedding are dealt in the attention's layout
instead, which costs nothing. *Convert*: they stay in zigzag, because something else in the model relies on it, and
every attention call converts (one all-to-all for q, k and v together, one for the output).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.layout import Layout

from .errors import RefusedError
from .options import option_name

NATIVE = "native"
CONVERT = "convert"

GATED_DELTA_NETS = ("gated_delta_net", "gdn", "gdn2")
"""Values of ``--experimental-attention-variant`` that make some layers a gated delta net; since 0.20 the first is the
second's old name."""

OPTION_OF = {
    "seq_len": "--seq-length",
    "cp_size": "--context-parallel-size",
    "stripe_rotation": option_name("stripe_rotation"),
}
"""The options behind the names in a layout's messages."""

STATE_SPACE_SYMBOLS = "MG"
"""Letters of ``--hybrid-layer-pattern`` whose layers (Mamba, gated delta net) redo Megatron's zigzag themselves."""


@dataclass(frozen=True)
class ZigzagUser:
    """Something in Megatron, besides attention, that relies on the zigzag layout.

    Attributes:
        what: how it is named in messages.
        present: says from the argument namespace whether it is there.
    """

    what: str
    present: Callable[[Any], bool]


def _get(args: Any, name: str) -> Any:
    return getattr(args, name, None)


def _has_state_space_layers(args: Any) -> bool:
    if _get(args, "is_hybrid_model"):  # a TransformerConfig, which does not hold the pattern
        return True
    pattern = _get(args, "hybrid_layer_pattern") or _get(args, "hybrid_override_pattern") or ""
    return any(symbol in pattern for symbol in STATE_SPACE_SYMBOLS)


def _is_vision_script(_: Any) -> bool:
    main = sys.modules.get("__main__")
    return any(name in vars(main) for name in ("LLaVAModel", "MimoModel")) if main is not None else False


ZIGZAG_USERS: tuple[ZigzagUser, ...] = (
    ZigzagUser("--mtp-num-layers (its roll)", lambda args: bool(_get(args, "mtp_num_layers"))),
    ZigzagUser("state-space layers in --hybrid-layer-pattern", _has_state_space_layers),
    ZigzagUser(
        "the gated delta net of --experimental-attention-variant",
        lambda args: _get(args, "experimental_attention_variant") in GATED_DELTA_NETS,
    ),
    ZigzagUser("--position-embedding-type mrope", lambda args: _get(args, "position_embedding_type") == "mrope"),
    ZigzagUser(
        "the fused rotary embedding of multi-latent attention",
        lambda args: bool(_get(args, "multi_latent_attention") and _get(args, "apply_rope_fusion")),
    ),
    ZigzagUser(
        "--logits-load-dir (a teacher's logits, token by token)", lambda args: bool(_get(args, "logits_load_dir"))
    ),
    ZigzagUser("--logits-save-dir (logits for any student)", lambda args: bool(_get(args, "logits_save_dir"))),
    ZigzagUser("a vision-language model", _is_vision_script),
)


@dataclass(frozen=True)
class LayoutMode:
    """The choice made, and why.

    Attributes:
        mode: ``native`` or ``convert``.
        reason: one phrase for the log.
        replaces_slicing: whether the plugin deals batch and rotary embedding in Megatron's place.
    """

    mode: str
    reason: str
    replaces_slicing: bool = False


def choose_layout_mode(requested: str, args: Any, config: MTrainingConfig) -> LayoutMode:
    """Chooses between native and converted layouts.

    Args:
        requested: ``auto``, ``native`` or ``convert``.
        args: Megatron's argument namespace.
        config: the attention's config.

    Raises:
        RefusedError: if ``native`` is asked for beside another user of the zigzag layout.
    """
    users = [user.what for user in ZIGZAG_USERS if user.present(args)]
    if args.context_parallel_size == 1:
        return LayoutMode(NATIVE, "one context-parallel rank holds the whole sequence")
    if config.layout == "zigzag":
        return LayoutMode(NATIVE, f"{option_name('layout')} zigzag is Megatron's own layout")
    if requested == CONVERT:
        return LayoutMode(CONVERT, "asked for")
    if not users:
        reason = "asked for" if requested == NATIVE else "nothing else relies on Megatron's zigzag layout"
        return LayoutMode(NATIVE, reason, replaces_slicing=True)
    if requested == NATIVE:
        raise RefusedError(
            f"{option_name('layout_mode')} native: {users[0]} relies on Megatron's zigzag layout; use auto or convert"
        )
    return LayoutMode(CONVERT, f"{' and '.join(users)} relies on Megatron's zigzag layout")


def check_sequence_length(seq_len: int, args: Any, config: MTrainingConfig, mode: LayoutMode) -> None:
    """Refuses a sequence length that the layouts in use cannot deal.

    Raises:
        RefusedError: naming ``--seq-length``, its value and the nearest valid ones.
    """
    cp_size = args.context_parallel_size
    try:
        Layout.from_config(config, seq_len, cp_size)
        if mode.mode == CONVERT:
            Layout.zigzag(seq_len, cp_size)
    except ValueError as error:
        message = str(error)
        for name, option in OPTION_OF.items():
            message = message.replace(f"{name}=", f"{option} ")
        raise RefusedError(message) from error
    if getattr(args, "sequence_parallel", False):
        need = cp_size * args.tensor_model_parallel_size
        if seq_len % need:
            below = seq_len // need * need
            raise RefusedError(
                f"--seq-length {seq_len}: with --sequence-parallel it must be a multiple of {need}; "
                f"nearest: {below or need} or {below + need}"
            )
