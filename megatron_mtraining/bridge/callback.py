"""Density and imbalance in Bridge's logs, through its callbacks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.core.num_microbatches_calculator import get_current_global_batch_size

from megatron_mtraining.integration import runtime
from megatron_mtraining.integration.training_metrics import TrainingMetrics
from megatron_mtraining.metrics import Recorder


class MTrainingCallback(Callback):
    """Logs what sparse attention did, at Bridge's ``logger.log_interval`` and after the first step.

    The line goes to standard output, to Bridge's TensorBoard and Weights & Biases loggers below ``mtraining/`` (on the
    last rank, which has them) and, if asked for, to a file. Every rank must have the callback, because the numbers are
    gathered from all of them.

    Args:
        path: file to append a line of JSON to; its folder is made.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._recording = ExitStack()
        self._metrics: TrainingMetrics | None = None

    def on_train_start(self, context: CallbackContext) -> None:
        """Begins to record.

        Raises:
            RefusedError: if the model was built without MTraining attention.
        """
        state = runtime.current()
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._metrics = TrainingMetrics(self.path, Recorder())
        self._recording.enter_context(self._metrics.recorder.active())
        state.recorder = self._metrics.recorder
        self._recording.callback(setattr, state, "recorder", None)
        state.steps_done = lambda: context.state.train_state.step
        self._first = context.state.train_state.step + 1

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Takes the step's loss and, when Bridge logs, ends the interval."""
        assert self._metrics is not None
        self._metrics.note_step(context.loss_dict or {})
        step = context.state.train_state.step + 1  # Bridge counts the step after the callbacks
        if step == self._first or step % context.state.cfg.logger.log_interval == 0:
            self._write(step, context.state)

    def _write(self, step: int, state: Any) -> None:
        assert self._metrics is not None
        tokens = get_current_global_batch_size() * state.cfg.model.seq_length
        line = self._metrics.write(step, tokens, state.tensorboard_logger)
        if line is not None and state.wandb_logger is not None:
            numbers = {name: value for name, value in line.items() if isinstance(value, float) and name != "loss"}
            numbers |= {f"density_layer/{layer}": value for layer, value in line["density_by_layer"].items()}
            state.wandb_logger.log({f"mtraining/{name}": value for name, value in numbers.items()}, step)

    def on_train_end(self, context: CallbackContext) -> None:
        """Ends recording."""
        self._recording.close()
        self._metrics = None
