"""Ways to attend in a training step at one fixed sparsity: ours, the same ring zigzag, the paper's baselines, dense.

Random weights attend to nearly everything, so ``top_p`` alone would not be sparse. Budgets do what a trained model's
concentration does: caps of the lines of ``top_p`` and of MInference's fixed choice, gates of MoBA, the share of XAttention. The
first steps fit them so that the density is the wanted one; it is measured in every step, over all layers and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.problems import COLUMN_SHARE, SLASH_SHARE
from benchmarks.ring import megatron_dense
from benchmarks.ring.gathered import attend as dense_on_one
from megatron_mtraining import Layout, MTrainingConfig
from megatron_mtraining.attention import attention_on_groups
from megatron_mtraining.block_lists import Index
from megatron_mtraining.comm import RingGroups
from megatron_mtraining.config import BLOCK
from megatron_mtraining.simulator.memory import Model

GATE = 512
"""Tokens of a block of MoBA's gate."""


def top_gates(gates: float, density: float) -> int:
    """How many of ``gates`` every row keeps to come nearest a density: half of its own one, all of the others."""

    def kept(count: int) -> float:
        return (2 * count - 1) / gates - count * (count - 1) / gates**2

    return min(range(1, math.ceil(gates) + 1), key=lambda count: abs(kept(count) - density))


@dataclass(frozen=True)
class System:
    """How to attend.

    Attributes:
        policy: the index policy; ``None``: dense, by Transformer Engine's ring (one rank: cuDNN).
    """

    name: str
    layout: str
    policy: str | None

    def config(self, seq_len: int, density: float, multiple: float = 1.0) -> MTrainingConfig:
        """Options whose index keeps about ``density``; budgets are ``multiple`` times those of a guess.

        Raises:
            ValueError: for a dense system, which has no index.
        """
        if self.policy is None:
            raise ValueError(f"{self.name}: has no index")
        share = multiple * density / (SLASH_SHARE + COLUMN_SHARE)
        slash = max(1, round(share * SLASH_SHARE * seq_len / BLOCK))
        vertical = round(share * COLUMN_SHARE * seq_len)
        options: dict[str, dict[str, float]] = {
            "top_p": {"max_slash": slash, "max_vertical": vertical},
            "fixed": {"fixed_slash": slash, "fixed_vertical": vertical},
            "moba": {"moba_block_size": GATE, "moba_top_k": top_gates(seq_len / GATE, density)},
            "xattention": {"top_p": min(1.0, round(multiple * density, 4))},
        }
        return MTrainingConfig(layout=self.layout, index_policy=self.policy, **options[self.policy])  # type: ignore[arg-type]

    @property
    def fitted(self) -> bool:
        """Whether its budgets are to be fitted to the density; MoBA's follow from counting."""
        return self.policy not in (None, "moba")


SYSTEMS = {
    "ours": System("ours", "striped", "top_p"),
    "zigzag": System("ours, zigzag", "zigzag", "top_p"),
    "minference": System("MInference (fixed), zigzag", "zigzag", "fixed"),
    "moba": System("MoBA, zigzag", "zigzag", "moba"),
    "xattention": System("XAttention, zigzag", "zigzag", "xattention"),
    "dense": System("dense", "zigzag", None),
}
"""On one rank all layouts are the same."""


@dataclass
class Sparse:
    """Attention under an index that every call estimates; notes how dense it is.

    Args:
        groups: the process groups of the ring.
        multiple: of the budgets that are first guessed.
        limit: calls whose index is noted, in ``indices``.
    """

    system: System
    seq_len: int
    density: float
    groups: RingGroups
    multiple: float = 1.0
    limit: int = 0
    indices: list[Index] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = self.system.config(self.seq_len, self.density, self.multiple)
        self.layout = Layout.from_config(self.config, self.seq_len, self.groups.cp_size)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What ``benchmarks.ring.transformer`` calls."""
        out, aux = attention_on_groups(
            q, k, v, config=self.config, groups=self.groups, layout=self.layout, return_aux=True
        )  # fmt: skip
        if len(self.indices) < self.limit:
            self.indices.append(aux.index)
        return out

    def note(self, calls: int) -> None:
        """The next calls' indices are noted."""
        self.indices, self.limit = [], calls

    def measured_density(self) -> float:
        """Mean of the noted calls, over all ranks; collective."""
        mean = torch.stack([index.density() for index in self.indices]).mean()
        if self.groups.cp_size > 1:
            dist.all_reduce(mean, group=self.groups.cp)
        return float(mean) / self.groups.cp_size

    def fit(self) -> None:
        """Scales the budgets by what the noted calls missed the density by."""
        self.multiple *= self.density / self.measured_density()
        self.config = self.system.config(self.seq_len, self.density, self.multiple)


def dense_attend(model: Model, groups: RingGroups) -> tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """``(implementation, attend)`` of dense attention: cuDNN on one rank, Transformer Engine's p2p ring on several.

    Raises:
        RuntimeError: several ranks without Transformer Engine.
    """
    if groups.cp is None or groups.cp_size == 1:
        return "cuDNN", lambda q, k, v: dense_on_one(q, k, v, True).transpose(1, 2)
    if not megatron_dense.installed():
        raise RuntimeError("dense on several ranks: needs Transformer Engine, which is not installed")
    module = megatron_dense.attention(model.heads, model.kv_heads, model.head_dim, groups.cp)
    return "Transformer Engine p2p", lambda q, k, v: module(q, k, v.contiguous()).view(q.shape)
