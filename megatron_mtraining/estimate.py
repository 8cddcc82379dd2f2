"""Online estimation of the index under context parallelism: the entry to the policies (paper, section 3.1)."""

from __future__ import annotations

from torch import Tensor

from .config import MTrainingConfig
from .documents import Documents
from .layout import Layout
from .ops import Operators
from .policies import POLICIES, Estimation, IndexSteps
from .policies.lines import column_capacity
from .policies.select import select_lines

__all__ = ["column_capacity", "estimate_steps", "select_lines"]


def estimate_steps(
    q: Tensor,
    k: Tensor,
    *,
    config: MTrainingConfig,
    layout: Layout,
    documents: Documents,
    cp_rank: int,
    scale: float,
    ops: Operators,
) -> IndexSteps:
    """Estimates the index of all samples and heads by ``config.index_policy``; yields the collectives it needs.

    Args:
        q: ``[batch, local_blocks * 64, heads, head_dim]``, the rank's queries in the order of ``layout``.
        k: ``[batch, local_blocks * 64, kv_heads, head_dim]``.
        config, layout, documents: the same on all ranks.
        cp_rank: this rank.
        scale: softmax scale.
        ops: implementation of the operators.

    Returns:
        Lines, with the same bits on every rank, for every number of ranks and layout (of one implementation), or the row
        lists of this rank.
    """
    return POLICIES[config.index_policy](Estimation(q, k, config, layout, documents, cp_rank, scale, ops))
