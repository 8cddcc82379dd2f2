"""Policies that keep whole lines: top-p of the probe mass (paper, section 3.1), and fixed budgets (MInference).

docs/design.md, "Mass" and "Top-p".
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from ..bitmap import pack_bits
from ..budget import Selection
from ..comm import AllGather, AllReduce, Broadcast, Collective
from ..config import BLOCK, ROW_LIST_POLICIES, MTrainingConfig
from ..documents import Documents, ProbeTables
from ..index import VerticalSlashIndex, document_table
from ..layout import Layout
from .estimation import Estimation, Steps
from .select import select_lines, select_over_ranks

MINFERENCE_SINKS = 30
"""Tokens at the start that MInference's vertical lines always hold."""

MINFERENCE_LOCAL_BLOCKS = 2
"""Block distances that cover the 100 token diagonals which MInference's slash lines always hold."""


@dataclass(frozen=True)
class ProbeSegment:
    """The probe tiles of one segment of every document that has so many (all tiles, where there is one segment).

    Attributes:
        probes: the tables of these tiles alone.
        tiles: their numbers among all tiles, int64; None: all of them.
        candidates: int32 ``[local_blocks * 64]``, the document of each local column that a later row of the segment can need,
            -1 for the others.
    """

    probes: ProbeTables
    tiles: Tensor | None
    candidates: Tensor

    def of(self, x: Tensor, dim: int) -> Tensor:
        """The part of ``x`` that belongs to the segment's tiles, which lie along ``dim``."""
        return x if self.tiles is None else x.index_select(dim, self.tiles)

    def to(self, device: torch.device) -> ProbeSegment:
        """The same tables on a device."""
        tiles = None if self.tiles is None else self.tiles.to(device)
        return ProbeSegment(self.probes.to(device), tiles, self.candidates.to(device))


