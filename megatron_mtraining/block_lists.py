"""Row lists ("block lists"): an index that keeps other key blocks in every row block, as MoBA or XAttention choose them.

Such a mask is not Toeplitz, so it is not replicated: each rank holds the rows of its own queries, one bit a key block. The
operators take it in place of slash words (docs/design.md, "Row lists"); nothing else of the ring knows the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from .bitmap import WORD, count_bits, pack_bits, unpack_bits
from .config import BLOCK
from .documents import Documents
from .index import VerticalSlashIndex, document_table
from .layout import Layout


@dataclass(frozen=True)
class BlockListIndex:
    """Kept key blocks of each row block of some rows: all of the sequence, or those of one rank.

    Row block ``i`` attends key block ``j`` of its document iff ``j <= i`` and bit ``j`` of its row is set (``j == i``: the
    lower triangle). Bits beyond the row's own block or outside its document mean nothing.

    Attributes:
        slash_words: int64 ``[batch, heads, rows, ceil(n / 64)]``; bit ``j`` of a row: key block ``j`` (global).
            The bit of the row's own block must be set (the attention functions set it in any case).
        row_blocks: the global block of each row.
        documents: the documents of the sequence; ``n`` is its number of blocks.

    Raises:
        ValueError: for words of another dtype or shape, or rows outside the sequence.
    """

    slash_words: Tensor
    row_blocks: tuple[int, ...]
    documents: Documents

    column_capacity = 0
    """Row lists keep no single columns."""

    def __post_init__(self) -> None:
        words, expected = self.slash_words, (len(self.row_blocks), -(-self.num_blocks // WORD))
        if words.dtype != torch.int64 or words.dim() != 4 or tuple(words.shape[2:]) != expected:
            raise ValueError(
                f"slash_words are {words.dtype} of shape {tuple(words.shape)}: must be int64 "
                f"[batch, heads, {expected[0]}, {expected[1]}]"
            )
        if any(not 0 <= block < self.num_blocks for block in self.row_blocks):
            raise ValueError(f"row_blocks={self.row_blocks}: must be from 0 to {self.num_blocks - 1}")

    @classmethod
    def from_mask(
        cls, blocks: Tensor, *, documents: Documents, row_blocks: Sequence[int] | None = None
    ) -> BlockListIndex:
        """An index from a bool tensor ``[batch, heads, rows, n]``; ``row_blocks`` names the rows (default: all blocks)."""
        rows = tuple(range(documents.num_blocks)) if row_blocks is None else tuple(row_blocks)
        return cls(pack_rows(blocks), rows, documents).keeping_diagonal()

    @classmethod
    def from_lines(cls, index: VerticalSlashIndex) -> BlockListIndex:
        """The same block pairs as the slash lines of ``index``, row by row; its columns are left out."""
        device = index.slash_words.device
        block = torch.arange(index.num_blocks, device=device)
        start = document_table(index.documents, "doc_start", device).long()
        distance = block[:, None] - block[None, :]
        kept = (distance >= 0) & (start[:, None] == start[None, :])
        line = torch.where(kept, start[:, None] + distance, 0)
        return cls.from_mask(index.slash_bits()[:, :, line] & kept, documents=index.documents)

    @classmethod
    def of_ranks(cls, parts: Sequence[BlockListIndex]) -> BlockListIndex:
        """The whole index from the parts of all ranks."""
        rows = torch.tensor([block for part in parts for block in part.row_blocks])
        words = torch.cat([part.slash_words for part in parts], 2)
        order = torch.argsort(rows)
        return cls(words[:, :, order.to(words.device)], tuple(rows[order].tolist()), parts[0].documents)

    def local(self, layout: Layout, cp_rank: int) -> BlockListIndex:
        """The rows of one rank of ``layout``, out of those here.

        Raises:
            ValueError: if some of them are not here.
        """
        wanted = tuple(layout.block_position[cp_rank].tolist())
        if wanted == self.row_blocks:
            return self
        place = {block: row for row, block in enumerate(self.row_blocks)}
        if not set(wanted) <= set(place):
            raise ValueError(
                f"index has the rows of {len(place)} blocks: it must have all rows, or those of rank {cp_rank} of the "
                f"{layout.kind} layout in its order"
            )
        rows = torch.tensor([place[block] for block in wanted], device=self.slash_words.device)
        return BlockListIndex(self.slash_words[:, :, rows], wanted, self.documents)

    def keeping_diagonal(self) -> BlockListIndex:
        """The same index with the own block of every row kept."""
        own = own_block_words(self.row_blocks, self.num_blocks, self.slash_words.device)
        return replace(self, slash_words=self.slash_words | own)

    @property
    def column_words(self) -> Tensor:
        """int64 ``[batch, heads, n]`` of zeros: there are no columns."""
        return self.slash_words.new_zeros((*self.slash_words.shape[:2], self.num_blocks))

    @property
    def seq_len(self) -> int:
        """Global sequence length in tokens."""
        return self.documents.seq_len

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence."""
        return self.documents.num_blocks

    def kept_words(self) -> Tensor:
        """``slash_words`` with only the bits that mean something."""
        device = self.slash_words.device
        return self.slash_words & reachable_words(self.documents, self.row_blocks, device)

    def block_bits(self) -> Tensor:
        """Bool ``[batch, heads, rows, n]``: the kept block pairs."""
        return unpack_bits(self.kept_words(), self.num_blocks)

    def block_pairs(self) -> Tensor:
        """int64 ``[batch, heads]``: kept pairs of blocks among the rows here."""
        return count_bits(self.kept_words()).sum((-1, -2))

    def pairs(self) -> Tensor:
        """int64 ``[batch, heads]``: query-key pairs that are worked off, ``4096`` a block pair."""
        return BLOCK * BLOCK * self.block_pairs()

    def density(self) -> Tensor:
        """fp64 scalar: pairs over those of the causal half matrix, each scaled by the share of the rows that are here."""
        share = len(self.row_blocks) / self.num_blocks
        return (self.pairs().double() / (share * self.seq_len**2 / 2)).mean()

    def to_mask(self) -> Tensor:
        """Bool ``[batch, heads, seq_len, seq_len]``: which key each query attends. For small sequences with all rows here.

        Raises:
            ValueError: if this is the index of one rank of several.
        """
        if self.row_blocks != tuple(range(self.num_blocks)):
            raise ValueError(f"to_mask() of {len(self.row_blocks)} rows: it needs all {self.num_blocks} in their order")
        position = torch.arange(self.seq_len, device=self.slash_words.device)
        block = position // BLOCK
        return self.block_bits()[:, :, block][..., block] & (position[:, None] >= position[None, :])


