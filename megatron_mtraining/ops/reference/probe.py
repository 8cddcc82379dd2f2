"""Reference of the probe operators: row maxima, row sums and masses of the probe attention (docs/design.md, "Mass")."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...budget import MASS_UNIT_BITS
from ...config import BLOCK
from .blocks import accumulator_dtype
from .select import select_lines

TILES_PER_SLAB = 512
MASS_UNIT = float(2**MASS_UNIT_BITS)


@dataclass(frozen=True)
class ProbeScores:
    """Scores of one probe tile against some local key blocks of its document."""

    tile: int
    valid: Tensor  # bool [64]: the rows that are probes
    local: Tensor  # int64 [keys]: local key blocks
    line: Tensor  # int64 [keys]: entry of the slash mass, doc_start + distance
    scores: Tensor  # [batch, heads, keys, 64, 64], -inf for future keys


def _scores(
    probe_q: Tensor,
    k: Tensor,
    probe_blocks: Tensor,
    probe_rows: Tensor,
    doc_start: Tensor,
    kv_blocks: Tensor,
    scale: float,
) -> Iterator[ProbeScores]:
    """Scores tile by tile. Each is a product of 64 x dim by dim x 64 matrices wherever the key block lies: same bits."""
    dtype = accumulator_dtype(k)
    batch, _tiles, _, heads, dim = probe_q.shape
    group = heads // k.shape[2]
    keys = k.to(dtype).unflatten(1, (-1, BLOCK)).permute(0, 3, 1, 2, 4)
    position, starts = kv_blocks.long(), doc_start.long()
    inside = torch.arange(BLOCK, device=k.device)
    per_slab = max(1, TILES_PER_SLAB // (batch * heads))
    for tile, (block, (first, last)) in enumerate(zip(probe_blocks.tolist(), probe_rows.tolist(), strict=True)):
        start = int(starts[block])
        reach = ((position >= start) & (position <= block)).nonzero().flatten()
        rows = probe_q[:, tile].to(dtype).transpose(1, 2)
        # split() of nothing gives one empty part.
        for local in reach.split(per_slab) if reach.numel() else ():
            shape = (batch, heads, local.numel(), BLOCK, dim)
            left = rows[:, :, None].expand(shape).reshape(-1, BLOCK, dim)
            right = keys[:, :, None, local].expand(-1, -1, group, -1, -1, -1).reshape(-1, BLOCK, dim)
            scores = torch.bmm(left, right.transpose(1, 2)).mul_(scale).view(batch, heads, -1, BLOCK, BLOCK)
            future = (position[local] == block)[:, None, None] & (inside[None, :] > inside[:, None])
            scores.masked_fill_(future, float("-inf"))
            valid = (inside >= first) & (inside < last)
            yield ProbeScores(tile, valid, local, start + block - position[local], scores)


def _weights(item: ProbeScores, row_max: Tensor) -> Tensor:
    """``rint(exp(s - max) * 2**32)`` as int64; 0 in rows that are no probes."""
    maximum = row_max[:, :, item.tile].masked_fill(~item.valid, float("inf"))
    weights = item.scores.sub_(maximum[:, :, None, :, None]).exp_()
    # A NaN (a model that has diverged) has no defined integer: it has no mass.
    return weights.double().mul_(MASS_UNIT).nan_to_num_(0.0).round_().to(torch.int64)


def probe_row_max(
    probe_q: Tensor,
    k: Tensor,
    probe_blocks: Tensor,
    probe_rows: Tensor,
    block_probes: Tensor,
    doc_start: Tensor,
    kv_blocks: Tensor,
    scale: float,
) -> Tensor:
    """Largest score of each probe row over the local keys ``[batch, heads, tiles, 64]``; ``-inf`` where there is none."""
    batch, tiles, _, heads, _ = probe_q.shape
    row_max = torch.full((batch, heads, tiles, BLOCK), float("-inf"), dtype=accumulator_dtype(k), device=k.device)
    for item in _scores(probe_q, k, probe_blocks, probe_rows, doc_start, kv_blocks, scale):
        best = item.scores.amax((2, 4)).masked_fill_(~item.valid, float("-inf"))
        row_max[:, :, item.tile] = torch.maximum(row_max[:, :, item.tile], best)
    return row_max


def probe_row_sum(
    probe_q: Tensor,
    k: Tensor,
    probe_blocks: Tensor,
    probe_rows: Tensor,
    block_probes: Tensor,
    doc_start: Tensor,
    kv_blocks: Tensor,
    scale: float,
    row_max: Tensor,
) -> Tensor:
    """Sum over the local keys of ``rint(exp(s - max) * 2**32)``, int64 ``[batch, heads, tiles, 64]``."""
    row_sum = torch.zeros(row_max.shape, dtype=torch.int64, device=k.device)
    for item in _scores(probe_q, k, probe_blocks, probe_rows, doc_start, kv_blocks, scale):
        row_sum[:, :, item.tile] += _weights(item, row_max).sum((2, 4))
    return row_sum


def probe_mass(
    probe_q: Tensor,
    k: Tensor,
    probe_blocks: Tensor,
    probe_rows: Tensor,
    block_probes: Tensor,
    doc_start: Tensor,
    kv_blocks: Tensor,
    scale: float,
    row_max: Tensor,
    row_sum: Tensor,
) -> tuple[Tensor, Tensor]:
    """Masses in units of 2**-32 rows: of the local columns ``[batch, heads, seq]`` and of the lines ``[batch, heads, n]``."""
    batch, _, _, heads, _ = probe_q.shape
    local_blocks = k.shape[1] // BLOCK
    column_mass = torch.zeros((batch, heads, local_blocks, BLOCK), dtype=torch.int64, device=k.device)
    slash_mass = torch.zeros((batch, heads, doc_start.numel()), dtype=torch.int64, device=k.device)
    for item in _scores(probe_q, k, probe_blocks, probe_rows, doc_start, kv_blocks, scale):
        total = row_sum[:, :, item.tile].double()
        factor = torch.where(total > 0, MASS_UNIT / total, 0.0)
        mass = _weights(item, row_max).double().mul_(factor[:, :, None, :, None]).round_().to(torch.int64)
        # Within one tile no key block and no distance occurs twice.
        column_mass[:, :, item.local] += mass.sum(3)
        slash_mass[:, :, item.line] += mass.sum((3, 4))
    return column_mass.flatten(2), slash_mass


def probe_columns(
    probe_q: Tensor,
    k: Tensor,
    probe_blocks: Tensor,
    probe_rows: Tensor,
    block_probes: Tensor,
    doc_start: Tensor,
    kv_blocks: Tensor,
    scale: float,
    row_max: Tensor,
    row_sum: Tensor,
    *selection: Any,
) -> tuple[Tensor, Tensor]:
    """The kept columns ``[batch, heads, local blocks]``, 64 to a word, and the masses of the lines ``[batch, heads, n]``.

    ``selection`` are the arguments of :func:`select_lines` after the masses.
    """
    probes = (probe_q, k, probe_blocks, probe_rows, block_probes, doc_start, kv_blocks, scale)
    columns, slash = probe_mass(*probes, row_max, row_sum)
    return select_lines(columns, *selection), slash
