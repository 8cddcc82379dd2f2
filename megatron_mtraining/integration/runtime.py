"""What the plugin knows in this process: the config in use, the layouts, and how the batch was really dealt."""

from __future__ import annotations

from collections.abc import Callable
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
    _layouts: dict[tuple[str, int, int], Layout] = field(default_factory=dict)

    def attention_layout(self, seq_len: int, cp_size: int) -> Layout:
        """The layout in which attention works on a sequence.

        Raises:
            ValueError: if the length does not fit; names the nearest valid ones.
        """
        return self._layout(self.config.layout, seq_len, cp_size)

    def model_layout(self, seq_len: int, cp_size: int) -> Layout:
        """The layout in which the rest of the model holds a sequence.

        Raises:
            ValueError: if the length does not fit; names the nearest valid ones.
        """
        kind = "zigzag" if self.layout_mode.mode == CONVERT else self.config.layout
        return self._layout(kind, seq_len, cp_size)

    def _layout(self, kind: str, seq_len: int, cp_size: int) -> Layout:
        key = (kind, seq_len, cp_size)
        if key not in self._layouts:
            if kind == self.config.layout:
                self._layouts[key] = Layout.from_config(self.config, seq_len, cp_size)
            else:
                self._layouts[key] = Layout.zigzag(seq_len, cp_size)
        return self._layouts[key]


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
