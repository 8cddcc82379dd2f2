"""The runs that are compared: dense attention and the sparse configurations, by name."""

from __future__ import annotations

from megatron_mtraining import MTrainingConfig

DENSE = "dense"
VARIANTS: dict[str, MTrainingConfig | None] = {
    DENSE: None,
    "ring-dense": MTrainingConfig(dense=True),
    "top-p-0.95": MTrainingConfig(top_p=0.95),
    "top-p-0.90": MTrainingConfig(top_p=0.90),
}
"""``dense`` is cuDNN's SDPA, ``ring-dense`` this project's own kernel with every distance on."""


def variant(name: str) -> MTrainingConfig | None:
    """The configuration of a run; None for dense.

    Raises:
        ValueError: for a name that is not in :data:`VARIANTS`.
    """
    if name not in VARIANTS:
        raise ValueError(f"variant {name!r}: must be one of {', '.join(VARIANTS)}")
    return VARIANTS[name]
