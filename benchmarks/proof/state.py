"""The state of an unfinished run on disk, so that a longer one may take several calls of a machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from benchmarks.proof.train import MasterAdamW


class RunState:
    """What a run has written and learnt so far; nothing on disk where ``path`` is None.

    Args:
        path: file of the state.
        every: steps between two writes of it.
        steps_a_call: steps after which this process leaves the run; None: it goes on to the end.

    Attributes:
        lines: what the run has written, the header first.
        left: whether this process has left the run before its last step.
    """

    def __init__(self, path: Path | None = None, every: int = 10, steps_a_call: int | None = None) -> None:
        self.path, self.every, self.steps_a_call = path, every, steps_a_call
        self.lines: list[dict[str, Any]] = []
        self.left = False
        self._steps_here = 0
        self._held: dict[str, Any] | None = None

    def begin(self, header: dict[str, Any]) -> None:
        """Takes up the state on disk, where there is one.

        Raises:
            ValueError: it is that of a run with another header.
        """
        self.lines = [header]
        if self.path is not None and self.path.exists():
            self._held = torch.load(self.path, weights_only=True)
            self.lines = self._held["lines"]
            if self.lines[0] != header:
                raise ValueError(f"{self.path}: the state of another run: {self.lines[0]}; this one: {header}")

    def restore(self, optimizer: MasterAdamW) -> int:
        """Puts masters, parameters and moments back; returns the steps done."""
        if self._held is None:
            return 0
        optimizer.load_state(self._held["optimizer"])
        steps = int(self._held["steps"])
        self._held = None
        return steps

    def after(self, step: int, optimizer: MasterAdamW) -> None:
        """Writes the state where it is due after ``step`` (from 0), and sees whether this process has done its share."""
        self._steps_here += 1
        self.left = self._steps_here == self.steps_a_call
        if self.path is not None and (self.left or (step + 1) % self.every == 0):
            partial = self.path.with_suffix(".writing")
            torch.save({"lines": self.lines, "optimizer": optimizer.state(), "steps": step + 1}, partial)
            partial.rename(self.path)

    def remove(self) -> None:
        """The run is complete."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
