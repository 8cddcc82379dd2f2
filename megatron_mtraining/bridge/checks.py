"""What Bridge can be told that this attention does not do, as data: checked before the first step.

Options of the model itself are checked by :mod:`megatron_mtraining.integration.refusals`, on the same config object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_mtraining.integration import RefusedError
from megatron_mtraining.integration.options import BACKEND

BACKENDS_TO_LEAVE = (None, "auto", "local", BACKEND)
"""Values of ``model.attention_backend`` that do not ask for another attention."""


@dataclass(frozen=True)
class BridgeRefusal:
    """One setting of a ``ConfigContainer`` that is refused.

    Attributes:
        path: where it is, as in a command-line override (``dataset.enable_offline_packing``).
        refused: says from the value, and from the container, whether it is refused.
        reason: why.
        valid: what to use instead.
    """

    path: str
    refused: Callable[[Any, Any], bool]
    reason: str
    valid: str


def _cp_size(cfg: Any) -> int:
    return getattr(cfg.model, "context_parallel_size", 1) or 1


def _over_ranks(value: Any, cfg: Any) -> bool:
    return bool(value) and _cp_size(cfg) > 1


def _other_size(value: Any, cfg: Any) -> bool:
    return value not in (None, 1, _cp_size(cfg))


def _other_backend(value: Any, _: Any) -> bool:
    return getattr(value, "name", value) not in BACKENDS_TO_LEAVE


PACKED = "packed sequences of Bridge are not connected to those of this attention over several context-parallel ranks"

REFUSALS: tuple[BridgeRefusal, ...] = (
    BridgeRefusal("model.attention_backend", _other_backend, "it asks for another attention", "auto, or leave it out"),
    BridgeRefusal(
        "model.use_transformer_engine_full_layer_spec",
        lambda value, _: bool(value),
        "Transformer Engine's whole layers have their attention built in",
        "False",
    ),
    BridgeRefusal(
        "model.cp_partition_mode",
        lambda value, _: value not in (None, "zigzag"),
        "Megatron would deal the sequence in a layout that is not this attention's",
        "zigzag (the attention replaces it by its own layout where it can)",
    ),
    BridgeRefusal("dataset.enable_offline_packing", _over_ranks, PACKED, "False, or model.context_parallel_size=1"),
    BridgeRefusal("dataset.enable_in_batch_packing", _over_ranks, PACKED, "False, or model.context_parallel_size=1"),
    BridgeRefusal(
        "dataset.skip_getting_attention_mask_from_dataset",
        lambda value, _: value is False,
        "a mask of seq_length x seq_length would be made, and ignored",
        "True",
    ),
    BridgeRefusal(
        "dataset.reset_attention_mask",
        lambda value, _: bool(value),
        "the mask between documents would be ignored",
        "False",
    ),
    BridgeRefusal(
        "dist.eval_context_parallel_size",
        _other_size,
        "there are no ring groups for evaluation on another number of context-parallel ranks",
        "1, the size of training, or leave it out",
    ),
)


def refuse_container(cfg: Any) -> None:
    """Checks every refusal whose setting ``cfg`` has.

    Args:
        cfg: a Bridge ``ConfigContainer``.

    Raises:
        RefusedError: for the first one that applies; names the setting, its value and what is valid.
    """
    for item in REFUSALS:
        section, name = item.path.split(".")
        value = getattr(getattr(cfg, section, None), name, None)
        if item.refused(value, cfg):
            shown = getattr(value, "name", value)
            raise RefusedError(
                f"{item.path}={shown}: not supported with MTraining attention, because {item.reason}; use {item.valid}"
            )
