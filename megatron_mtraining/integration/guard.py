"""The guard: a layer or head whose index misses too much attention, or keeps too much of it, goes dense; logged, never silent.

Recall and density of every call are compared with the user's bounds on the device, and the words of the index are chosen
there too, so nothing waits for the host. What happened is counted on the device and read when Megatron logs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mtraining.config import MAX_PROBE_SEGMENTS, MTrainingConfig
from megatron_mtraining.index import VerticalSlashIndex
from megatron_mtraining.layout import Layout
from megatron_mtraining.recall import probe_recall

from .errors import RefusedError
from .options import option_name, require_lines

ACTIONS = ("dense", "stop")
SCOPES = ("layer", "head")


@dataclass
class LayerCounts:
    """What a layer's guard saw since the last report, on the device.

    Attributes:
        counts: int64 ``[2]``: calls (of heads, where each is judged for itself), and those that went dense.
        extremes: fp64 ``[2]``: lowest recall and highest density.
    """

    counts: Tensor
    extremes: Tensor


@dataclass
class Guard:
    """The bounds, and what became of them.

    Attributes:
        recall: a call goes dense if the recall of any sample, head and document is below; None: not watched.
        density: a call goes dense if the mean density of its heads is above; None: not watched.
        action: ``dense``, or ``stop``: the step is done densely and the run then ends.
        scope: what goes dense: the ``layer``, or every ``head`` (and sample) for itself, by its own recall.
        segments: the recall is that of the rows at the ends of so many parts of each document, if the index was not
            estimated from more: rows that did not choose the index.
        seen: by layer, from 0.
    """

    recall: float | None = None
    density: float | None = None
    action: str = "dense"
    scope: str = "layer"
    segments: int = 1
    seen: dict[int, LayerCounts] = field(default_factory=dict)

    @torch.compiler.disable
    @torch.no_grad()
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        index: VerticalSlashIndex,
        *,
        config: MTrainingConfig,
        layout: Layout,
        cp_group: dist.ProcessGroup | None,
        tp_group: dist.ProcessGroup | None,
        softmax_scale: float | None,
        layer: int | None,
    ) -> VerticalSlashIndex:
        """The index where it keeps the bounds, every line where not. All ranks of the layer decide alike.

        Args:
            q: ``[batch, local_seq, heads, head_dim]``, queries in the order of ``layout``.
            k: ``[batch, local_seq, kv_heads, head_dim]``.
            index: the estimated lines.
            config, layout, cp_group, softmax_scale: those of the call.
            tp_group: ranks that hold the other heads of the layer; they go dense together.
            layer: to count for, from 0; None: not counted (evaluation).
        """
        density = index.density()
        recall = density.new_ones(index.slash_words.shape[:2])
        if self.recall is not None:
            segments = max(self.segments, config.probe_segments)
            recall = probe_recall(
                q,
                k,
                index,
                config=config,
                layout=layout,
                cp_group=cp_group,
                softmax_scale=softmax_scale,
                segments=segments,
            ).amin(-1)
        if self.scope == "layer":
            recall = recall.amin()
        tripped = recall < (0.0 if self.recall is None else self.recall)
        if self.density is not None:
            tripped = tripped | (density > self.density)
        if self.scope == "layer" and tp_group is not None and tp_group.size() > 1:
            together = tripped.to(torch.int32)
            dist.all_reduce(together, dist.ReduceOp.MAX, tp_group)
            tripped = together > 0
        if layer is not None:
            self._count(layer, recall.amin(), density, tripped)
        batch, heads = index.slash_words.shape[:2]
        tripped = tripped[..., None]
        dense = VerticalSlashIndex.dense(batch, heads, index.documents, index.slash_words.device)
        return replace(
            index,
            slash_words=torch.where(tripped, dense.slash_words, index.slash_words),
            column_words=torch.where(tripped, dense.column_words, index.column_words),
        )

    def _count(self, layer: int, recall: Tensor, density: Tensor, tripped: Tensor) -> None:
        if layer not in self.seen:
            counts = torch.zeros(2, dtype=torch.int64, device=recall.device)
            self.seen[layer] = LayerCounts(counts, torch.stack([torch.ones_like(recall), torch.zeros_like(density)]))
        seen = self.seen[layer]
        seen.counts += torch.stack([torch.ones_like(tripped), tripped]).long().view(2, -1).sum(1)
        seen.extremes[0].clamp_(max=recall)
        seen.extremes[1].clamp_(min=density)

    def take(self) -> dict[int, tuple[int, int, float, float]]:
        """(calls, dense calls, lowest recall, highest density) by layer since the last time; waits for the device."""
        taken = {layer: (*map(int, seen.counts.tolist()), *seen.extremes.tolist()) for layer, seen in self.seen.items()}
        self.seen.clear()
        return taken

    def has_tripped(self) -> bool:
        """Whether any call went dense since the last report; waits for the device."""
        return any(bool(seen.counts[1]) for seen in self.seen.values())


def guard_from_args(args: Any, config: MTrainingConfig) -> Guard | None:
    """The guard that the options describe, if any.

    Raises:
        RefusedError: for a value that is not valid; names the option, the value and the valid ones.
    """
    recall, density, action = args.mtraining_guard_recall, args.mtraining_guard_density, args.mtraining_guard_action
    if recall is not None and not 0 < recall <= 1:
        raise RefusedError(f"{option_name('guard_recall')} {recall}: must be a number in (0, 1]")
    if density is not None and not density > 0:
        raise RefusedError(f"{option_name('guard_density')} {density}: must be a positive number (dense is 1)")
    scope, segments = args.mtraining_guard_scope, args.mtraining_guard_segments
    if not 1 <= segments <= MAX_PROBE_SEGMENTS:
        raise RefusedError(f"{option_name('guard_segments')} {segments}: must be from 1 to {MAX_PROBE_SEGMENTS}")
    if recall is None and (scope != SCOPES[0] or segments > 1):
        named = "guard_scope" if scope != SCOPES[0] else "guard_segments"
        raise RefusedError(
            f"{option_name(named)} {scope if named == 'guard_scope' else segments}: needs {option_name('guard_recall')}"
        )
    if recall is None and density is None:
        if action != ACTIONS[0]:
            raise RefusedError(
                f"{option_name('guard_action')} {action}: needs a bound, {option_name('guard_recall')} or "
                f"{option_name('guard_density')}"
            )
        return None
    if config.dense:
        raise RefusedError(f"{option_name('dense')}: there is no index for the guard to watch; drop it or the bounds")
    require_lines(option_name("guard_density" if recall is None else "guard_recall"), config)
    return Guard(recall, density, action, scope, segments)


def merged(everyone: Sequence[dict[int, tuple[int, int, float, float]]]) -> dict[int, tuple[int, int, float, float]]:
    """What all ranks took, by layer: sums of the counts, extremes of the extremes."""
    layers: dict[int, tuple[int, int, float, float]] = {}
    for taken in everyone:
        for layer, (calls, dense, low, high) in taken.items():
            c, d, lowest, highest = layers.get(layer, (0, 0, 1.0, 0.0))
            layers[layer] = (c + calls, d + dense, min(low, lowest), max(high, highest))
    return dict(sorted(layers.items()))


def format_line(layer: int, seen: tuple[int, int, float, float], guard: Guard) -> str:
    """The line of a layer that went dense."""
    calls, dense, low, high = seen
    watched = [f"lowest recall {low:.4f} (bound {guard.recall})"] if guard.recall is not None else []
    watched += [f"highest density {high:.4f} (bound {guard.density})"] if guard.density is not None else []
    what = f"layer {layer}" if guard.scope == "layer" else f"heads of layer {layer}"
    return (
        f"> megatron_mtraining: guard: {what} went dense in {dense} of {calls} calls of all ranks: {', '.join(watched)}"
    )


def install(guard: Guard) -> Callable[[], None]:
    """Reports at Megatron's logging interval and at the end of training, and stops the run if asked to.

    Returns:
        The function that takes the hooks out again.
    """
    from megatron.training import get_args, get_tensorboard_writer, training

    original = training.training_log, training.checkpoint_and_decide_exit, training.train

    def report(iteration: int) -> None:
        """One line for each layer that went dense; collective over the world."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, guard.take())
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        writer = get_tensorboard_writer()
        for layer, seen in merged(everyone).items():
            if seen[1]:
                print(format_line(layer, seen, guard), flush=True)
            if writer is not None:
                writer.add_scalar(f"mtraining/guard_dense_calls/{layer}", seen[1] / seen[0], iteration)
                if guard.recall is not None:
                    writer.add_scalar(f"mtraining/guard_lowest_recall/{layer}", seen[2], iteration)

    @functools.wraps(original[0])
    def training_log(losses: Any, total: Any, rate: Any, iteration: int, *rest: Any, **named: Any) -> Any:
        result = original[0](losses, total, rate, iteration, *rest, **named)
        # With "stop", what the step did is still to be looked at, and reported then.
        if iteration % get_args().log_interval == 0 and guard.action != "stop":
            report(iteration)
        return result

    @functools.wraps(original[1])
    def checkpoint_and_decide_exit(
        model: Any, optimizer: Any, scheduler: Any, iteration: int, *rest: Any, **named: Any
    ) -> Any:
        args = get_args()
        interval = args.exit_interval
        if guard.action == "stop" and _anywhere(guard.has_tripped()):
            report(iteration)
            if dist.get_rank() == dist.get_world_size() - 1:
                print(f"> megatron_mtraining: guard: stopping after iteration {iteration}", flush=True)
            args.exit_interval = 1  # Megatron's own way out: it saves, if it is to save at all, and ends the run
        elif guard.action == "stop" and iteration % args.log_interval == 0:
            report(iteration)
        try:
            exits = original[1](model, optimizer, scheduler, iteration, *rest, **named)
        finally:
            args.exit_interval = interval
        if exits:  # Megatron ends the process without coming back to where training was called
            report(iteration)
        return exits

    @functools.wraps(original[2])
    def train(*args: Any, **named: Any) -> Any:
        result = original[2](*args, **named)
        report(get_args().train_iters)
        return result

    def undo() -> None:
        training.training_log, training.checkpoint_and_decide_exit, training.train = original

    training.training_log, training.checkpoint_and_decide_exit, training.train = (
        training_log,
        checkpoint_and_decide_exit,
        train,
    )
    return undo


def _anywhere(flag: bool) -> bool:
    """Whether the flag is set on any rank."""
    device = "cpu" if dist.get_backend() == "gloo" else torch.cuda.current_device()
    tensor = torch.tensor([flag], dtype=torch.int32, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return bool(tensor.item())
