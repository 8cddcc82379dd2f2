"""What one attention call of a rank works with in its rings, and the columns that it gathers (paper, section 3.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from .block_lists import Index
from .comm import Exchange
from .config import BLOCK, MTrainingConfig
from .index import document_table
from .launches import Plan, backward_plan, chunks_per_launch, forward_plan
from .layout import Layout
from .ops import Operators


@dataclass(frozen=True)
class RingCall:
    """What one attention call works with, besides its tensors: the same in forward and backward.

    Attributes:
        index: kept lines, or the row lists of this rank.
        layout: placement of the sequence.
        config: options.
        scale: softmax scale.
        cp_rank: this rank.
        inner_size: ranks of an inner ring (``layout.cp_size``: a flat ring).
        ops: implementation of the operators.
        exchange: carries the transfers; ``None`` on a single rank.
        nodes: nodes that the ranks lie on, whether or not the rings follow them.
    """

    index: Index
    layout: Layout
    config: MTrainingConfig
    scale: float
    cp_rank: int
    inner_size: int
    ops: Operators
    exchange: Exchange | None
    nodes: int = 1

    def plan(self, backward: bool) -> Plan:
        """This rank's launches."""
        outer_size = self.layout.cp_size // self.inner_size
        # A flat ring over several nodes keeps to neighbours: only they leave one crossing of a node's border per step.
        most = 1 if outer_size < self.nodes else self.config.chunks_per_launch
        if most is None:
            most = chunks_per_launch(self.layout.local_seq_len, backward)
        make = backward_plan if backward else forward_plan
        return make(self.cp_rank, self.inner_size, outer_size, most)

    def blocks(self, *chunks: int) -> Tensor:
        """int32 ``[chunks, local_blocks]``: global blocks of chunks."""
        return self.layout.rows(chunks, self.index.slash_words.device)

    @cached_property
    def lines(self) -> tuple[Tensor, Tensor, Tensor]:
        """``(slash_words, doc_start, q_blocks)``, the arguments of every attention operator."""
        words = self.index.slash_words
        return words, document_table(self.index.documents, "doc_start", words.device), self.blocks(self.cp_rank)[0]

    def column_pieces(self, chunks: tuple[int, ...]) -> Iterator[Tensor]:
        """The kept columns of a launch's chunks in pieces of at most ``max_compact_columns`` slots: int32
        ``[batch, heads, slots]``.
        """
        most = min(self.index.column_capacity, len(chunks) * self.layout.local_blocks * BLOCK)
        size = min(-(-most // BLOCK) * BLOCK, self.config.max_compact_columns)
        blocks = self.blocks(*chunks).flatten()
        if len(chunks) > 1:
            blocks = blocks.sort().values
        for first in range(0, most, max(size, 1)):
            yield self.ops.list_columns(self.index.column_words, blocks, size, first)[0]


def compact_capacity(column_capacity: int, config: MTrainingConfig) -> int:
    """Slots of the compact keys of the whole sequence, a multiple of 64; 0 if it keeps no column or they do not fit."""
    capacity = -(-column_capacity // BLOCK) * BLOCK
    return capacity if capacity <= config.max_compact_columns else 0


@dataclass(frozen=True)
class Columns:
    """Compact keys and values of some columns, per query head: ``[batch, heads, slots, dim]``, and their positions."""

    keys: Tensor
    values: Tensor
    positions: Tensor

    @classmethod
    def empty(cls, q: Tensor, positions: Tensor) -> Columns:
        """Slots to gather into. Unused slots stay 0: a masked score times a NaN would still be NaN."""
        shape = (*positions.shape, q.shape[-1])
        return cls(q.new_zeros(shape), q.new_zeros(shape), positions)
