"""FlexPrefill's query-aware choice (arXiv 2502.20766): row by row where pooled scores are a good estimate, lines elsewhere.

Per head (and document): the mean of the probe rows against the mean keys of all blocks estimates how the probe attends the
blocks. Where that is within ``flexprefill_tau`` (square root of the Jensen-Shannon divergence) of what the probe does, the
head is query-aware: of all (row, block) pairs, estimated by their means, the heaviest are kept up to ``top_p`` of the mass.
The other heads keep the vertical and slash lines that hold ``top_p`` of the probe's mass, as whole blocks. Own block and
first block are always kept. Deviations: blocks of 64 instead of 128 tokens; block lines are chosen by the mass that blocks
hold (the original counts token lines, divides by the block size and takes that many blocks); no minimum budget.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from ..bitmap import WORD, unpack_bits
from ..block_lists import BlockListIndex
from ..budget import MASS_UNIT_BITS, Selection
from ..comm import Collective
from ..config import BLOCK
from ..index import document_table
from .estimation import Estimation, Steps
from .lines import ProbeMass, index_tables, probe_masses
from .rows import RowTables, block_means, gather_blocks, pooled_scores, row_lists, row_slabs, tables_of
from .select import select_lines

TOTAL_BITS = 42
"""Bits of the mass of all rows together: its product with the denominator of a share (10**6) stays below 2**63."""


def flexprefill_steps(call: Estimation) -> Generator[Collective, Tensor, BlockListIndex]:
    """The row lists of a rank."""
    tables = tables_of(call)
    lines = index_tables(call.documents, call.layout, call.cp_rank, call.config, call.device)
    mass = yield from probe_masses(call, lines)
    local = mass.columns.unflatten(-1, (-1, BLOCK)).sum(-1)
    columns = yield from gather_blocks(local.transpose(1, 2).contiguous(), call.layout)
    columns = columns.transpose(1, 2).contiguous()
    keys = yield from gather_blocks(block_means(call.k, tables), call.layout)
    kept = yield from _line_blocks(call, tables, mass, columns)
    aware = yield from _aware_blocks(call, tables, keys)
    return row_lists(call, torch.where(_is_aware(call, tables, mass, columns, keys), aware, kept), tables)


def _line_blocks(call: Estimation, tables: RowTables, mass: ProbeMass, columns: Tensor) -> Steps:
    """Bool ``[batch, heads, rows, n]``: the blocks of the vertical and slash lines that hold the share of the mass."""
    documents, config = call.documents, call.config
    count = len(documents.starts)
    segment = document_table(documents, "doc_id", call.device)
    tie = torch.arange(documents.num_blocks, dtype=torch.int32, device=call.device)
    words = []
    for share, weights in ((config.slash_share, mass.slash), (config.vertical_share, columns)):
        plan = Selection.make(share, None, last_q=config.last_q, lines=documents.num_blocks, documents=count)
        chosen = yield from select_lines(weights, segment, tie, plan, count, call.ops, shared=True)
        words.append(unpack_bits(chosen, documents.num_blocks))
    slash, vertical = words
    block = torch.arange(documents.num_blocks, device=call.device)
    line = tables.doc_start[tables.blocks][:, None] + tables.blocks[:, None] - block
    return slash[:, :, line.clamp(0, documents.num_blocks - 1)] | vertical[:, :, None, :]


def _aware_blocks(call: Estimation, tables: RowTables, keys: Tensor) -> Steps:
    """Bool ``[batch, heads, rows, n]``: of all pairs of a row and a block of a document, those with the most pooled mass."""
    queries = block_means(call.q, tables)
    batch, rows, heads, _ = queries.shape
    blocks = tables.real.numel()
    width = -(-blocks // WORD) * WORD
    unit = 2.0 ** min(MASS_UNIT_BITS, TOTAL_BITS - (blocks - 1).bit_length())
    mass = torch.zeros((batch, heads, rows, width), dtype=torch.int64, device=call.device)
    for slab in row_slabs(rows, batch * heads * blocks):
        score = pooled_scores(queries[:, slab], keys, call.scale)
        score.masked_fill_(~tables.reach[slab], float("-inf"))
        mass[:, :, slab, :blocks] = score.softmax(-1).mul_(unit).round_().to(torch.int64)
    document = document_table(call.documents, "doc_id", call.device)[tables.blocks][:, None]
    segment = torch.nn.functional.pad(torch.where(tables.reach, document, -1), (0, width - blocks), value=-1)
    segment = segment.to(torch.int32).flatten()
    count = len(call.documents.starts)
    plan = Selection.make(call.config.slash_share, None, last_q=1, lines=segment.numel(), documents=count)
    words = yield from select_lines(
        mass.flatten(2), segment, torch.zeros_like(segment), plan, count, call.ops, shared=call.layout.cp_size == 1
    )
    return unpack_bits(words.unflatten(-1, (rows, width // WORD)), blocks)


def _is_aware(call: Estimation, tables: RowTables, mass: ProbeMass, columns: Tensor, keys: Tensor) -> Tensor:
    """Bool ``[batch, heads, rows, 1]``: whether the row's head is query-aware in the row's document."""
    documents = call.documents
    document = document_table(documents, "doc_id", call.device).long()
    probes = index_tables(documents, call.layout, call.cp_rank, call.config, call.device).probes
    inside = torch.arange(BLOCK, device=call.device)
    valid = (inside >= probes.rows[:, :1]) & (inside < probes.rows[:, 1:])
    sums = torch.where(valid[None, :, :, None, None], mass.probe_q, 0).sum(2, dtype=torch.float64)
    tile_document = document[probes.blocks.long()]
    member = (tile_document[None, :] == torch.arange(len(documents.starts), device=call.device)[:, None]).double()
    queries = torch.einsum("gt,bthd->bghd", member, sums) / (member @ valid.sum(1).double())[None, :, None, None]
    score = pooled_scores(queries, keys, call.scale)
    other = torch.arange(len(documents.starts), device=call.device)[:, None] != document[None, :]
    estimate = score.masked_fill_(other | (tables.real == 0), float("-inf")).softmax(-1)
    truth = columns[:, :, None, :].double().masked_fill(other, 0.0)
    truth = truth / truth.sum(-1, keepdim=True).clamp(min=1.0)
    middle = (estimate + truth) / 2
    # xlogy: 0 where the first factor is, whatever the second.
    divergence = sum(
        (torch.special.xlogy(p, p) - torch.special.xlogy(p, middle)).sum(-1) / 2 for p in (estimate, truth)
    )
    aware = torch.as_tensor(divergence).clamp(min=0).sqrt() < call.config.flexprefill_tau
    return aware[:, :, document[tables.blocks]][..., None]