@dataclass(frozen=True)
class HeldTiles:
    """Where the rows of the probe tiles lie.

    Attributes:
        tiles: number of tiles.
        places: ``(tile, local block)`` of those whose rows this rank holds.
        source: the rank that holds the rows of the first tile.
    """

    tiles: int
    places: tuple[tuple[int, int], ...]
    source: int

    @classmethod
    def of(cls, probes: ProbeTables, layout: Layout, cp_rank: int) -> HeldTiles:
        """For tables on the CPU."""
        blocks = probes.blocks.tolist()
        local = {block: place for place, block in enumerate(layout.block_position[cp_rank].tolist())}
        places = tuple((tile, local[block]) for tile, block in enumerate(blocks) if block in local)
        return cls(len(blocks), places, int(layout.inverse("cpu")[blocks[0]]) // layout.local_blocks)


@dataclass(frozen=True)
class IndexTables:
    """Everything about one rank's part of an estimation that depends on shapes alone, on the device.

    Attributes:
        probes: the probe tiles.
        segments: the same by segment, the documents' ends first.
        held: which probe tiles' rows this rank holds.
        doc_start: int32 ``[n]``.
        kv_blocks: int32 ``[local_blocks]``, global block of each local block.
        slash_segment, slash_tie: int32 ``[n]`` of the slash lines, see :func:`_slash_tables`.
        column_segment, column_tie: int32 ``[local_blocks * 64]`` of the local columns, see :func:`_column_tables`.
        forced_slash, forced_columns: int64 words of the lines that are always kept.
    """

    probes: ProbeTables
    segments: tuple[ProbeSegment, ...]
    held: HeldTiles
    doc_start: Tensor
    kv_blocks: Tensor
    slash_segment: Tensor
    slash_tie: Tensor
    column_segment: Tensor
    column_tie: Tensor
    forced_slash: Tensor
    forced_columns: Tensor


def _slash_tables(documents: Documents) -> tuple[Tensor, Tensor, Tensor]:
    """(segment, tie, distance) of the slash lines: entry ``doc_start + d``; a smaller distance wins a tie."""
    distance = torch.arange(documents.num_blocks, dtype=torch.int32) - documents.doc_start
    return documents.doc_id, documents.num_blocks - 1 - distance, distance


def _column_tables(documents: Documents, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(segment, tie) of the columns of some global blocks; a later position wins a tie.

    The columns of a document's last real block, and those of its padding, reach no real row: they are no candidates.
    """
    last = torch.tensor([s + m - 1 for s, m in zip(documents.starts, documents.real_blocks, strict=True)])
    candidate = blocks < last[documents.doc_id.long()][blocks.long()]
    segment = torch.where(candidate, documents.doc_id[blocks.long()], -1).to(torch.int32)
    position = blocks[:, None] * BLOCK + torch.arange(BLOCK, dtype=torch.int32)
    return segment.repeat_interleave(BLOCK), position.flatten()


def _probe_segments(probes: ProbeTables, blocks: Tensor, columns: Tensor) -> tuple[ProbeSegment, ...]:
    """The tiles by segment, on the CPU.

    Args:
        probes: all tiles.
        blocks: int32 ``[local_blocks]``, the rank's blocks.
        columns: int32 ``[local_blocks * 64]``, the document of each column that any later row can need, -1 for the others.
    """
    count = int(probes.segments.max()) + 1
    if count == 1:
        return (ProbeSegment(probes, None, columns),)
    found = []
    for number in range(count):
        kept = probes.segments == number
        some = probes.only(kept)
        first, end = some.block_probes.long().unbind(1)
        # The block of the document's last tile: its own columns and later ones reach rows of the segment at distance 0 only.
        last = torch.where(end > first, some.blocks[(end - 1).clamp(min=0)].long(), -1)[blocks.long()]
        candidates = torch.where((blocks < last).repeat_interleave(BLOCK), columns, -1)
        found.append(ProbeSegment(some, kept.nonzero().flatten(), candidates))
    return tuple(found)


@lru_cache(maxsize=32)
def index_tables(
    documents: Documents, layout: Layout, cp_rank: int, config: MTrainingConfig, device: torch.device
) -> IndexTables:
    """The tables of one rank, made once per (documents, layout, config, device)."""
    probes = ProbeTables.make(documents, config.last_q, config.probe_segments)
    blocks = layout.block_position[cp_rank]
    slash_segment, slash_tie, distance = _slash_tables(documents)
    column_segment, column_tie = _column_tables(documents, blocks)
    # Tokens from the start of each document: sinks are the first of them.
    local_blocks, sink_tokens = forced_lines(config)
    offset = torch.arange(documents.num_blocks * BLOCK) - documents.doc_start.repeat_interleave(BLOCK) * BLOCK
    return IndexTables(
        probes=probes.to(device),
        segments=tuple(segment.to(device) for segment in _probe_segments(probes, blocks, column_segment)),
        held=HeldTiles.of(probes, layout, cp_rank),
        doc_start=document_table(documents, "doc_start", device),
        kv_blocks=blocks.to(device),
        slash_segment=slash_segment.to(device),
        slash_tie=slash_tie.to(device),
        column_segment=column_segment.to(device),
        column_tie=column_tie.to(device),
        forced_slash=pack_bits(distance < min(local_blocks, documents.num_blocks)).to(device),
        forced_columns=pack_bits(offset < min(sink_tokens, documents.seq_len)).to(device),
    )


def forced_lines(config: MTrainingConfig) -> tuple[int, int]:
    """``(block distances, first tokens)`` that are always kept."""
    if config.index_policy == "fixed":
        return max(config.local_blocks, MINFERENCE_LOCAL_BLOCKS), max(config.sink_tokens, MINFERENCE_SINKS)
    return config.local_blocks, config.sink_tokens


def line_budgets(config: MTrainingConfig, documents: Documents) -> tuple[Selection, Selection]:
    """How slash lines and vertical lines are selected: by share and cap, or (fixed budgets) by the cap alone."""
    fixed = config.index_policy == "fixed"
    shares = (Fraction(1), Fraction(1)) if fixed else (config.slash_share, config.vertical_share)
    caps = (config.fixed_slash, config.fixed_vertical) if fixed else (config.max_slash, config.max_vertical)
    lines = (documents.num_blocks, documents.num_blocks * BLOCK)
    slash, vertical = (
        Selection.make(share, cap, lines=count, last_q=config.last_q, documents=len(documents.starts))
        for share, cap, count in zip(shares, caps, lines, strict=True)
    )
    return slash, vertical


def column_capacity(documents: Documents, config: MTrainingConfig) -> int:
    """Most columns that an estimated index can keep per head."""
    if config.dense or config.index_policy in ROW_LIST_POLICIES:
        return 0
    most = config.fixed_vertical if config.index_policy == "fixed" else config.max_vertical
    cap = documents.seq_len if most is None else most * config.probe_segments + forced_lines(config)[1]
    return min(sum(min(span * BLOCK, cap) for span in documents.spans), documents.num_blocks * BLOCK)


@dataclass(frozen=True)
class Probes:
    """The probe rows and their softmax, on every rank.

    Attributes:
        rows: ``[batch, tiles, 64, heads, head_dim]``.
        where: the operands of the probe operators that say where the keys lie, and the softmax scale.
        row_max: fp32 ``[batch, heads, tiles, 64]``, largest score of each row over all keys.
        row_sum: int64, the same shape: its weights ``exp(s - max)`` in units of 2**-32.
    """

    rows: Tensor
    where: tuple[Any, ...]
    row_max: Tensor
    row_sum: Tensor

    def of(self, segment: ProbeSegment, k: Tensor) -> tuple[Any, ...]:
        """The operands of the third pass over the tiles of one segment."""
        some = segment.probes
        tables = (some.blocks, some.rows, some.block_probes)
        return (
            segment.of(self.rows, 1), k, *tables, *self.where, segment.of(self.row_max, 2), segment.of(self.row_sum, 2)
        )  # fmt: skip


@dataclass(frozen=True)
class ProbeMass:
    """Masses of the probe rows, in units of 2**-32 of a row, of each segment for itself.

    Attributes:
        slash: int64 ``[batch, segments * heads, n]`` of the slash lines, on every rank; entry ``doc_start + distance``.
        columns: int64 ``[batch, segments * heads, local_blocks * 64]`` of the rank's own columns.
        probe_q: ``[batch, tiles, 64, heads, head_dim]``: the probe rows, on every rank.
    """

    slash: Tensor
    columns: Tensor
    probe_q: Tensor


def gather_probe_rows(q: Tensor, held: HeldTiles, cp_size: int) -> Steps:
    """The probe rows ``[batch, tiles, 64, heads, head_dim]``, on every rank, from its own queries ``q``."""
    batch, _, heads, dim = q.shape
    blocks = {tile: q[:, block * BLOCK : (block + 1) * BLOCK] for tile, block in held.places}
    if held.tiles == 1:  # of one rank
        probe_q = blocks[0][:, None] if blocks else q.new_empty((batch, 1, BLOCK, heads, dim))
        return probe_q if cp_size == 1 else (yield Broadcast(probe_q, held.source))
    probe_q = q.new_zeros((batch, held.tiles, BLOCK, heads, dim))
    for tile, rows in blocks.items():
        probe_q[:, tile] = rows
    if cp_size > 1:
        # Each row is non-zero on one rank only, so the sum is exact in any type.
        probe_q = yield AllReduce(probe_q)
    return probe_q


def probe_softmax(call: Estimation, tables: IndexTables) -> Generator[Collective, Tensor, Probes]:
    """Maximum and sum of the probe rows over the keys of all ranks."""
    probe_q = yield from gather_probe_rows(call.q, tables.held, call.layout.cp_size)
    probes, where = tables.probes, (tables.doc_start, tables.kv_blocks, call.scale)
    arguments = (probe_q, call.k, probes.blocks, probes.rows, probes.block_probes, *where)
    row_max = yield AllReduce(call.ops.probe_row_max(*arguments), "max")
    row_sum = yield AllReduce(call.ops.probe_row_sum(*arguments, row_max))
    return Probes(probe_q, where, row_max, row_sum)


def probe_masses(call: Estimation, tables: IndexTables) -> Generator[Collective, Tensor, ProbeMass]:
    """Attention of the probe rows over all keys, summed by line."""
    mass = yield from _local_masses(call, tables)
    whole = yield AllReduce(mass.slash)
    return replace(mass, slash=whole)


def _local_masses(call: Estimation, tables: IndexTables) -> Generator[Collective, Tensor, ProbeMass]:
    """The same over the keys of this rank: the masses of the slash lines are parts of sums."""
    probes = yield from probe_softmax(call, tables)
    columns, slashes = [], []
    for segment in tables.segments:
        vertical, slash = call.ops.probe_mass(*probes.of(segment, call.k))
        if len(tables.segments) > 1:  # segments share the table of candidates: what is none of theirs gets no mass
            vertical.masked_fill_(segment.candidates < 0, 0)
        columns.append(vertical)
        slashes.append(slash)
    return ProbeMass(_side_by_side(slashes), _side_by_side(columns), probes.rows)


def _side_by_side(parts: list[Tensor]) -> Tensor:
    """``[batch, segments * heads, ...]`` of the segments' ``[batch, heads, ...]``."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _union(words: Tensor, segments: int, budget: Selection) -> Tensor:
    """Words ``[batch, heads, ...]`` of the lines that any of the segments keeps, ``[batch, segments * heads, ...]``.

    Where every line is kept, up to the cap, the documents' ends alone choose: a segment's lines without mass may lie beyond it.
    """
    parts = words.chunk(segments, 1)
    return parts[0] if budget.all_lines else reduce(torch.bitwise_or, parts)


def _kept_columns(
    call: Estimation, tables: IndexTables, budget: Selection
) -> Generator[Collective, Tensor, tuple[Tensor, Tensor]]:
    """Words of the kept columns ``[batch, heads, n]`` and masses of the slash lines (see ``ProbeMass``), on every rank."""
    count, ops, segments = len(call.documents.starts), call.ops, len(tables.segments)
    if call.layout.cp_size == 1:  # one operator: the masses of the columns need not be in memory
        probes = yield from probe_softmax(call, tables)
        found = [
            ops.probe_columns(
                *probes.of(segment, call.k), segment.candidates, tables.column_tie, count, *budget.arguments
            )
            for segment in tables.segments
        ]
        words, slashes = ([pair[place] for pair in found] for place in (0, 1))
        return _union(_side_by_side(words), segments, budget), _side_by_side(slashes)
    mass = yield from _local_masses(call, tables)
    local_words, (slash,) = yield from select_over_ranks(
        mass.columns, tables.column_segment, tables.column_tie, budget, count, ops, along=(mass.slash,)
    )
    gathered = yield AllGather(_union(local_words, segments, budget))
    return in_sequence(gathered, call.layout), slash


def line_steps(call: Estimation) -> Generator[Collective, Tensor, VerticalSlashIndex]:
    """The index of lines. The same bits on every rank, for every number of ranks and layout (of one implementation)."""
    documents = call.documents
    tables = index_tables(documents, call.layout, call.cp_rank, call.config, call.device)
    slash, vertical = line_budgets(call.config, documents)
    column_words, slash_mass = yield from _kept_columns(call, tables, vertical)
    slash_words = yield from select_lines(
        slash_mass, tables.slash_segment, tables.slash_tie, slash, len(documents.starts), call.ops, shared=True
    )
    return VerticalSlashIndex(
        _union(slash_words, len(tables.segments), slash) | tables.forced_slash,
        column_words | tables.forced_columns,
        documents,
        column_capacity(documents, call.config),
    )


def in_sequence(gathered: Tensor, layout: Layout) -> Tensor:
    """``[ranks, batch, heads, local_blocks]`` of all ranks as ``[batch, heads, n]`` in the order of the sequence."""
    _, batch, heads, _ = gathered.shape
    return torch.take(gathered, _places(layout, batch, heads, gathered.device))


@lru_cache(maxsize=32)
def _places(layout: Layout, batch: int, heads: int, device: torch.device) -> Tensor:
    """int64 ``[batch, heads, n]``: where the words of every block lie in what :func:`in_sequence` is given."""
    inverse, local = layout.inverse("cpu").long(), layout.local_blocks
    row = torch.arange(batch * heads).view(batch, heads, 1)
    return ((inverse // local * (batch * heads) + row) * local + inverse % local).to(device)
