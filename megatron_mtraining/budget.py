"""The budget of an index: how many radix rounds a top-p selection with caps takes (docs/design.md, "Selection by radix")."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

MASS_UNIT_BITS = 32
"""Masses are integers in units of 2**-32 of a probe row."""

STATE_FIELDS = 8
"""int64 entries of a selection's state; the first six are top-p prefix, mass above it, total mass, cap mass prefix, cap tie
prefix, count above it."""


@dataclass(frozen=True)
class Selection:
    """How the lines of one kind are selected. All values are known on the host.

    Attributes:
        share: the exact share of the mass to keep.
        cap: most lines per head and document, -1 for no cap.
        digit_bits: bits settled per round.
        mass_rounds: rounds over the digits of the mass.
        tie_rounds: rounds over the digits of the tie order (0 without a cap).
    """

    share: Fraction
    cap: int
    digit_bits: int
    mass_rounds: int
    tie_rounds: int

    @classmethod
    def make(cls, share: Fraction, cap: int | None, *, last_q: int, lines: int, documents: int) -> Selection:
        """The rounds that ``lines`` lines need. A cap that can cut nothing is dropped.

        A histogram has ``2**digit_bits`` entries per head and document, twice that with a cap: many documents get narrower
        digits, and none are wider than the number of rounds asks for.
        """
        widest = 11 if documents <= 4 else 8 if documents <= 64 else 6
        # A mass is at most last_q rows of 2**32 plus half a unit of rounding per entry.
        mass_bits = MASS_UNIT_BITS + last_q.bit_length() + 1
        digit_bits = -(-mass_bits // -(-mass_bits // widest))
        capped = cap is not None and cap < lines
        tie_rounds = -(-max(lines - 1, 1).bit_length() // digit_bits) if capped else 0
        return cls(
            share, cap if capped and cap is not None else -1, digit_bits, -(-mass_bits // digit_bits), tie_rounds
        )

    @property
    def all_lines(self) -> bool:
        """``p = 1`` keeps every line by rule, also those without mass."""
        return self.share == 1

    @property
    def arguments(self) -> tuple[int, int, int, int, int, int, bool]:
        """The last arguments of the operators of the selection and of ``probe_columns``."""
        rounds = (self.digit_bits, self.mass_rounds, self.tie_rounds)
        return (*rounds, self.share.numerator, self.share.denominator, self.cap, self.all_lines)

    @property
    def histogram_sizes(self) -> tuple[int, int]:
        """A histogram's last dimensions: masses and, with a cap, counts behind them; digits."""
        return 2 if self.cap >= 0 else 1, 1 << self.digit_bits

    @property
    def rounds(self) -> int:
        """Rounds in all; none where every line is kept and no cap cuts."""
        return 0 if self.all_lines and self.cap < 0 else self.mass_rounds + self.tie_rounds
