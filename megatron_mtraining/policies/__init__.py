"""Index policies: how the kept pairs are chosen. Ours and, to compare with, published ones, as values of the config.

A policy is a generator (:data:`estimation.IndexSteps`) that yields the collectives it needs and returns an index; the ring
and the operators do not know which one it was. ``docs/baselines.md`` says what each keeps and where it deviates.
"""

from collections.abc import Callable

from .estimation import Estimation, IndexSteps
from .flexprefill import flexprefill_steps
from .lines import line_steps
from .moba import moba_steps
from .xattention import xattention_steps

POLICIES: dict[str, Callable[[Estimation], IndexSteps]] = {
    "top_p": line_steps,
    "fixed": line_steps,
    "flexprefill": flexprefill_steps,
    "xattention": xattention_steps,
    "moba": moba_steps,
}

__all__ = ["POLICIES", "Estimation", "IndexSteps"]
