"""Online estimation of the index under context parallelism: the entry to the policies (paper, section 3.1)."""

from __future__ import annotations

from .policies import POLICIES, Estimation, IndexSteps

__all__ = ["Estimation", "estimate_steps"]


def estimate_steps(estimation: Estimation) -> IndexSteps:
    """Estimates the index of all samples and heads by ``config.index_policy``; yields the collectives it needs.

    Returns:
        Lines, with the same bits on every rank, for every number of ranks and layout (of one implementation), or the row
        lists of this rank.
    """
    return POLICIES[estimation.config.index_policy](estimation)
