"""The configuration of the attention: one frozen, validated object."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any

BLOCK = 64
"""Rows and columns of a block, the granularity of slash lines (paper, section 3.2)."""

MAX_LAST_Q = 1024
"""Most probe rows: keeps sums of masses (at most ``last_q * 2**32``) and their products with p inside int64."""

MAX_PROBE_SEGMENTS = 64
"""Most probe segments: each has masses of its own, 8 bytes per head and local token."""

LAYOUTS = ("striped", "zigzag", "contiguous")
RINGS = ("auto", "flat", "hierarchical")
KERNELS = ("auto", "reference", "sm80", "sm90")
INDEX_POLICIES = ("top_p", "fixed", "flexprefill", "xattention", "moba")
ROW_LIST_POLICIES = ("flexprefill", "xattention", "moba")
"""Policies that choose blocks row by row, instead of lines for all rows."""

XATTENTION_STRIDES = (4, 8, 16, 32, 64)
VERTICAL_BACKWARDS = ("save", "gather")


def _option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A config field that carries its own help text, from which command-line options are made."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class MTrainingConfig:
    """Options of MTraining attention. Every field is checked when the object is made.

    Raises:
        ValueError: for a value outside its range; the message names the field, the value and the valid ones.
    """

    top_p: float = _option(0.95, "share of the probe attention mass to keep, in (0, 1]; 1 is exactly dense")
    vertical_top_p: float | None = _option(None, "the same for vertical lines alone (unset: top_p)")
    slash_top_p: float | None = _option(None, "the same for slash lines alone (unset: top_p)")
    index_policy: str = _option(
        "top_p", "how the index is chosen: top_p is MTraining's, the others are published baselines", INDEX_POLICIES
    )
    last_q: int = _option(64, "probe rows at the end of each document: a multiple of 64, at most 1024")
    probe_segments: int = _option(
        1, "policy top_p: equal parts of each document with last_q probe rows each; lines that any part needs are kept"
    )
    max_vertical: int | None = _option(
        4096, "most vertical lines per head, document and probe segment (unset or 'none': no cap)"
    )
    max_slash: int | None = _option(
        None, "most slash lines per head, document and probe segment (unset or 'none': no cap)"
    )
    local_blocks: int = _option(1, "block distances below this are always on (at least 1)")
    sink_tokens: int = _option(0, "the first tokens of each document that are always kept as vertical lines")
    fixed_vertical: int = _option(1000, "policy fixed: vertical lines per head and document")
    fixed_slash: int = _option(96, "policy fixed: slash lines (block distances) per head and document")
    flexprefill_tau: float = _option(
        0.1, "policy flexprefill: heads whose pooled estimate is closer than this choose row by row, in [0, 1]"
    )
    xattention_stride: int = _option(16, "policy xattention: every how many tokens an antidiagonal is sampled: 4 to 64")
    moba_block_size: int = _option(512, "policy moba: tokens of a gated key block: a multiple of 64")
    moba_top_k: int = _option(12, "policy moba: gated key blocks per row, its own among them")
    stripe_size: int = _option(BLOCK, "tokens of a stripe of the striped layout: a multiple of 64")
    stripe_rotation: int = _option(
        1, "striped layout: ranks among which each round of stripes is dealt one further on; the size of an inner ring"
    )
    layout: str = _option("striped", "how the sequence is dealt to the context-parallel ranks", LAYOUTS)
    ring: str = _option("auto", "ring schedule; auto: hierarchical where inner and outer groups are there", RINGS)
    kernel: str = _option("auto", "implementation; auto: CUDA kernels on GPUs, torch reference on CPUs", KERNELS)
    deterministic: bool = _option(True, "gradients with the same bits in every run")
    dense: bool = _option(False, "dense attention on the same ring: every distance on, no estimation")
    vertical_backward: str = _option(
        "save", "keep the gathered columns for backward or gather them again", VERTICAL_BACKWARDS
    )
    chunks_per_launch: int | None = _option(
        None, "most chunks of a ring worked off by one launch (unset or 'none': by the local length)"
    )
    max_compact_columns: int = _option(
        16384, "columns gathered per head at a time: beyond it they are worked off chunk by chunk"
    )

    def __post_init__(self) -> None:
        for name in ("top_p", "vertical_top_p", "slash_top_p"):
            self._check_share(name)
        self._check_int("last_q", low=BLOCK, high=MAX_LAST_Q, multiple=BLOCK)
        self._check_int("probe_segments", low=1, high=MAX_PROBE_SEGMENTS)
        self._check_int("max_vertical", low=0, optional=True)
        self._check_int("max_slash", low=1, optional=True)
        self._check_int("local_blocks", low=1)
        self._check_int("sink_tokens", low=0)
        self._check_policies()
        self._check_int("stripe_size", low=BLOCK, multiple=BLOCK)
        self._check_int("stripe_rotation", low=1)
        self._check_int("chunks_per_launch", low=1, optional=True)
        self._check_int("max_compact_columns", low=BLOCK, multiple=BLOCK)
        for item in fields(self):
            choices = item.metadata["choices"]
            if choices is not None and getattr(self, item.name) not in choices:
                raise ValueError(f"{item.name}={getattr(self, item.name)!r}: must be one of {', '.join(choices)}")
            if item.type == "bool" and not isinstance(getattr(self, item.name), bool):
                raise ValueError(f"{item.name}={getattr(self, item.name)!r}: must be True or False")

    def _check_policies(self) -> None:
        if self.probe_segments > 1 and self.index_policy != "top_p":
            raise ValueError(
                f"probe_segments={self.probe_segments!r} with index_policy={self.index_policy!r}: must be 1, only policy "
                f"top_p has segments"
            )
        self._check_int("fixed_vertical", low=0)
        self._check_int("fixed_slash", low=1)
        self._check_int("moba_block_size", low=BLOCK, multiple=BLOCK)
        self._check_int("moba_top_k", low=1)
        tau, stride = self.flexprefill_tau, self.xattention_stride
        if isinstance(tau, bool) or not isinstance(tau, (int, float)) or not 0 <= tau <= 1:
            raise ValueError(f"flexprefill_tau={tau!r}: must be a number from 0 to 1")
        if isinstance(stride, bool) or stride not in XATTENTION_STRIDES:
            raise ValueError(f"xattention_stride={stride!r}: must be one of {', '.join(map(str, XATTENTION_STRIDES))}")

    def _check_share(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name != "top_p":
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise ValueError(f"{name}={value!r}: must be a number in (0, 1]")

    def _check_int(
        self, name: str, *, low: int, high: int | None = None, multiple: int = 1, optional: bool = False
    ) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if not is_int or value < low or (high is not None and value > high) or value % multiple:
            bounds = f"from {low}" + (f" to {high}" if high is not None else " up")
            kind = "an integer" if multiple == 1 else f"a multiple of {multiple}"
            raise ValueError(f"{name}={value!r}: must be {kind} {bounds}" + (", or None" * optional))

    @property
    def vertical_share(self) -> Fraction:
        """The exact share of the mass that vertical lines must hold."""
        return exact_share(self.top_p if self.vertical_top_p is None else self.vertical_top_p)

    @property
    def slash_share(self) -> Fraction:
        """The exact share of the mass that slash lines must hold."""
        return exact_share(self.top_p if self.slash_top_p is None else self.slash_top_p)


def exact_share(p: float) -> Fraction:
    """``p`` as the fraction of its decimal form (0.95 -> 19/20), so that masses can be compared with it in integers.

    The denominator is at most 10**6 (``p`` is rounded to six digits); a ``p`` in (0, 1) never becomes 0 or 1.
    """
    if p == 1:
        return Fraction(1)
    smallest = Fraction(1, 10**6)
    return min(max(Fraction(str(float(p))).limit_denominator(10**6), smallest), 1 - smallest)
