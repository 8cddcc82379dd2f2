"""What training with sparse attention shows of itself: one line of metrics per logging interval.

A line has, besides `step`, `loss` (mean over the interval's steps) and `tokens_per_s` (all ranks together, wall clock):

- `density` and `density_by_layer`: pairs worked off over causal pairs (dense attention: 1 + 64 / sequence length);
- `recall`, `recall_by_layer`, `recall_lowest`: share of the probe rows' attention that lies on kept lines; means over heads,
  and the lowest of any sample, head and document;
- `imbalance_worker`, `imbalance_step`: imbalance degrees over ranks and over ring steps (paper, section 4.3);
- `index_share`, `index_share_of_attention`: time spent on estimating the index (waiting for other ranks included) over
  wall-clock time, and over that of attention, forward and backward;
- `useful_tflops`, `dense_equivalent_tflops`: of attention, per rank: FLOPs on kept pairs, and those that dense causal
  attention would have taken, over the time of attention, index included;
- `layout` and `ring`: what was in use.

Layers are numbered from 0 over the whole model, as in options. All but the first three are those of the interval's last step,
the only one of whose attention anything is recorded. What is not known (no attention call; recall of row lists) is null. The
first step of a run has a line of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_mtraining.metrics import Recorder

LOSS = "lm loss"
"""The key of Megatron's language-model loss among the losses of a step."""

SCALARS = (
    "tokens_per_s",
    "density",
    "recall",
    "recall_lowest",
    "imbalance_worker",
    "imbalance_step",
    "index_share",
    "index_share_of_attention",
    "useful_tflops",
    "dense_equivalent_tflops",
)
"""The numbers of a line that loggers get, besides those by layer."""


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
        self.steps = self.armed_steps = 0
        self.began = 0.0
        self._described = False
        self.restart()

    def restart(self) -> None:
        """Begins an interval now."""
        self.losses.clear()
        self.steps = self.armed_steps = 0
        self.began = time.perf_counter()

    def note_step(self, losses: dict[str, Any]) -> None:
        """Takes a step's reduced losses (empty but on the last pipeline stage); copies nothing to the host."""
        self.steps += 1
        self.armed_steps += self.recorder.armed
        if LOSS in losses:
            self.losses.append(losses[LOSS].detach().float().reshape(()))

    def gather(self, step: int, tokens_per_step: int) -> dict[str, Any] | None:
        """Ends the interval at `step` and gathers from all ranks. Collective over the world.

        Args:
            step: the training step, from 1.
            tokens_per_step: tokens of the global batch.

        Returns:
            The line, also appended to the file; None on all ranks but the last.
        """
        seconds = time.perf_counter() - self.began
        mean_seconds = seconds / max(self.steps, 1)
        summaries: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(summaries, self.recorder.summary())
        line = {
            "step": step,
            "loss": float(torch.stack(self.losses).mean()) if self.losses else None,
            "tokens_per_s": self.steps * tokens_per_step / seconds,
            **merge_ranks(summaries, mean_seconds * self.armed_steps),
        }
        self.restart()
        if dist.get_rank() != dist.get_world_size() - 1:
            return None
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return line

    def publish(self, line: dict[str, Any], tensorboard: Any, wandb: Any) -> None:
        """Hands a line to the loggers, below `mtraining/`; layout and ring once.

        Args:
            line: what :meth:`gather` gave.
            tensorboard: Megatron's TensorBoard writer, or None.
            wandb: Megatron's writer of Weights & Biases (`log(dict, step)`), or None.
        """
        numbers = logged_numbers(line)
        words = {f"mtraining/{name}": line[name] for name in ("layout", "ring") if line[name] and not self._described}
        self._described = True
        if tensorboard is not None:
            for name, value in numbers.items():
                tensorboard.add_scalar(name, value, line["step"])
            for name, text in words.items():
                tensorboard.add_text(name, text, line["step"])
        if wandb is not None:
            wandb.log({**numbers, **words}, line["step"])


