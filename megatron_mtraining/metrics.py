"""Work and balance of an index on a ring, and the recorder that training reads them from (paper, section 4.3)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .bitmap import count_bits, unpack_bits
from .block_lists import BlockListIndex, Index
from .config import BLOCK
from .documents import Documents
from .layout import Layout
from .schedule import forward_schedule


def pair_counts(index: Index, layout: Layout) -> tuple[Tensor, Tensor]:
    """Kept block pairs and kept (row block, column) pairs by the ranks that hold the queries and the keys.

    The counts of lines are convolutions along the sequence (a pair is kept if its distance is), done by FFT.

    Args:
        index: lines, or row lists with all rows of the sequence.
        layout: placement of the sequence.

    Returns:
        Two int64 tensors ``[cp_size, cp_size]`` on the CPU, ``[query rank, key rank]``, summed over batch and heads.

    Raises:
        ValueError: for the row lists of one rank of several.
    """
    owner = layout.inverse("cpu").long() // layout.local_blocks
    if isinstance(index, BlockListIndex):
        return _row_list_pairs(index, owner, layout.cp_size)
    slash = index.slash_bits().flatten(0, 1).cpu().double()
    columns = count_bits(index.column_words).flatten(0, 1).cpu().double()
    counts = torch.zeros(2, layout.cp_size, layout.cp_size, dtype=torch.float64)
    for start, span in zip(index.documents.starts, index.documents.spans, strict=True):
        part = slice(start, start + span)
        _add_document(counts, slash[:, part], columns[:, part], owner[part])
    blocks, column_pairs = counts.round().long()
    return blocks, column_pairs


def _row_list_pairs(index: BlockListIndex, owner: Tensor, cp_size: int) -> tuple[Tensor, Tensor]:
    """:func:`pair_counts` of row lists, a head at a time: ``[n, n]`` is large."""
    if set(index.row_blocks) != set(range(index.num_blocks)):
        raise ValueError(f"index has {len(index.row_blocks)} rows: all {index.num_blocks} are needed to count pairs")
    words = index.kept_words().flatten(0, 1)
    kept = torch.zeros((index.num_blocks, index.num_blocks), dtype=torch.float32, device=words.device)
    for head in words:
        kept += unpack_bits(head, index.num_blocks)
    # Counts of heads, then of blocks: integers far below 2**53.
    held = torch.nn.functional.one_hot(owner.to(words.device), cp_size).double()
    rows = held[torch.tensor(index.row_blocks, device=words.device)]
    blocks = (rows.T @ (kept.double() @ held)).round().long().cpu()
    return blocks, torch.zeros_like(blocks)


def _add_document(counts: Tensor, slash: Tensor, columns: Tensor, owner: Tensor) -> None:
    """Adds one document: ``slash [heads, span]`` by distance, ``columns [heads, span]`` kept columns of each block."""
    span = owner.numel()
    size = 2 * span
    lines = torch.fft.rfft(slash.sum(0), size)
    covering = torch.fft.rfft(torch.cat([torch.zeros(slash.shape[0], 1), slash[:, 1:]], 1), size)
    for keys in owner.unique().tolist():
        mine = (owner == keys).double()
        held = columns * mine
        rows = torch.fft.irfft(lines * torch.fft.rfft(mine, size), size)[:span]
        covered = torch.fft.irfft((covering * torch.fft.rfft(held, size)).sum(0), size)[:span]
        earlier = held.sum(0).cumsum(0) - held.sum(0)
        # Rounded here: the transforms leave errors far below one half on integers.
        counts[0, :, keys].index_add_(0, owner, rows.round())
        counts[1, :, keys].index_add_(0, owner, earlier - covered.round())


def work_table(index: Index, layout: Layout, inner_size: int | None = None) -> Tensor:
    """Query-key pairs of each rank in each forward step: fp64 ``[cp_size, steps]``; columns count in the last step."""
    blocks, columns = pair_counts(index, layout)
    size = layout.cp_size
    inner = inner_size or size
    chunks = torch.tensor([[s.chunk for s in forward_schedule(r, inner, size // inner)] for r in range(size)])
    table = blocks.gather(1, chunks).double() * BLOCK * BLOCK
    table[:, -1] += columns.sum(1).double() * BLOCK
    return table


def imbalance_worker(work: Tensor) -> float:
    """Imbalance degree (max over mean) of the ranks' total work; ``work [cp_size, steps]``."""
    total = work.sum(1)
    return float(total.max() / total.mean()) if total.any() else 1.0


def imbalance_step(work: Tensor) -> float:
    """Sum over the steps of the slowest rank over the same sum of the mean rank: what a ring that waits in each step pays."""
    return float(work.amax(0).sum() / work.mean(0).sum()) if work.any() else 1.0


def imbalance_degrees(work: Tensor) -> dict[str, float]:
    """The imbalance degrees of a table of work (pairs or time) ``[cp_size, steps]``.

    Returns:
        ``worker``: slowest over mean rank within a step, mean over the steps; ``critical``: sum over steps of the slowest
        rank over the ideal (:func:`imbalance_step`); ``step``: heaviest over mean step, by the slowest rank of each;
        ``total``: slowest over mean rank of the whole pass (:func:`imbalance_worker`).
    """
    work = work.double()  # counts are integers, which have no mean
    slowest, mean = work.amax(0), work.mean(0)
    busy = mean > 0
    return {
        "worker": float((slowest[busy] / mean[busy]).mean()) if busy.any() else 1.0,
        "critical": imbalance_step(work),
        "step": float(slowest.max() / slowest.mean()) if busy.any() else 1.0,
        "total": imbalance_worker(work),
    }


