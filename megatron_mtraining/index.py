"""The vertical-slash index: which lines of the attention matrix are kept (paper, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from .bitmap import WORD, count_bits, pack_bits, unpack_bits
from .config import BLOCK
from .documents import Documents


@dataclass(frozen=True)
class VerticalSlashIndex:
    """Kept lines of every sample and query head, replicated on all ranks.

    Query block ``i`` attends key block ``j`` of its document iff distance ``i - j`` is kept (``j == i``: the lower
    triangle), and key column ``c`` of an earlier block iff ``c`` is kept and ``i - block(c)`` is not.

    Attributes:
        slash_words: int64 ``[batch, heads, ceil(n / 64)]``; bit ``doc_start + d``: distance ``d`` of that document.
            Distance 0 must be kept everywhere (the attention functions keep it in any case).
        column_words: int64 ``[batch, heads, n]``; bit ``c`` of word ``j``: key position ``64 * j + c``.
        documents: the documents of the sequence; ``n`` is its number of blocks.
        column_capacity: an upper bound, known on the host, of the kept columns of any head; columns over it are lost.

    Raises:
        ValueError: for words of another dtype or shape.
    """

    slash_words: Tensor
    column_words: Tensor
    documents: Documents
    column_capacity: int

    def __post_init__(self) -> None:
        blocks = self.documents.num_blocks
        for name, words, length in (
            ("slash", self.slash_words, -(-blocks // WORD)),
            ("column", self.column_words, blocks),
        ):
            if words.dtype != torch.int64 or words.dim() != 3 or words.shape[-1] != length:
                raise ValueError(
                    f"{name}_words are {words.dtype} of shape {tuple(words.shape)}: must be int64 [batch, heads, {length}]"
                )
        if self.slash_words.shape[:2] != self.column_words.shape[:2]:
            raise ValueError(
                f"slash_words and column_words are for {tuple(self.slash_words.shape[:2])} and "
                f"{tuple(self.column_words.shape[:2])} samples and heads: must be equal"
            )

    @classmethod
    def from_lines(
        cls,
        slash: Sequence[Sequence[Sequence[int]]],
        vertical: Sequence[Sequence[Sequence[int]]],
        *,
        seq_len: int,
        documents: Documents | None = None,
        device: torch.device | str = "cpu",
    ) -> VerticalSlashIndex:
        """An index from nested lists ``[batch][head]`` of block distances and of key positions.

        Distance 0 is added where it is missing. With several documents a distance is kept in each document that is long
        enough for it.

        Raises:
            ValueError: for a distance or a position outside the sequence, or lists of different shape.
        """
        documents = documents or Documents.single(seq_len)
        blocks = documents.num_blocks
        if documents.seq_len != seq_len:
            raise ValueError(f"documents are for {documents.seq_len} tokens: the sequence has {seq_len}")
        if not slash or not slash[0]:
            raise ValueError("slash and vertical must name at least one sample and one head")
        if [len(heads) for heads in slash] != [len(heads) for heads in vertical] or len({len(h) for h in slash}) > 1:
            raise ValueError("slash and vertical must be nested lists [batch][head] of the same shape")
        slash_bits = torch.zeros(len(slash), len(slash[0]), blocks, dtype=torch.bool)
        column_bits = torch.zeros(len(slash), len(slash[0]), blocks * BLOCK, dtype=torch.bool)
        distance = torch.arange(blocks) - documents.doc_start
        for sample, heads in enumerate(slash):
            for head, distances in enumerate(heads):
                positions = vertical[sample][head]
                if any(not 0 <= d < blocks for d in distances):
                    raise ValueError(
                        f"slash[{sample}][{head}]={list(distances)}: distances must be from 0 to {blocks - 1}"
                    )
                if any(not 0 <= c < seq_len for c in positions):
                    raise ValueError(
                        f"vertical[{sample}][{head}]={list(positions)}: positions must be from 0 to {seq_len - 1}"
                    )
                slash_bits[sample, head] = torch.isin(distance, torch.tensor([0, *distances]))
                column_bits[sample, head, list(positions)] = True
        capacity = int(column_bits.sum(-1).max())
        return cls(pack_bits(slash_bits).to(device), pack_bits(column_bits).to(device), documents, capacity)

    @classmethod
    def dense(
        cls, batch: int, heads: int, documents: Documents, device: torch.device | str = "cpu"
    ) -> VerticalSlashIndex:
        """Every distance kept: causal attention within documents."""
        blocks = documents.num_blocks
        row = pack_bits(torch.ones(blocks, dtype=torch.bool, device=device))
        columns = torch.zeros(1, 1, 1, dtype=torch.int64, device=device)
        slash = row.expand(batch, heads, -1).contiguous()
        return cls(slash, columns.expand(batch, heads, blocks).contiguous(), documents, 0)

    def keeping_diagonal(self) -> VerticalSlashIndex:
        """The same index with distance 0 kept in every document."""
        words = self.slash_words | diagonal_words(self.documents, self.slash_words.device)
        return replace(self, slash_words=words)

    @property
    def seq_len(self) -> int:
        """Global sequence length in tokens."""
        return self.documents.seq_len

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence."""
        return self.documents.num_blocks

    def slash_bits(self) -> Tensor:
        """Bool ``[batch, heads, n]``: entry ``doc_start + d``: distance ``d`` of that document is kept."""
        return unpack_bits(self.slash_words, self.num_blocks)

    def column_bits(self) -> Tensor:
        """Bool ``[batch, heads, seq_len]``: the kept key positions."""
        return unpack_bits(self.column_words, self.seq_len)

    def block_pairs(self) -> Tensor:
        """int64 ``[batch, heads]``: kept pairs of blocks."""
        blocks = torch.arange(self.num_blocks, device=self.slash_words.device)
        rows = document_table(self.documents, "doc_end", self.slash_words.device) - blocks
        return (self.slash_bits() * rows).sum(-1)

    def column_pairs(self) -> Tensor:
        """int64 ``[batch, heads]``: kept pairs of a row block and a key column outside the kept block pairs."""
        device = self.slash_words.device
        start = document_table(self.documents, "doc_start", device).long()
        later = document_table(self.documents, "doc_end", device) - 1 - torch.arange(self.num_blocks, device=device)
        below = self.slash_bits().cumsum(-1)
        covered = below[..., start + later] - below[..., start]
        return (count_bits(self.column_words) * (later - covered)).sum(-1)

    def pairs(self) -> Tensor:
        """int64 ``[batch, heads]``: query-key pairs that are worked off, ``4096`` a block pair and 64 a column pair."""
        return BLOCK * BLOCK * self.block_pairs() + BLOCK * self.column_pairs()

    def density(self) -> Tensor:
        """fp64 scalar: pairs over ``batch * heads * seq_len**2 / 2`` (dense causal attention: ``1 + 64 / seq_len``)."""
        return (self.pairs().double() / (self.seq_len**2 / 2)).mean()

    def to_mask(self) -> Tensor:
        """Bool ``[batch, heads, seq_len, seq_len]``: which key each query attends. For small sequences."""
        position = torch.arange(self.seq_len, device=self.slash_words.device)
        block = position // BLOCK
        start = document_table(self.documents, "doc_start", self.slash_words.device).long()[block]
        distance = block[:, None] - block[None, :]
        earlier = (start[:, None] == start[None, :]) & (distance >= 0)
        line = torch.where(earlier, start[:, None] + distance, 0)
        slash = self.slash_bits()[:, :, line] & earlier
        vertical = self.column_bits()[:, :, None, :] & earlier & (distance > 0)
        return (slash & (position[:, None] >= position[None, :])) | (vertical & ~slash)


@lru_cache(maxsize=64)
def document_table(documents: Documents, name: str, device: torch.device | str) -> Tensor:
    """A table of ``documents`` (``doc_id``, ``doc_start`` or ``doc_end``, int32 ``[n]``) on a device; copied there once."""
    table: Tensor = getattr(documents, name)
    return table.to(device)


@lru_cache(maxsize=64)
def diagonal_words(documents: Documents, device: torch.device | str) -> Tensor:
    """int64 ``[ceil(n / 64)]``: the slash words of distance 0 alone, on a device; copied there once."""
    return pack_bits(documents.doc_start == torch.arange(documents.num_blocks)).to(device)
