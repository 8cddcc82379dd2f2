"""Work and balance of an index on a ring, and the recorder that training reads them from (paper, section 4.3)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from .bitmap import count_bits
from .config import BLOCK
from .documents import Documents
from .index import VerticalSlashIndex
from .layout import Layout
from .schedule import forward_schedule


@lru_cache(maxsize=16)
def _owners(documents: Documents, layout: Layout) -> tuple[Tensor, Tensor]:
    """(owner, doc_start) of each block, int64 ``[n]`` on the CPU."""
    owner = layout.inverse("cpu").long() // layout.local_blocks
    return owner, documents.doc_start.long()


def pair_counts(index: VerticalSlashIndex, layout: Layout) -> tuple[Tensor, Tensor]:
    """Kept block pairs and kept (row block, column) pairs by the ranks that hold the queries and the keys.

    Returns:
        Two int64 tensors ``[cp_size, cp_size]`` on the CPU, ``[query rank, key rank]``, summed over batch and heads.
    """
    owner, start = _owners(index.documents, layout)
    size, blocks = layout.cp_size, index.num_blocks
    bits = index.slash_bits().flatten(0, 1).cpu().long()
    columns = count_bits(index.column_words).flatten(0, 1).cpu()
    counts = torch.zeros(2, size * size, dtype=torch.int64)
    for distance in range(blocks):
        rows = torch.arange(distance, blocks)
        rows = rows[rows - distance >= start[rows]]
        if not rows.numel():
            continue
        keys = rows - distance
        slash = bits[:, start[rows] + distance]
        where = owner[rows] * size + owner[keys]
        counts[0].index_add_(0, where, slash.sum(0))
        if distance:
            counts[1].index_add_(0, where, ((1 - slash) * columns[:, keys]).sum(0))
    return counts[0].view(size, size), counts[1].view(size, size)


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

    def start(self) -> None:
        """Makes this the recorder of :func:`timed` from now on."""
        global _active
        _active = self

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
