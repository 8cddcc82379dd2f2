"""Online estimation of the index under context parallelism (paper, section 3.1; docs/design.md, "Mass" and "Top-p")."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .bitmap import pack_bits
from .budget import STATE_FIELDS, Selection
from .comm import AllGather, AllReduce, Collective
from .config import BLOCK, MTrainingConfig
from .documents import Documents, ProbeTables
from .index import VerticalSlashIndex, document_table
from .layout import Layout
from .ops import Operators

Steps = Generator[Collective, Tensor, Tensor]


@dataclass(frozen=True)
class IndexTables:
    """Everything about one rank's part of an estimation that depends on shapes alone, on the device.

    Attributes:
        probes: the probe tiles.
        owned: ``(tile, local block)`` of the probe tiles whose rows this rank holds.
        doc_start: int32 ``[n]``.
        kv_blocks: int32 ``[local_blocks]``, global block of each local block.
        slash_segment, slash_tie: int32 ``[n]`` of the slash lines, see :func:`_slash_tables`.
        column_segment, column_tie: int32 ``[local_blocks * 64]`` of the local columns, see :func:`_column_tables`.
        forced_slash, forced_columns: int64 words of the lines that are always kept.
    """

    probes: ProbeTables
    owned: tuple[tuple[int, int], ...]
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


@lru_cache(maxsize=32)
def index_tables(
    documents: Documents, layout: Layout, cp_rank: int, config: MTrainingConfig, device: torch.device
) -> IndexTables:
    """The tables of one rank, made once per (documents, layout, config, device)."""
    probes = ProbeTables.make(documents, config.last_q)
    local = {int(block): place for place, block in enumerate(layout.block_position[cp_rank].tolist())}
    owned = tuple((tile, local[block]) for tile, block in enumerate(probes.blocks.tolist()) if block in local)
    blocks = layout.block_position[cp_rank]
    slash_segment, slash_tie, distance = _slash_tables(documents)
    column_segment, column_tie = _column_tables(documents, blocks)
    # Tokens from the start of each document: sinks are the first of them.
    offset = torch.arange(documents.num_blocks * BLOCK) - documents.doc_start.repeat_interleave(BLOCK) * BLOCK
    return IndexTables(
        probes=probes.to(device),
        owned=owned,
        doc_start=document_table(documents, "doc_start", device),
        kv_blocks=blocks.to(device),
        slash_segment=slash_segment.to(device),
        slash_tie=slash_tie.to(device),
        column_segment=column_segment.to(device),
        column_tie=column_tie.to(device),
        forced_slash=pack_bits(distance < min(config.local_blocks, documents.num_blocks)).to(device),
        forced_columns=pack_bits(offset < min(config.sink_tokens, documents.seq_len)).to(device),
    )


def column_capacity(documents: Documents, config: MTrainingConfig) -> int:
    """Most columns that an estimated index can keep per head."""
    if config.dense:
        return 0
    cap = documents.seq_len if config.max_vertical is None else config.max_vertical + config.sink_tokens
    return min(sum(min(span * BLOCK, cap) for span in documents.spans), documents.num_blocks * BLOCK)


def estimate_steps(
    q: Tensor,
    k: Tensor,
    *,
    config: MTrainingConfig,
    layout: Layout,
    documents: Documents,
    cp_rank: int,
    scale: float,
    ops: Operators,
) -> Generator[Collective, Tensor, VerticalSlashIndex]:
    """Estimates the index of all samples and heads; yields the collectives it needs.

    Args:
        q: ``[batch, local_blocks * 64, heads, head_dim]``, the rank's queries in the order of ``layout``.
        k: ``[batch, local_blocks * 64, kv_heads, head_dim]``.
        config, layout, documents: the same on all ranks.
        cp_rank: this rank.
        scale: softmax scale.
        ops: implementation of the operators.

    Returns:
        The index, with the same bits on every rank, for every number of ranks and layout (of one implementation).
    """
    tables = index_tables(documents, layout, cp_rank, config, q.device)
    batch, _, heads, dim = q.shape
    probe_q = q.new_zeros((batch, tables.probes.blocks.numel(), BLOCK, heads, dim))
    for tile, block in tables.owned:
        probe_q[:, tile] = q[:, block * BLOCK : (block + 1) * BLOCK]
    if layout.cp_size > 1:
        # Each row is non-zero on one rank only, so the sum is exact in any type.
        probe_q = yield AllReduce(probe_q)
    probes = tables.probes
    args = (probe_q, k, probes.blocks, probes.rows, probes.block_probes, tables.doc_start, tables.kv_blocks, scale)
    row_max = yield AllReduce(ops.probe_row_max(*args), "max")
    row_sum = yield AllReduce(ops.probe_row_sum(*args, row_max))
    column_mass, local_slash_mass = ops.probe_mass(*args, row_max, row_sum)
    slash_mass = yield AllReduce(local_slash_mass)

    lines = {"last_q": config.last_q, "documents": len(documents.starts)}
    slash = Selection.make(config.slash_share, config.max_slash, lines=documents.num_blocks, **lines)
    vertical = Selection.make(config.vertical_share, config.max_vertical, lines=documents.num_blocks * BLOCK, **lines)
    slash_words = yield from select_lines(
        slash_mass, tables.slash_segment, tables.slash_tie, slash, len(documents.starts), ops, shared=True
    )
    local_words = yield from select_lines(
        column_mass, tables.column_segment, tables.column_tie, vertical, len(documents.starts), ops, shared=False
    )
    gathered = yield AllGather(local_words)
    words = gathered.permute(1, 2, 0, 3).flatten(2)
    if layout.cp_size > 1:
        words = words[..., layout.inverse(q.device).long()]
    return VerticalSlashIndex(
        slash_words | tables.forced_slash,
        words | tables.forced_columns,
        documents,
        column_capacity(documents, config),
    )


def select_lines(
    mass: Tensor, segment: Tensor, tie: Tensor, selection: Selection, documents: int, ops: Operators, *, shared: bool
) -> Steps:
    """Top-p selection with a cap of the lines with the given masses.

    Args:
        mass: int64 ``[batch, heads, lines]``.
        segment: int32 ``[lines]``, the document of each line, -1 for a line that is no candidate.
        tie: int32 ``[lines]``, unique within a document; the larger wins a tie at the cap.
        selection: the budget.
        documents: number of documents.
        ops: implementation of the operators.
        shared: whether every rank has all lines; otherwise each has its own and the histograms are all-reduced.

    Returns:
        int64 words of the kept lines, ``[batch, heads, ceil(lines / 64)]``.
    """
    state = mass.new_zeros((*mass.shape[:2], documents, STATE_FIELDS))
    rounds = (selection.digit_bits, selection.mass_rounds, selection.tie_rounds)
    for number in range(selection.rounds):
        histogram = ops.select_histogram(mass, segment, tie, state, number, *rounds, selection.all_lines)
        if not shared:
            histogram = yield AllReduce(histogram)
        share = selection.share
        ops.select_update_(histogram, state, number, *rounds, share.numerator, share.denominator, selection.cap)
    return ops.select_pack(mass, segment, tie, state, selection.all_lines)
