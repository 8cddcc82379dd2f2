"""What the plugin knows in this process: the config in use, the layouts, and how the batch was really dealt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.layout import Layout
from megatron_mtraining.metrics import Recorder

from .errors import RefusedError
from .layer_plan import LayerPlan
from .layout_mode import CONVERT, LayoutMode

if TYPE_CHECKING:
    from .dumping import IndexDump
    from .guard import Guard


def _no_steps() -> int:
    return 0


@dataclass
class Runtime:
    """The plugin's state while ``--attention-backend mtraining`` is in use.

    Attributes:
        config: the attention's config.
        layout_mode: whether Megatron deals the sequence in the attention's layout or in its own.
        inner_across_hosts: whether an inner ring may cross hosts.
        dealt: the sequence lengths that were dealt in the native layout, by what: ``batch`` or ``rotary``.
        expects: what the models of this rank need dealt before attention is called.
        recorder: where attention leaves the index of each layer, if anything reads it.
        plan: what differs from the config by layer and by step.
        steps_done: says how many training steps were done before the present one.
        guard: what watches the indices, if anything does.
        dump: what writes them to files, if anything does.
    """

    config: MTrainingConfig
    layout_mode: LayoutMode
    inner_across_hosts: bool = False
    dealt: dict[str, set[int]] = field(default_factory=lambda: {"batch": set(), "rotary": set()})
    expects: set[str] = field(default_factory=set)
    recorder: Recorder | None = None
    plan: LayerPlan = field(default_factory=LayerPlan)
    steps_done: Callable[[], int] = _no_steps
    guard: Guard | None = None
    dump: IndexDump | None = None

    def attention_layout(self, seq_len: int, cp_size: int) -> Layout:
        """The layout in which attention works on a sequence.

        Raises:
            RefusedError: if the length does not fit; names the nearest valid ones.
        """
        with _refusing():
            return Layout.from_config(self.config, seq_len, cp_size)

    def model_layout(self, seq_len: int, cp_size: int) -> Layout:
        """The layout in which the rest of the model holds a sequence.

        Raises:
            RefusedError: if the length does not fit; names the nearest valid ones.
        """
        if self.layout_mode.mode == CONVERT and self.config.layout != "zigzag":
            with _refusing():
                return _zigzag(seq_len, cp_size)
        return self.attention_layout(seq_len, cp_size)


@contextmanager
def _refusing() -> Iterator[None]:
    """Makes a refusal, which ends a run with one line, of a length that the layout cannot deal: a batch may have any."""
    try:
        yield
    except ValueError as error:
        raise RefusedError(str(error)) from error


@lru_cache(maxsize=64)
def _zigzag(seq_len: int, cp_size: int) -> Layout:
    """Megatron's layout; the same object for the lengths last used, so that its tables stay on the device."""
    return Layout.zigzag(seq_len, cp_size)


@lru_cache(maxsize=64)
def one_rank_layout(seq_len: int) -> Layout:
    """The layout of a sequence on one rank; the same object every time, so that its tables stay on the device."""
    return Layout.contiguous(seq_len, 1)


_current: Runtime | None = None


def current() -> Runtime:
    """The runtime in use.

    Raises:
        RefusedError: if the plugin was not set up in this process.
    """
    if _current is None:
        raise RefusedError(
            "MTraining attention was not set up: start the script with 'python -m megatron_mtraining.launch' and "
            "--attention-backend mtraining, or call megatron_mtraining.integration.set_up(config)"
        )
    return _current


def is_set_up() -> bool:
    """Whether the plugin is in use in this process."""
    return _current is not None


def use(runtime: Runtime | None) -> None:
    """Makes ``runtime`` the one in use; ``None`` ends the use."""
    global _current
    _current = runtime


def current_or_none() -> Runtime | None:
    """The runtime in use, if any: a module with a config of its own needs none on one rank."""
    return _current
