"""The hooks into Megatron's training loop that metrics and ring profiles need.

`training_log` is wrapped: in steps that Megatron logs, the numbers are gathered before it and go into its own log line and to
its TensorBoard and Weights & Biases writers. `train_step` is wrapped to know beforehand which steps those are: in all others
nothing is recorded, and nothing waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_mtraining.metrics import Recorder

from . import runtime
from .errors import RefusedError
from .options import option_name
from .profiling import RingProfiler, profiler_from_args
from .training_metrics import TrainingMetrics, format_line, log_text


class TrainingLog:
    """The wrapped functions of Megatron's training loop.

    Args:
        metrics: what collects the numbers; None: nothing is recorded, only profiled.
        to_loggers: whether Megatron's log line and writers get them (else the file alone).
        profiler: what times ring passes in some steps, if anything does.
    """

    def __init__(self, metrics: TrainingMetrics | None, to_loggers: bool, profiler: RingProfiler | None) -> None:
        self.metrics = metrics
        self.to_loggers = to_loggers
        self.profiler = profiler
        self.first = True

    def train(self, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Megatron's loop, whose first step is logged."""
        self.first = True
        if self.metrics is not None:
            self.metrics.restart()
        return original(*args, **named)

    def train_step(self, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """A step: recorded if it will be logged, profiled if that was asked for."""
        from megatron.training import get_args

        settings = get_args()
        step = settings.curr_iteration + 1
        if self.metrics is not None:
            self.metrics.recorder.armed = self.first or step % settings.log_interval == 0
        self.first = False
        if self.profiler is None or step not in self.profiler.steps:
            return original(*args, **named)
        with self.profiler.step(step):
            return original(*args, **named)

    def training_log(
        self,
        original: Callable[..., Any],
        losses: dict[str, Any],
        total: Any,
        rate: Any,
        step: int,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Megatron's logging, with the metrics in its line."""
        from megatron.core.num_microbatches_calculator import get_current_global_batch_size
        from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

        assert self.metrics is not None
        args = get_args()
        self.metrics.note_step(losses)
        self.metrics.recorder.armed = False  # evaluation follows
        if step % args.log_interval and not named.get("is_first_iteration"):
            return original(losses, total, rate, step, *rest, **named)
        line = self.metrics.gather(step, get_current_global_batch_size() * args.seq_length)
        if line is None or not self.to_loggers:
            return original(losses, total, rate, step, *rest, **named)
        with _LogLine(line):
            result = original(losses, total, rate, step, *rest, **named)
        self.metrics.publish(line, get_tensorboard_writer(), get_wandb_writer())
        return result


class _LogLine(ExitStack):
    """Appends metrics to the first line that Megatron prints on the last rank within the block: its log line."""

    def __init__(self, line: dict[str, Any]) -> None:
        super().__init__()
        self.line: dict[str, Any] | None = line

    def __enter__(self) -> _LogLine:
        from megatron.training import training

        original = training.print_rank_last

        def print_rank_last(message: str) -> None:
            if self.line is not None:
                message, self.line = message + log_text(self.line), None
            original(message)

        training.print_rank_last = print_rank_last
        self.callback(setattr, training, "print_rank_last", original)
        return self

    def __exit__(self, *details: Any) -> bool | None:
        if self.line is not None:  # another version that prints its line in another way
            print(format_line(self.line), flush=True)
        return super().__exit__(*details)


def log_from_args(args: Any) -> TrainingLog | None:
    """What the options ask for, if anything; makes the folder of the metrics' file.

    Raises:
        RefusedError: for a value that is not valid or a file that cannot be written; names the option and the value.
    """
    path = None if args.mtraining_metrics is None else Path(args.mtraining_metrics)
    profiler = profiler_from_args(args, path)
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise RefusedError(f"{option_name('metrics')} {path}: cannot write it ({error.strerror})") from error
    to_loggers = args.mtraining_log != "none"
    if path is None and not to_loggers:
        return None if profiler is None else TrainingLog(None, False, profiler)
    recorder = Recorder(armed=False, takes_recall=args.mtraining_log == "all")
    return TrainingLog(TrainingMetrics(path, recorder), to_loggers, profiler)


def install(log: TrainingLog) -> Callable[[], None]:
    """Puts the hooks in place and starts recording. Returns the function that takes them out again."""
    from megatron.training import training

    names = ("train", "train_step", "training_log") if log.metrics is not None else ("train", "train_step")
    undo = ExitStack()
    for name in names:
        original = getattr(training, name)
        undo.callback(setattr, training, name, original)
        setattr(training, name, functools.wraps(original)(functools.partial(getattr(log, name), original)))
    if log.metrics is not None:
        undo.enter_context(log.metrics.recorder.active())
        state = runtime.current()
        state.recorder = log.metrics.recorder
        undo.callback(setattr, state, "recorder", None)
    return undo.close
