"""What training with sparse attention shows of itself: one line of metrics per logging interval of Megatron.

`--mtraining-metrics FILE` appends each line to FILE as JSON and prints it; with Megatron's `--tensorboard-dir` the
numbers also go to TensorBoard, below `mtraining/`. A line has

- `step`, `loss` (mean over the interval's steps), `tokens_per_s` (all ranks together, wall clock);
- `density` and `density_by_layer`: pairs worked off over causal pairs (dense attention: 1 + 64 / sequence length);
- `imbalance_worker`, `imbalance_step`: imbalance degrees over ranks and over ring steps (paper, section 4.3);
- `index_share`: share of the wall-clock time spent on estimating the index, waiting for other ranks included.

Density and imbalance are those of the interval's last step. The first step of a run has a line of its own.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_mtraining.metrics import Recorder

from . import runtime

LOSS = "lm loss"
"""The key of Megatron's language-model loss among the losses of a step."""


class TrainingMetrics:
    """Collects an interval's numbers and writes them out. One per process; every rank must log the same steps.

    Args:
        path: file that the last rank appends to; None for no file.
        recorder: what the attention layers of this rank report to.
    """

    def __init__(self, path: Path | None, recorder: Recorder) -> None:
        self.path = path
        self.recorder = recorder
        self.losses: list[torch.Tensor] = []
        self.steps = 0
        self.began = 0.0
        self.restart()

    def restart(self) -> None:
        """Begins an interval now."""
        self.losses.clear()
        self.steps = 0
        self.began = time.perf_counter()

    def note_step(self, losses: dict[str, Any]) -> None:
        """Takes a step's reduced losses (empty but on the last pipeline stage); copies nothing to the host."""
        self.steps += 1
        if LOSS in losses:
            self.losses.append(losses[LOSS].detach().float().reshape(()))

    def write(self, step: int, tokens_per_step: int, writer: Any) -> dict[str, Any] | None:
        """Ends the interval at `step`: gathers from all ranks, and writes on the last. Collective over the world.

        Args:
            step: the training step, from 1.
            tokens_per_step: tokens of the global batch.
            writer: Megatron's TensorBoard writer, None on the ranks that have none.

        Returns:
            The line that was written; None on the ranks that wrote none.
        """
        seconds = time.perf_counter() - self.began
        line = {
            "step": step,
            "loss": float(torch.stack(self.losses).mean()) if self.losses else None,
            "tokens_per_s": self.steps * tokens_per_step / seconds,
            **merge_ranks(_gather(self.recorder.summary()), seconds),
        }
        self.restart()
        if dist.get_rank() != dist.get_world_size() - 1:
            return None
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        print(format_line(line), flush=True)
        if writer is not None:
            _write_tensorboard(line, writer)
        return line


def _gather(summary: dict[str, Any]) -> list[dict[str, Any]]:
    summaries: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(summaries, summary)
    return summaries


def merge_ranks(summaries: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The summaries of all ranks as one: means over the ranks that hold a layer.

    Context-parallel ranks agree on everything but time; tensor-parallel ranks hold other heads, pipeline stages other
    layers.

    Args:
        summaries: what `Recorder.summary` gave on each rank.
        seconds: wall-clock length of the interval.
    """
    layers = sorted({layer for summary in summaries for layer in summary["density_by_layer"]})
    by_layer = {}
    for layer in layers:
        held = [summary["density_by_layer"] for summary in summaries if layer in summary["density_by_layer"]]
        by_layer[str(layer)] = sum(densities[layer] for densities in held) / len(held)
    busy = [summary for summary in summaries if summary["density_by_layer"]]
    index_seconds = [summary["seconds"].get("index", 0.0) for summary in busy]
    return {
        "density": _mean(list(by_layer.values())),
        "imbalance_worker": _mean([summary["imbalance_worker"] for summary in busy]),
        "imbalance_step": _mean([summary["imbalance_step"] for summary in busy]),
        "index_share": _mean(index_seconds) / seconds,
        "density_by_layer": by_layer,
    }


def _mean(values: list[float]) -> float:
    """The mean; of nothing (no attention call in the interval) not a number."""
    return sum(values) / len(values) if values else float("nan")


def format_line(line: dict[str, Any]) -> str:
    """A line of metrics for a person."""
    loss = "" if line["loss"] is None else f" loss {line['loss']:.4f} |"
    return (
        f"> megatron_mtraining: step {line['step']} |{loss} {line['tokens_per_s']:.0f} tokens/s | density "
        f"{line['density']:.4f} | imbalance worker {line['imbalance_worker']:.3f}, step {line['imbalance_step']:.3f} | "
        f"index {100 * line['index_share']:.2f} % of the time"
    )


def _write_tensorboard(line: dict[str, Any], writer: Any) -> None:
    for name in ("tokens_per_s", "density", "imbalance_worker", "imbalance_step", "index_share"):
        writer.add_scalar(f"mtraining/{name}", line[name], line["step"])
    for layer, density in line["density_by_layer"].items():
        writer.add_scalar(f"mtraining/density_layer/{layer}", density, line["step"])


def install(path: str | Path) -> Callable[[], None]:
    """Starts recording, and writes a line whenever Megatron logs. Returns the function that takes the hook out again.

    Raises:
        RefusedError: the plugin is not set up in this process.
        OSError: the file's folder cannot be made or the file cannot be written.
    """
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training import get_args, get_tensorboard_writer, training

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("a").close()
    metrics = TrainingMetrics(path, Recorder())
    recording = ExitStack()
    recording.enter_context(metrics.recorder.active())
    state = runtime.current()
    state.recorder = metrics.recorder
    original_train, original_log = training.train, training.training_log

    @functools.wraps(original_train)
    def train(*args: Any, **named: Any) -> Any:
        metrics.restart()
        return original_train(*args, **named)

    @functools.wraps(original_log)
    def training_log(losses: dict[str, Any], total: Any, rate: Any, iteration: int, *rest: Any, **named: Any) -> Any:
        metrics.note_step(losses)
        result = original_log(losses, total, rate, iteration, *rest, **named)
        args = get_args()
        if iteration % args.log_interval == 0 or named.get("is_first_iteration"):
            tokens = get_current_global_batch_size() * args.seq_length
            metrics.write(iteration, tokens, get_tensorboard_writer())
        return result

    def undo() -> None:
        training.train, training.training_log = original_train, original_log
        state.recorder = None
        recording.close()

    training.train, training.training_log = train, training_log
    return undo
