"""The runs that are compared, by name: dense attention, the library's configurations, and the study's own estimator."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_mtraining import MTrainingConfig

DENSE = "dense"
GUARD_SEGMENTS = 16
LATE = 13
"""First layer, from 1, of those that look far back: the earlier ones turn nearly dense with segments and gain nothing."""

LATE_CONFIGS = {
    "segments-4-0.9": MTrainingConfig(top_p=0.9, probe_segments=4),
    "segments-8-0.9": MTrainingConfig(top_p=0.9, probe_segments=8),
    "segments-8-0.95": MTrainingConfig(top_p=0.95, probe_segments=8),
}


@dataclass(frozen=True)
class Variant:
    """How a run attends.

    Attributes:
        config: the attention's options; None: PyTorch's dense attention.
        joint_share: share of the probes' mass for :func:`benchmarks.proof.estimators.joint` over spread probes, in place of
            the config's estimation.
        own_lines: cut the rows into so many segments, each with lines of its own, estimated at its end.
        head_recall: heads whose lines keep less than this of the attention at the ends of :data:`GUARD_SEGMENTS` parts keep
            every line (the library's guard with the scope ``head``).
        late: the options of the layers from :data:`LATE` on, if they differ.
        dense_layers: layers, from 1, that keep every line, on the library's own kernels.
    """

    config: MTrainingConfig | None = None
    joint_share: float | None = None
    own_lines: int = 1
    head_recall: float | None = None
    late: MTrainingConfig | None = None
    dense_layers: tuple[int, ...] = ()

    @property
    def has_one_index(self) -> bool:
        """Whether the library's estimation under ``config`` is all there is to it (dense layers aside)."""
        others = (self.joint_share, self.head_recall, self.late)
        return self.config is not None and self.own_lines == 1 and others == (None, None, None)


VARIANTS: dict[str, Variant] = {
    DENSE: Variant(),
    "ring-dense": Variant(MTrainingConfig(dense=True)),
    "top-p-0.95": Variant(MTrainingConfig(top_p=0.95)),
    "top-p-0.90": Variant(MTrainingConfig(top_p=0.90)),
    "joint-0.95": Variant(MTrainingConfig(), joint_share=0.95),
    "joint-0.90": Variant(MTrainingConfig(), joint_share=0.90),
    "xattention-0.90": Variant(MTrainingConfig(index_policy="xattention", top_p=0.90)),
    **{f"top-p-{share}": Variant(MTrainingConfig(top_p=share)) for share in (0.97, 0.98, 0.99)},
    "top-p-0.99-uncapped": Variant(MTrainingConfig(top_p=0.99, max_vertical=None)),
    "top-p-0.95-256-rows": Variant(MTrainingConfig(top_p=0.95, last_q=256)),
    "top-p-0.95-1024-rows": Variant(MTrainingConfig(top_p=0.95, last_q=1024)),
    **{
        f"segments-{count}-{share}": Variant(MTrainingConfig(top_p=share, probe_segments=count))
        for count in (2, 4, 8, 16, 32, 64)
        for share in (0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
    },
    **{
        f"own-lines-{count}-{share}": Variant(MTrainingConfig(top_p=share), own_lines=count)
        for count in (2, 4, 8, 16, 32)
        for share in (0.8, 0.9, 0.95, 0.98)
    },
    **{
        f"top-p-{share}-heads-{bound}": Variant(MTrainingConfig(top_p=share), head_recall=bound)
        for share in (0.9, 0.95, 0.98)
        for bound in (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)
    },
    **{
        f"segments-{count}-{share}-dense-8-19{name}": Variant(
            MTrainingConfig(top_p=share, probe_segments=count, max_compact_columns=columns), dense_layers=(8, 19)
        )
        for count in (4, 8)
        for share in (0.9, 0.95)
        for name, columns in (("", 16384), ("-at-once", 32768))
    },
    **{
        f"early-{share}-late-{name}-dense-8-19": Variant(
            MTrainingConfig(top_p=share), late=config, dense_layers=(8, 19)
        )
        for share in (0.9, 0.95)
        for name, config in LATE_CONFIGS.items()
    },
    **{
        f"top-p-{share}-dense-{'-'.join(map(str, layers))}": Variant(MTrainingConfig(top_p=share), dense_layers=layers)
        for share in (0.9, 0.95, 0.98, 0.99)
        for layers in ((19,), (8, 19))
    },
    "moba": Variant(MTrainingConfig(index_policy="moba", moba_block_size=512, moba_top_k=12)),
}
"""``dense`` is cuDNN's SDPA, ``ring-dense`` this project's own kernel with every distance on; ``segments-S-p`` has probe rows
at the end of each of S parts of the sequence (``-at-once``: all columns that they may keep are gathered in one piece),
``own-lines-S-p`` gives each part lines of its own."""


def variant(name: str) -> Variant:
    """The variant of a name.

    Raises:
        ValueError: for a name that is not in :data:`VARIANTS`.
    """
    if name not in VARIANTS:
        raise ValueError(f"variant {name!r}: must be one of {', '.join(VARIANTS)}")
    return VARIANTS[name]
