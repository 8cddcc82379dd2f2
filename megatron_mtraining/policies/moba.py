"""MoBA's block gating (arXiv 2502.13189): each row attends the key blocks whose mean key its query likes best.

The key blocks of the gate (``moba_block_size`` tokens, counted from the start of a document) are larger than the 64 tokens
of this package. The ``moba_top_k`` best are kept, the row's own among them, as in the original. Deviation: the original
gates every query token; here the 64 queries of a row block are gated together, by their mean.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import lru_cache

import torch
from torch import Tensor

from ..block_lists import BlockListIndex
from ..comm import Collective
from ..config import BLOCK
from ..documents import Documents
from .estimation import Estimation
from .rows import block_means, block_sums, gather_blocks, pooled_scores, row_lists, row_slabs, tables_of
from .select import row_top_k


@lru_cache(maxsize=32)
def gate_tables(documents: Documents, gate_blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``(members int64 [gates, gate_blocks], gate int64 [n])``: the blocks of each gate (``n``: none), the gate of a block."""
    members: list[list[int]] = []
    gate = torch.empty(documents.num_blocks, dtype=torch.int64)
    for start, span in zip(documents.starts, documents.spans, strict=True):
        for first in range(start, start + span, gate_blocks):
            last = min(first + gate_blocks, start + span)
            gate[first:last] = len(members)
            members.append([*range(first, last), *[documents.num_blocks] * (gate_blocks - last + first)])
    return torch.tensor(members).to(device), gate.to(device)


def moba_steps(call: Estimation) -> Generator[Collective, Tensor, BlockListIndex]:
    """The row lists of a rank; one collective, the sums of the keys of all blocks."""
    tables = tables_of(call)
    members, gate = gate_tables(call.documents, call.config.moba_block_size // BLOCK, call.device)
    sums = yield from gather_blocks(block_sums(call.k, tables), call.layout)
    # A block more, of zeros, for the places of a gate that no block fills.
    sums = torch.nn.functional.pad(sums, (0, 0, 0, 0, 0, 1))
    tokens = torch.nn.functional.pad(tables.real, (0, 1))[members].sum(1)
    means = sums[:, members].sum(2) / tokens.clamp(min=1)[None, :, None, None]
    queries = block_means(call.q, tables)
    batch, rows, heads, _ = queries.shape
    first = members[:, 0]
    own = gate[tables.blocks]
    kept = torch.empty((batch, heads, rows, gate.numel()), dtype=torch.bool, device=call.device)
    for slab in row_slabs(rows, batch * heads * members.shape[0]):
        score = pooled_scores(queries[:, slab], means, 1.0)
        mine = own[slab][:, None]
        start = tables.doc_start[tables.blocks[slab]][:, None]
        number = torch.arange(members.shape[0], device=call.device)[None, :]
        score.masked_fill_((number > mine) | (first[None, :] < start), float("-inf"))
        score.masked_fill_(number == mine, float("inf"))
        kept[:, :, slab] = row_top_k(score, call.config.moba_top_k)[..., gate]
    return row_lists(call, kept, tables)