Index = VerticalSlashIndex | BlockListIndex
"""What attention runs under: lines that all ranks share, or the row lists of each rank."""


def index_of_words(
    slash_words: Tensor, column_words: Tensor, documents: Documents, column_capacity: int, row_blocks: tuple[int, ...]
) -> Index:
    """The index that its words belong to: row lists have a dimension more than lines."""
    if slash_words.dim() == 4:
        return BlockListIndex(slash_words, row_blocks, documents)
    return VerticalSlashIndex(slash_words, column_words, documents, column_capacity)


def local_index(index: Index, layout: Layout, cp_rank: int) -> Index:
    """What a rank works with: all lines, or its own rows; the diagonal kept."""
    part = index if isinstance(index, VerticalSlashIndex) else index.local(layout, cp_rank)
    return part.keeping_diagonal()


def pack_rows(bits: Tensor) -> Tensor:
    """Bool ``[batch, heads, rows, n]`` -> int64 ``[batch, heads, rows, ceil(n / 64)]``, a head at a time to save memory."""
    batch, heads, rows, blocks = bits.shape
    words = torch.empty((batch, heads, rows, -(-blocks // WORD)), dtype=torch.int64, device=bits.device)
    for sample in range(batch):
        for head in range(heads):
            words[sample, head] = pack_bits(bits[sample, head])
    return words


@lru_cache(maxsize=64)
def own_block_words(row_blocks: tuple[int, ...], blocks: int, device: torch.device) -> Tensor:
    """int64 ``[rows, ceil(blocks / 64)]``: the bit of each row's own block."""
    own = torch.arange(blocks)[None, :] == torch.tensor(row_blocks)[:, None]
    return pack_bits(own).to(device)


@lru_cache(maxsize=64)
def reachable_words(documents: Documents, row_blocks: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 ``[rows, ceil(n / 64)]``: the bits of each row that mean something, its document up to its own block."""
    rows, block = torch.tensor(row_blocks)[:, None], torch.arange(documents.num_blocks)[None, :]
    start = documents.doc_start.long()[rows]
    return pack_bits((block <= rows) & (block >= start)).to(device)
