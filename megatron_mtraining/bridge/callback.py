"""Density, recall and imbalance in Bridge's logs, through its callbacks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.core.num_microbatches_calculator import get_current_global_batch_size

from megatron_mtraining.integration import runtime
from megatron_mtraining.integration.training_metrics import TrainingMetrics, format_line
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
        self._metrics = TrainingMetrics(self.path, Recorder(armed=False, takes_recall=True))
        self._recording.enter_context(self._metrics.recorder.active())
        state.recorder = self._metrics.recorder
        self._recording.callback(setattr, state, "recorder", None)
        state.steps_done = lambda: context.state.train_state.step
        self._first = context.state.train_state.step + 1

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Records attention in the steps that Bridge will log alone."""
        assert self._metrics is not None
        self._metrics.recorder.armed = self._logs(context.state.train_state.step + 1, context.state)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Takes the step's loss and, when Bridge logs, ends the interval."""
        assert self._metrics is not None
        self._metrics.note_step(context.loss_dict or {})
        self._metrics.recorder.armed = False  # evaluation follows
        step = context.state.train_state.step + 1  # Bridge counts the step after the callbacks
        if self._logs(step, context.state):
            self._write(step, context.state)

    def _logs(self, step: int, state: Any) -> bool:
        return step == self._first or step % state.cfg.logger.log_interval == 0

    def _write(self, step: int, state: Any) -> None:
        assert self._metrics is not None
        tokens = get_current_global_batch_size() * state.cfg.model.seq_length
        line = self._metrics.gather(step, tokens)
        if line is not None:
            print(format_line(line), flush=True)
            self._metrics.publish(line, state.tensorboard_logger, state.wandb_logger)

    def on_train_end(self, context: CallbackContext) -> None:
        """Ends recording."""
        self._recording.close()
        self._metrics = None