def logged_numbers(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line by the names that loggers know them by."""
    numbers = {f"mtraining/{name}": line[name] for name in SCALARS if line[name] is not None}
    for kind in ("density", "recall"):
        numbers |= {f"mtraining/{kind}_layer/{layer}": value for layer, value in line[f"{kind}_by_layer"].items()}
    return numbers


def merge_ranks(summaries: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The summaries of all ranks as one: means over the ranks that hold a layer.

    Context-parallel ranks agree on the lines and share the counting of the work; tensor-parallel ranks hold other heads,
    pipeline stages other layers.

    Args:
        summaries: what `Recorder.summary` gave on each rank.
        seconds: wall-clock length of the steps that were recorded.
    """
    busy = [summary for summary in summaries if summary["density_by_layer"]]
    density, recall = _by_layer(busy, "density_by_layer"), _by_layer(busy, "recall_by_layer")
    lowest = [summary["recall_lowest"] for summary in busy if summary["recall_lowest"] is not None]
    balance = _balance(busy)
    index = [summary["seconds"].get("index", 0.0) for summary in busy]
    attention = [
        sum(summary["seconds"].get(phase, 0.0) for phase in ("index", "forward", "backward")) for summary in busy
    ]
    spent = sum(attention)
    layout, ring = _place(busy[0]["place"]) if busy else (None, None)
    return {
        "density": _mean(list(density.values())),
        "recall": _mean(list(recall.values())),
        "recall_lowest": min(lowest, default=None),
        "imbalance_worker": _mean([worker for worker, _ in balance]),
        "imbalance_step": _mean([step for _, step in balance if step is not None]),
        "index_share": sum(index) / len(index) / seconds if index else None,
        "index_share_of_attention": sum(index) / spent if spent else None,
        "useful_tflops": sum(summary["useful_flops"] for summary in busy) / spent / 1e12 if spent else None,
        "dense_equivalent_tflops": sum(summary["dense_flops"] for summary in busy) / spent / 1e12 if spent else None,
        "density_by_layer": density,
        "recall_by_layer": recall,
        "layout": layout,
        "ring": ring,
    }


def _place(place: tuple[str, int, int]) -> tuple[str, str]:
    """Layout and ring in words."""
    layout, cp_size, inner = place
    if cp_size == 1:
        return layout, "one rank"
    return (
        layout,
        f"flat ring of {cp_size}" if inner == cp_size else f"hierarchical ring of {inner} x {cp_size // inner}",
    )


def _by_layer(busy: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """Means over the ranks that know a layer, in the order of the layers."""
    layers = sorted({layer for summary in busy for layer in summary[name]})
    held = {layer: [summary[name][layer] for summary in busy if layer in summary[name]] for layer in layers}
    return {str(layer): sum(values) / len(values) for layer, values in held.items()}


def _balance(busy: Sequence[dict[str, Any]]) -> list[tuple[float, float | None]]:
    """Imbalance degrees (worker, step) of every context-parallel group, whose ranks counted different layers."""
    found: list[tuple[float, float | None]] = []
    for ring in sorted({summary["ring"] for summary in busy}):
        works = [summary["work"] for summary in busy if summary["ring"] == ring]
        totals = [sum(ranks) for ranks in zip(*(total for total, _, _ in works), strict=True)]
        steps = [(slowest, mean) for _, slowest, mean in works if slowest is not None and mean is not None]
        worker = max(totals) * len(totals) / sum(totals) if any(totals) else 1.0
        all_slowest, all_mean = sum(slowest for slowest, _ in steps), sum(mean for _, mean in steps)
        found.append((worker, None if not steps else all_slowest / all_mean if all_mean else 1.0))
    return found


def _mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return sum(values) / len(values) if values else None


def _number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def log_text(line: dict[str, Any]) -> str:
    """The metrics in the style of Megatron's log line, which it goes on."""
    layers = line["density_by_layer"].values()
    parts = [
        f"density: {_number(line['density'])}" + (f" (layers {min(layers):.4f} to {max(layers):.4f})" if layers else "")
    ]
    if line["recall"] is not None:
        parts.append(f"recall: {line['recall']:.4f} (lowest {line['recall_lowest']:.4f})")
    parts.append(
        f"imbalance worker: {_number(line['imbalance_worker'], '.3f')} step: {_number(line['imbalance_step'], '.3f')}"
    )
    if line["index_share_of_attention"] is not None:
        parts.append(f"index: {100 * line['index_share_of_attention']:.1f} % of attention")
        useful, dense = line["useful_tflops"], line["dense_equivalent_tflops"]
        parts.append(f"attention TFLOP/s/GPU: {useful:.4g} useful {dense:.4g} dense-equivalent")
    if line["layout"] is not None:
        parts.append(f"{line['layout']}, {line['ring']}")
    return "".join(f" {part} |" for part in parts)


def format_line(line: dict[str, Any]) -> str:
    """A line of metrics for a person."""
    loss = "" if line["loss"] is None else f" loss {line['loss']:.4f} |"
    return f"> megatron_mtraining: step {line['step']} |{loss} {line['tokens_per_s']:.0f} tokens/s |{log_text(line)}"