FLOPS_PER_PAIR = {"forward": 4, "backward": 10}
"""Useful FLOPs of a query-key pair, per element of the head dimension."""


@dataclass
class Recorder:
    """Collects the indices and the times of attention calls while it is active (one at a time in a process).

    Attributes:
        armed: whether calls are recorded; off in steps that nothing will be written of, so that those cost nothing.
        takes_recall: whether whoever records is to take the recall of the probe too.
        indices: the newest index of each layer, with its layout and inner ring size.
        recalls: recall of the probe by layer, fp64 ``[batch, heads, documents]`` on the device.
        cp_group: the context-parallel ranks of the calls; ``None`` for a single rank.
        seconds: time spent per phase ("index", "forward", "backward"), host clock on the CPU, events on CUDA.
        flops: this rank's share of the FLOPs of dense causal attention in the calls of "forward" and "backward": of the
            whole sequence (``whole``; times the density: useful FLOPs) and within its documents (``dense``).
    """

    armed: bool = True
    takes_recall: bool = False
    indices: dict[int, tuple[Index, Layout, int]] = field(default_factory=dict)
    recalls: dict[int, Tensor] = field(default_factory=dict)
    cp_group: dist.ProcessGroup | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    _events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @contextmanager
    def active(self) -> Iterator[Recorder]:
        """Makes this the recorder of :func:`timed` within the block."""
        global _active
        before, _active = _active, self
        try:
            yield self
        finally:
            _active = before

    def record(
        self,
        layer: int,
        index: Index,
        layout: Layout,
        inner_size: int,
        cp_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Keeps the index of a layer; nothing is computed or copied to the host before :meth:`summary`."""
        self.indices[layer] = (index, layout, inner_size)
        self.cp_group = cp_group

    def count(self, phase: str, q: Tensor, documents: Documents, cp_size: int) -> None:
        """Adds a pass to :attr:`flops`; ``q [batch, local_seq, heads, head_dim]``."""
        batch, _, heads, dim = q.shape
        per_pair = FLOPS_PER_PAIR[phase] * dim * batch * heads / cp_size / 2
        self.flops["whole"] = self.flops.get("whole", 0.0) + per_pair * documents.seq_len**2
        self.flops["dense"] = self.flops.get("dense", 0.0) + per_pair * sum(n * n for n in documents.lengths)

    def summary(self) -> dict[str, Any]:
        """What this rank knows of the calls since the last time, as plain values; then forgets them. Waits for the device.

        The work of layers, the same on all context-parallel ranks, is counted by one of them each (row lists: by all, each
        its own rows), so summaries of all ranks of a group are needed to know the balance.

        Returns:
            ``ring``: first global rank of the context-parallel group, which ranks with the same work share; ``place``:
            kind of layout, ranks, inner size; ``density_by_layer``, ``recall_by_layer``, ``recall_lowest``; ``work``:
            pairs of each context-parallel rank over the layers counted here, sums over ring steps of the slowest and of
            the mean rank (``None`` for row lists); ``seconds``; ``useful_flops``, ``dense_flops``.
        """
        for phase, begin, end in self._events:
            end.synchronize()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + begin.elapsed_time(end) / 1e3
        rank, size = (
            (0, 1) if self.cp_group is None else (dist.get_rank(self.cp_group), dist.get_world_size(self.cp_group))
        )
        density = _by_layer({layer: index.density() for layer, (index, *_) in self.indices.items()})
        mean_density = sum(density.values()) / max(len(density), 1)
        recall = _by_layer({layer: recall.mean() for layer, recall in self.recalls.items()})
        lowest = _by_layer({layer: recall.amin() for layer, recall in self.recalls.items()})
        _, layout, inner = next(iter(self.indices.values()), (None, None, 1))
        result = {
            "ring": 0 if self.cp_group is None else dist.get_process_group_ranks(self.cp_group)[0],
            "place": None if layout is None else (layout.kind, layout.cp_size, inner),
            "density_by_layer": density,
            "recall_by_layer": recall,
            "recall_lowest": min(lowest.values()) if lowest else None,
            "work": self._work(rank, size),
            "seconds": dict(self.seconds),
            "useful_flops": self.flops.get("whole", 0.0) * mean_density,
            "dense_flops": self.flops.get("dense", 0.0),
        }
        for kept in (self.indices, self.recalls, self.seconds, self.flops, self._events):
            kept.clear()
        return result

    def _work(self, rank: int, size: int) -> tuple[list[float], float | None, float | None]:
        total, slowest, mean = torch.zeros(size, dtype=torch.float64), 0.0, 0.0
        lines = True
        for number, layer in enumerate(sorted(self.indices)):
            index, layout, inner = self.indices[layer]
            if isinstance(index, BlockListIndex):
                total[rank] += float(index.pairs().sum())
                lines = False
            elif number % size == rank:
                table = work_table(index, layout, inner)
                total += table.sum(1)
                slowest, mean = slowest + float(table.amax(0).sum()), mean + float(table.mean(0).sum())
        return total.tolist(), slowest if lines else None, mean if lines else None


def _by_layer(values: dict[int, Tensor]) -> dict[int, float]:
    """Scalars on the device as numbers, with one copy."""
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True)) if values else {}


_active: Recorder | None = None


@contextmanager
def timed(phase: str, device: torch.device) -> Iterator[Recorder | None]:
    """Adds the time of the block to ``phase`` of the active, armed recorder, which it gives; does nothing without one."""
    recorder = _active
    if recorder is None or not recorder.armed:
        yield None
        return
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield recorder
        end.record()
        recorder._events.append((phase, begin, end))
        return
    began = time.perf_counter()
    yield recorder
    recorder.seconds[phase] = recorder.seconds.get(phase, 0.0) + time.perf_counter() - began
