"""Work and balance of an index on a ring, and the recorder that training reads them from (paper, section 4.3)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .bitmap import count_bits
from .config import BLOCK
from .index import VerticalSlashIndex
from .layout import Layout
from .schedule import forward_schedule


def pair_counts(index: VerticalSlashIndex, layout: Layout) -> tuple[Tensor, Tensor]:
    """Kept block pairs and kept (row block, column) pairs by the ranks that hold the queries and the keys.

    The counts are convolutions along the sequence (a pair is kept if its distance is), done by FFT.

    Returns:
        Two int64 tensors ``[cp_size, cp_size]`` on the CPU, ``[query rank, key rank]``, summed over batch and heads.
    """
    owner = layout.inverse("cpu").long() // layout.local_blocks
    slash = index.slash_bits().flatten(0, 1).cpu().double()
    columns = count_bits(index.column_words).flatten(0, 1).cpu().double()
    counts = torch.zeros(2, layout.cp_size, layout.cp_size, dtype=torch.float64)
    for start, span in zip(index.documents.starts, index.documents.spans, strict=True):
        part = slice(start, start + span)
        _add_document(counts, slash[:, part], columns[:, part], owner[part])
    blocks, column_pairs = counts.round().long()
    return blocks, column_pairs


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


def work_table(index: VerticalSlashIndex, layout: Layout, inner_size: int | None = None) -> Tensor:
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
    slowest, mean = work.double().amax(0), work.double().mean(0)
    busy = mean > 0
    return {
        "worker": float((slowest[busy] / mean[busy]).mean()) if busy.any() else 1.0,
        "critical": imbalance_step(work),
        "step": float(slowest.max() / slowest.mean()) if busy.any() else 1.0,
        "total": imbalance_worker(work),
    }


@dataclass
class Recorder:
    """Collects the indices and the times of attention calls while it is active (one at a time in a process).

    Attributes:
        indices: the newest index of each layer, with its layout and inner ring size.
        seconds: time spent per phase ("index", "forward", "backward"), host clock on the CPU, events on CUDA.
    """

    indices: dict[int, tuple[VerticalSlashIndex, Layout, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
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

    def record(self, layer: int, index: VerticalSlashIndex, layout: Layout, inner_size: int) -> None:
        """Keeps the index of a layer; nothing is computed or copied to the host before :meth:`summary`."""
        self.indices[layer] = (index, layout, inner_size)

    def summary(self) -> dict[str, object]:
        """Density by layer, imbalance degrees over all layers and phase times since the last call; then forgets them.

        Synchronises with the device.
        """
        for phase, begin, end in self._events:
            end.synchronize()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + begin.elapsed_time(end) / 1e3
        layers = sorted(self.indices)
        density = {layer: float(self.indices[layer][0].density()) for layer in layers}
        tables = [work_table(*self.indices[layer]) for layer in layers]
        work = torch.cat(tables, 1) if tables else torch.zeros(1, 1)
        result: dict[str, object] = {
            "density": sum(density.values()) / max(len(density), 1),
            "density_by_layer": density,
            "imbalance_worker": imbalance_worker(work),
            "imbalance_step": imbalance_step(work),
            "seconds": dict(self.seconds),
        }
        self.indices.clear()
        self.seconds.clear()
        self._events.clear()
        return result


_active: Recorder | None = None


@contextmanager
def timed(phase: str, device: torch.device) -> Iterator[None]:
    """Adds the time of the block to the active recorder's ``phase``; does nothing without one."""
    recorder = _active
    if recorder is None:
        yield
        return
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        recorder._events.append((phase, begin, end))
        return
    began = time.perf_counter()
    yield
    recorder.seconds[phase] = recorder.seconds.get(phase, 0.0) + time.perf_counter() - began
