"""How much of the probe's attention an index keeps: the measure of an index's quality, exact and the same on every rank.

The probe rows are those that the index was estimated from (paper, section 3.1). Their mass is summed in integers, as in
estimation, so the recall has the same bits on all ranks, for all layouts, and in recompute.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from .attention import make_context, pad_to_blocks
from .bitmap import unpack_bits
from .comm import AllReduce, Collective, RingGroups, drive
from .config import BLOCK, MTrainingConfig
from .documents import Documents, ProbeTables
from .index import VerticalSlashIndex, document_table
from .layout import Layout
from .metrics import timed
from .nvtx import nvtx_range
from .ops import Operators, operators
from .policies.lines import HeldTiles, gather_probe_rows
from .ring_op import aligned, exactly


def probe_recall(
    q: Tensor,
    k: Tensor,
    index: VerticalSlashIndex,
    *,
    config: MTrainingConfig | None = None,
    layout: Layout | None = None,
    cp_group: dist.ProcessGroup | None = None,
    softmax_scale: float | None = None,
    segments: int | None = None,
) -> Tensor:
    """The share of the probe rows' true attention mass that lies on kept lines, each pair counted once.

    Costs about as much as estimating the index, and no synchronisation with the host.

    Args:
        q: ``[batch, local_seq, heads, head_dim]``, this rank's queries in the order of ``layout``.
        k: ``[batch, local_seq, kv_heads, head_dim]``.
        index: the kept lines of the whole sequence, however they were found.
        config: its ``last_q``, ``probe_segments`` and ``kernel``, and its ``layout`` if none is given.
        layout, cp_group, softmax_scale: as in :func:`megatron_mtraining.mtraining_attention`.
        segments: look at the ends of so many parts of each document instead of the config's: with more parts than the index
            was estimated from it is judged by rows that did not choose it.

    Returns:
        fp64 ``[batch, heads, documents]``, from 0 to 1; the same bits on every rank.

    Raises:
        ValueError: for inputs that do not fit together.
    """
    config = replace(config or MTrainingConfig(), ring="flat")  # no ring runs here
    groups = RingGroups(cp_group)
    context = make_context(
        q, k, k, config, groups, layout=layout, softmax_scale=softmax_scale, documents=index.documents
    )
    q, k = (aligned(pad_to_blocks(x.detach())) for x in (q, k))
    with exactly(q), nvtx_range("mtraining recall", q.device), timed("recall", q.device), torch.no_grad():
        steps = recall_steps(
            q,
            k,
            index.keeping_diagonal(),
            last_q=config.last_q,
            segments=config.probe_segments if segments is None else segments,
            layout=context.layout,
            cp_rank=groups.cp_rank,
            scale=context.scale,
            ops=operators(config.kernel, q),
        )
        return drive(steps, cp_group)


def recall_steps(
    q: Tensor,
    k: Tensor,
    index: VerticalSlashIndex,
    *,
    last_q: int,
    segments: int = 1,
    layout: Layout,
    cp_rank: int,
    scale: float,
    ops: Operators,
) -> Generator[Collective, Tensor, Tensor]:
    """:func:`probe_recall` of one rank, on whole blocks; yields the collectives it needs."""
    tables = _recall_tables(index.documents, (last_q, segments), layout, cp_rank, q.device)
    batch, _, heads, _ = q.shape
    probe_q = yield from gather_probe_rows(q, tables.held, layout.cp_size)
    where = (tables.doc_start, tables.kv_blocks, scale)
    probes = tables.probes
    args = (probe_q, k, probes.blocks, probes.rows, probes.block_probes, *where)
    row_max = yield AllReduce(ops.probe_row_max(*args), "max")
    row_sum = yield AllReduce(ops.probe_row_sum(*args, row_max))

    slash = index.slash_bits()
    columns = unpack_bits(index.column_words[..., tables.kv_blocks.long()], layout.local_blocks * BLOCK)
    sums = row_sum.new_zeros((batch, heads, len(index.documents.starts), 2))
    for group in tables.groups:
        # One tile a document: the distance of a column from it is known, so pairs on two lines are seen.
        some, tiles = group.probes, group.tiles
        column_mass, slash_mass = ops.probe_mass(
            probe_q[:, tiles].contiguous(), k, some.blocks, some.rows, some.block_probes, *where,
            row_max[:, :, tiles].contiguous(), row_sum[:, :, tiles].contiguous(),
        )  # fmt: skip
        outside = (columns & ~slash[..., group.line].repeat_interleave(BLOCK, -1)).unflatten(-1, (-1, BLOCK))
        outside = outside & group.earlier[:, None]
        kept_columns = (column_mass.unflatten(-1, (-1, BLOCK)) * outside).sum(-1)
        sums[..., 0].index_add_(-1, tables.doc_of_line, slash_mass * slash)
        sums[..., 0].index_add_(-1, tables.doc_of_block, kept_columns)
        sums[..., 1].index_add_(-1, tables.doc_of_line, slash_mass)
    sums = yield AllReduce(sums)
    return sums[..., 0].double() / sums[..., 1].clamp(min=1).double()


@dataclass(frozen=True)
class _Group:
    """The probe tiles of which every document has at most one.

    Attributes:
        probes: the tables of these tiles alone.
        tiles: int64 ``[tiles]``, their numbers.
        earlier: bool ``[local_blocks]``, whether a local key block lies before the tile of its document.
        line: int64 ``[local_blocks]``, the entry among the slash lines of its distance from that tile.
    """

    probes: ProbeTables
    tiles: Tensor
    earlier: Tensor
    line: Tensor


@dataclass(frozen=True)
class _RecallTables:
    """What depends on shapes alone, on the device: all tiles, who holds them, the groups, and documents of entries."""

    probes: ProbeTables
    held: HeldTiles
    groups: tuple[_Group, ...]
    doc_start: Tensor
    kv_blocks: Tensor
    doc_of_line: Tensor
    doc_of_block: Tensor


@lru_cache(maxsize=32)
def _recall_tables(
    documents: Documents, probe_rows: tuple[int, int], layout: Layout, cp_rank: int, device: torch.device
) -> _RecallTables:
    """The tables for (rows of a segment, segments of a document)."""
    probes = ProbeTables.make(documents, *probe_rows)
    mine = layout.block_position[cp_rank]
    most = int((probes.block_probes[:, 1] - probes.block_probes[:, 0]).max())
    doc_of_block = documents.doc_id[mine.long()].long()
    return _RecallTables(
        probes=probes.to(device),
        held=HeldTiles.of(probes, layout, cp_rank),
        groups=tuple(_group(documents, probes, mine.long(), number, device) for number in range(most)),
        doc_start=document_table(documents, "doc_start", device),
        kv_blocks=mine.to(device),
        doc_of_line=documents.doc_id.long().to(device),
        doc_of_block=doc_of_block.to(device),
    )


def _group(documents: Documents, probes: ProbeTables, mine: Tensor, number: int, device: torch.device) -> _Group:
    """The ``number``-th tile of every document that has so many."""
    first, end = probes.block_probes.long().unbind(1)
    tiles = (first + number)[first + number < end].unique()
    has_one = first + number < end
    renumbered = torch.searchsorted(tiles, first + number)
    ranges = torch.stack([renumbered, renumbered + has_one.long()], 1).int()
    row_block = torch.where(has_one, probes.blocks[(first + number).clamp(max=probes.blocks.numel() - 1)].long(), -1)
    distance = row_block[mine] - mine
    some = ProbeTables(probes.blocks[tiles], probes.rows[tiles], ranges, probes.segments[tiles])
    line = documents.doc_start[mine].long() + distance.clamp(min=0)
    return _Group(some.to(device), tiles.to(device), (distance > 0).to(device), line.to(device))
