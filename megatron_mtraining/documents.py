"""Documents of a packed sequence, and the probe rows of each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .config import BLOCK


@dataclass(frozen=True)
class Documents:
    """Where the documents of a sequence begin and how long they are. One document is the plain case.

    Attributes:
        seq_len: length of the sequence in tokens, padding included.
        starts: first block of each document, ascending, beginning with 0.
        lengths: real (non-padding) tokens of each document; the rest up to the next document is padding.
    """

    seq_len: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        ends = (*self.starts[1:], self.num_blocks)
        fits = len(self.starts) == len(self.lengths) > 0 and self.starts[0] == 0
        if not fits or any(a >= b for a, b in zip(self.starts, ends, strict=True)):
            raise ValueError(
                f"documents start at blocks {self.starts} of {self.num_blocks} with lengths {self.lengths}: starts must ascend "
                f"from 0, one for each length"
            )
        for start, end, length in zip(self.starts, ends, self.lengths, strict=True):
            room = min(end * BLOCK, self.seq_len) - start * BLOCK
            if not 1 <= length <= room:
                raise ValueError(f"a document of {length} tokens at block {start}: must be from 1 to {room}")

    @classmethod
    def single(cls, seq_len: int) -> Documents:
        """One document that fills the sequence."""
        return cls(seq_len, (0,), (seq_len,))

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Sequence[int] | Tensor, seq_len: int, cu_seqlens_padded: Sequence[int] | Tensor | None = None
    ) -> Documents:
        """Documents from cumulative lengths ``[num_documents + 1]``, without and (if padded) with padding.

        Raises:
            ValueError: if a document does not begin at a multiple of 64, does not fit its padded length, or the last one
                does not end with the sequence.
        """
        real = [int(x) for x in cu_seqlens]
        padded = real if cu_seqlens_padded is None else [int(x) for x in cu_seqlens_padded]
        if len(real) < 2 or len(real) != len(padded) or real[0] != 0 or padded[0] != 0:
            raise ValueError(f"cu_seqlens={real}, cu_seqlens_padded={padded}: must begin with 0 and have equal lengths")
        lengths = [b - a for a, b in itertools.pairwise(real)]
        spans = [b - a for a, b in itertools.pairwise(padded)]
        for start, length, span in zip(padded, lengths, spans, strict=False):
            if start % BLOCK:
                raise ValueError(
                    f"cu_seqlens: a document begins at token {start}, which is no multiple of {BLOCK}; pad the documents to "
                    f"multiples of {BLOCK} and pass cu_seqlens_padded"
                )
            if length < 1 or length > span:
                raise ValueError(f"cu_seqlens: a document of {length} tokens in {span} tokens of padded length")
        if padded[-1] > seq_len or -(-padded[-1] // BLOCK) != -(-seq_len // BLOCK):
            raise ValueError(f"cu_seqlens: the documents end at {padded[-1]}, the sequence at {seq_len}")
        return cls(seq_len, tuple(p // BLOCK for p in padded[:-1]), tuple(lengths))

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole sequence."""
        return -(-self.seq_len // BLOCK)

    @property
    def spans(self) -> tuple[int, ...]:
        """Blocks of each document, padding included."""
        ends = (*self.starts[1:], self.num_blocks)
        return tuple(end - start for start, end in zip(self.starts, ends, strict=True))

    @property
    def real_blocks(self) -> tuple[int, ...]:
        """Blocks of each document that hold real tokens."""
        return tuple(-(-length // BLOCK) for length in self.lengths)

    @cached_property
    def doc_id(self) -> Tensor:
        """int32 ``[num_blocks]``: the document of each block (on the CPU)."""
        return torch.repeat_interleave(torch.arange(len(self.starts), dtype=torch.int32), torch.tensor(self.spans))

    @cached_property
    def doc_start(self) -> Tensor:
        """int32 ``[num_blocks]``: the first block of each block's document (on the CPU)."""
        return torch.tensor(self.starts, dtype=torch.int32)[self.doc_id.long()]

    @cached_property
    def doc_end(self) -> Tensor:
        """int32 ``[num_blocks]``: one past the last block of each block's document (on the CPU)."""
        ends = torch.tensor([s + m for s, m in zip(self.starts, self.spans, strict=True)], dtype=torch.int32)
        return ends[self.doc_id.long()]


@dataclass(frozen=True)
class ProbeTables:
    """The probe tiles: which rows of which blocks estimate the index (paper, section 3.1).

    Attributes:
        blocks: int32 ``[tiles]``, the global block of each tile.
        rows: int32 ``[tiles, 2]``, first and one past the last probe row within the tile.
        block_probes: int32 ``[num_blocks, 2]``, the range of tiles that belong to each block's document.
        segments: int32 ``[tiles]``, which part of its document a tile stands for, counted from the document's end.
    """

    blocks: Tensor
    rows: Tensor
    block_probes: Tensor
    segments: Tensor

    @classmethod
    def make(cls, documents: Documents, last_q: int, segments: int = 1) -> ProbeTables:
        """The tiles that hold the last ``last_q`` rows of each segment of each document (all its rows if it has fewer)."""
        blocks: list[int] = []
        rows: list[tuple[int, int]] = []
        numbers: list[int] = []
        ranges: list[tuple[int, int]] = []
        for start, length in zip(documents.starts, documents.lengths, strict=True):
            begin = len(blocks)
            ends = segment_ends(length, last_q, segments)
            for number, end in reversed(list(enumerate(ends))):
                first = max(0, end - last_q)
                for block in range(first // BLOCK, -(-end // BLOCK)):
                    blocks.append(start + block)
                    rows.append((max(first - block * BLOCK, 0), min(end - block * BLOCK, BLOCK)))
                    numbers.append(number)
            ranges.append((begin, len(blocks)))
        return cls(
            torch.tensor(blocks, dtype=torch.int32),
            torch.tensor(rows, dtype=torch.int32),
            torch.tensor(ranges, dtype=torch.int32)[documents.doc_id.long()],
            torch.tensor(numbers, dtype=torch.int32),
        )

    def only(self, kept: Tensor) -> ProbeTables:
        """The tables of some tiles alone, in the same order; ``kept``: bool ``[tiles]``."""
        before = torch.nn.functional.pad(kept.long().cumsum(0), (1, 0)).to(torch.int32)
        ranges = before[self.block_probes.long()]
        return ProbeTables(self.blocks[kept], self.rows[kept], ranges, self.segments[kept])

    def to(self, device: torch.device | str) -> ProbeTables:
        """The same tables on a device."""
        return ProbeTables(*(x.to(device) for x in (self.blocks, self.rows, self.block_probes, self.segments)))


def segment_ends(length: int, last_q: int, segments: int) -> list[int]:
    """Where the segments of a document end, in tokens from its start, the last one first.

    A document is cut into ``segments`` equal parts, or into fewer so that each has ``last_q`` rows (at least one part). All
    ends but the document's own are multiples of 64, so that a tile is a whole block.
    """
    count = min(segments, max(1, length // last_q))
    return [length, *((count - number) * length // count // BLOCK * BLOCK for number in range(1, count))]
