"""Our operators as the benchmark calls them: the passes of one rank, alone or as a virtual rank of a ring."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mtraining import Layout, MTrainingConfig, VerticalSlashIndex
from megatron_mtraining.comm import drive
from megatron_mtraining.documents import Documents
from megatron_mtraining.estimate import Estimation, estimate_steps
from megatron_mtraining.index import document_table
from megatron_mtraining.ops import operators


@dataclass
class Share:
    """The queries of one rank against the chunks of all ranks, as a ring would work them off, without traffic.

    Attributes:
        chunks_per_launch: ring steps worked off by one launch.
    """

    q: Tensor
    k: Tensor  # [chunks, batch, local, kv_heads, dim]
    v: Tensor
    dout: Tensor
    index: VerticalSlashIndex
    layout: Layout
    rank: int
    kernel: str
    deterministic: bool = True
    chunks_per_launch: int = 1

    def __post_init__(self) -> None:
        self.ops = operators(self.kernel, self.q)
        self.scale = self.q.shape[-1] ** -0.5
        table = self.layout.table(self.q.device)
        start = document_table(self.index.documents, "doc_start", self.q.device)
        self.lines = (self.index.slash_words, start, table[self.rank])
        self.table = table
        self.every = torch.arange(self.index.num_blocks, dtype=torch.int32, device=self.q.device)
        self.capacity = -(-self.index.column_capacity // 64) * 64
        batch, seq, heads, dim = self.q.shape
        self.lse = self.q.new_empty((batch, heads, seq), dtype=torch.float32)
        self.out = torch.empty_like(self.q)
        self.partial = torch.empty_like(self.q, dtype=torch.float32) if self.launches > 1 else None
        self.compact = [self.q.new_zeros((batch, heads, self.capacity, dim)) for _ in range(2)]
        self.columns = self.ops.list_columns(self.index.column_words, self.every, self.capacity, 0)[0]

    @property
    def launches(self) -> int:
        """Launches of the slash part."""
        return -(-self.layout.cp_size // self.chunks_per_launch)

    def allocate_gradients(self) -> None:
        """The buffers of the backward pass."""
        self.dq = torch.empty_like(self.q, dtype=torch.float32)
        chunks = self.chunks_per_launch
        self.dk, self.dv = (torch.empty_like(x[:chunks], dtype=torch.float32) for x in (self.k, self.v))
        self.d_compact = [torch.empty_like(x, dtype=torch.float32) for x in self.compact]

    def parts(self) -> list[slice]:
        """The chunks of each launch."""
        size = self.chunks_per_launch
        return [slice(i * size, min((i + 1) * size, self.layout.cp_size)) for i in range(self.launches)]

    def forward(self) -> None:
        """All launches of the forward pass, gathering of columns included."""
        if self.capacity:
            self.columns = self.ops.list_columns(self.index.column_words, self.every, self.capacity, 0)[0]
        for number, part in enumerate(self.parts()):
            last = number + 1 == self.launches
            if self.capacity:
                self.ops.gather_columns_(self.k[part], self.v[part], self.table[part], self.columns, *self.compact)
            compact = (*self.compact, self.columns) if last and self.capacity else (None, None, None)
            self.ops.attention_forward_(
                self.q, self.k[part], self.v[part], *self.lines, self.table[part], *compact, self.scale, number > 0,
                self.ops.arch, self.partial, self.out if last else None, self.lse,
            )  # fmt: skip

    def backward(self) -> None:
        """All launches of the backward pass: delta, columns, slash blocks, scattering."""
        delta = self.ops.attention_delta(self.out, self.dout)
        tail = (self.deterministic, self.ops.arch, self.dq)
        if self.capacity:
            self.ops.vertical_backward_(
                self.q, self.dout, self.lse, delta, *self.compact, self.columns, *self.lines, self.scale, False, *tail,
                *self.d_compact,
            )  # fmt: skip
        for number, part in enumerate(self.parts()):
            size = part.stop - part.start
            self.ops.attention_backward_(
                self.q, self.k[part], self.v[part], self.dout, self.lse, delta, *self.lines, self.table[part],
                self.scale, number > 0 or self.capacity > 0, *tail, self.dk[:size], self.dv[:size],
            )  # fmt: skip
            if self.capacity:
                self.ops.scatter_columns_(
                    *self.d_compact, self.columns, self.table[part], self.dk[:size], self.dv[:size]
                )


def share_pairs(index: VerticalSlashIndex, layout: Layout, rank: int) -> float:
    """Pairs of one rank's queries: by the definitions, from the bitmaps (one document)."""
    slash, columns = index.slash_bits()[0], index.column_bits()[0]
    per_block = columns.unflatten(-1, (-1, 64)).sum(-1).double()
    total = torch.zeros((), dtype=torch.float64, device=slash.device)
    for block in layout.block_position[rank].tolist():
        kept = slash[:, : block + 1].flip(-1)  # entry j: key block j
        total += 4096.0 * kept.sum() + 64.0 * (per_block[:, : block + 1] * ~kept).sum()
    return float(total)


def estimate(q: Tensor, k: Tensor, kernel: str) -> VerticalSlashIndex:
    """The index estimation of one rank that holds the whole sequence."""
    seq_len = q.shape[1]
    estimation = Estimation(
        q=q, k=k, config=MTrainingConfig(kernel=kernel), layout=Layout.striped(seq_len, 1),
        documents=Documents.single(seq_len), cp_rank=0, scale=q.shape[-1] ** -0.5, ops=operators(kernel, q),
    )  # fmt: skip
    return drive(estimate_steps(estimation), None)
