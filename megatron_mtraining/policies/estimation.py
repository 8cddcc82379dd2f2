"""What every index policy is given, and the type of what it returns."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..block_lists import Index
from ..comm import Collective
from ..config import MTrainingConfig
from ..documents import Documents
from ..layout import Layout
from ..ops import Operators

Steps = Generator[Collective, Tensor, Tensor]
"""A computation of a tensor that yields the collectives it waits for."""

IndexSteps = Generator[Collective, Tensor, Index]
"""The same of an index."""


@dataclass(frozen=True)
class Estimation:
    """One estimation on one rank.

    Attributes:
        q: ``[batch, local_blocks * 64, heads, head_dim]``, the rank's queries in the order of ``layout``.
        k: ``[batch, local_blocks * 64, kv_heads, head_dim]``.
        config, layout, documents: the same on all ranks.
        cp_rank: this rank.
        scale: softmax scale.
        ops: implementation of the operators.
    """

    q: Tensor
    k: Tensor
    config: MTrainingConfig
    layout: Layout
    documents: Documents
    cp_rank: int
    scale: float
    ops: Operators

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.q.device

    @property
    def row_blocks(self) -> tuple[int, ...]:
        """The global blocks of this rank's rows, known on the host."""
        return tuple(self.layout.block_position[self.cp_rank].tolist())
