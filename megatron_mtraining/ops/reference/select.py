"""Reference of the selection operators: top-p with caps by radix search (docs/design.md, "Selection by radix")."""

from __future__ import annotations

import torch
from torch import Tensor

from ...bitmap import pack_bits
from ...budget import STATE_FIELDS

# Entries of a selection's state, per (batch, head, document).
P_PREFIX, P_ABOVE, TOTAL, CAP_MASS, CAP_TIE, CAP_ABOVE = range(6)


def _candidates(mass: Tensor, segment: Tensor, all_lines: bool) -> Tensor:
    return (segment >= 0) & ((mass > 0) | all_lines)


def _line_state(state: Tensor, segment: Tensor, entry: int) -> Tensor:
    """The state entry of each line's document, ``[batch, heads, lines]``."""
    return state[..., entry][..., segment.clamp(min=0).long()]


def _add_lines(
    mass: Tensor,
    segment: Tensor,
    tie: Tensor,
    state: Tensor,
    histogram: Tensor,
    round: int,
    digit_bits: int,
    mass_rounds: int,
    tie_rounds: int,
    all_lines: bool,
) -> None:
    """Adds mass (0) and, where there is room, count (1) of the lines under the current prefixes by their next digit."""
    documents, kinds, digits = histogram.shape[2:]
    candidate = _candidates(mass, segment, all_lines)
    base = segment.clamp(min=0).long() * digits

    def add(kind: int, values: Tensor, active: Tensor, digit: Tensor) -> None:
        if kind >= kinds:
            return
        sums = mass.new_zeros((*mass.shape[:2], documents * digits))
        sums.scatter_add_(-1, base + digit, values.masked_fill(~active, 0))
        histogram[:, :, :, kind] += sums.unflatten(-1, (documents, digits))

    if round < mass_rounds:
        shift = (mass_rounds - 1 - round) * digit_bits
        digit, high = (mass >> shift) & (digits - 1), mass >> (shift + digit_bits)
        for kind, entry, values in ((0, P_PREFIX, mass), (1, CAP_MASS, torch.ones_like(mass))):
            add(kind, values, candidate & (high == _line_state(state, segment, entry) >> (shift + digit_bits)), digit)
    else:
        shift = (mass_rounds + tie_rounds - 1 - round) * digit_bits
        order = tie.long().expand_as(mass)
        same = (mass == _line_state(state, segment, CAP_MASS)) & (
            order >> (shift + digit_bits) == _line_state(state, segment, CAP_TIE) >> (shift + digit_bits)
        )
        add(1, torch.ones_like(mass), candidate & same, (order >> shift) & (digits - 1))


def _take_digit(state: Tensor, counts: Tensor, reached: Tensor, prefix: int, above: int, shift: int) -> None:
    """Takes the highest digit at which the target is reached (0 if none is) into the prefix."""
    digit = (reached.sum(-1) - 1).clamp(min=0)
    number = torch.arange(counts.shape[-1], device=counts.device)
    state[..., above] += counts.masked_fill(number <= digit[..., None], 0).sum(-1)
    state[..., prefix] |= digit << shift


def _narrowed(
    previous: Tensor,
    old_state: Tensor,
    round: int,
    digit_bits: int,
    mass_rounds: int,
    tie_rounds: int,
    p_num: int,
    p_den: int,
    cap: int,
) -> Tensor:
    """The state whose prefixes are narrowed by one digit, from the histogram of a round summed over all ranks."""
    state = old_state.clone()
    mass = previous[..., 0, :]
    in_mass = round < mass_rounds
    shift = ((mass_rounds if in_mass else mass_rounds + tie_rounds) - 1 - round) * digit_bits
    if round == 0:
        state[..., TOTAL] = mass.sum(-1)
    if in_mass:
        held = state[..., P_ABOVE, None] + mass.flip(-1).cumsum(-1).flip(-1)
        _take_digit(state, mass, held * p_den >= p_num * state[..., TOTAL, None], P_PREFIX, P_ABOVE, shift)
    if cap >= 0:
        count = previous[..., 1, :]
        held = state[..., CAP_ABOVE, None] + count.flip(-1).cumsum(-1).flip(-1)
        _take_digit(state, count, held >= cap, CAP_MASS if in_mass else CAP_TIE, CAP_ABOVE, shift)
    return state


def select_round_(
    mass: Tensor,
    segment: Tensor,
    tie: Tensor,
    previous: Tensor | None,
    state: Tensor | None,
    histogram: Tensor,
    round: int,
    digit_bits: int,
    mass_rounds: int,
    tie_rounds: int,
    p_num: int,
    p_den: int,
    cap: int,
    all_lines: bool,
) -> Tensor:
    """One round: narrows by the histogram of the round before, adds the lines to ``histogram``; the narrowed state."""
    digits = (digit_bits, mass_rounds, tie_rounds)
    if (previous is None, state is None) != (round == 0, round == 0):
        raise RuntimeError("megatron_mtraining: select_round_: previous and state belong to every round but the first")
    if previous is None or state is None:
        narrowed = mass.new_zeros((*histogram.shape[:3], STATE_FIELDS))
    else:
        narrowed = _narrowed(previous, state, round - 1, *digits, p_num, p_den, cap)
    _add_lines(mass, segment, tie, narrowed, histogram, round, *digits, all_lines)
    return narrowed


def select_pack(
    mass: Tensor,
    segment: Tensor,
    tie: Tensor,
    previous: Tensor,
    state: Tensor,
    digit_bits: int,
    mass_rounds: int,
    tie_rounds: int,
    p_num: int,
    p_den: int,
    cap: int,
    all_lines: bool,
) -> Tensor:
    """The kept lines as bits, after the last round, whose histogram and state these are."""
    digits = (digit_bits, mass_rounds, tie_rounds)
    last = _narrowed(previous, state, mass_rounds + tie_rounds - 1, *digits, p_num, p_den, cap)
    return _pack(mass, segment, tie, last, all_lines)


def _pack(mass: Tensor, segment: Tensor, tie: Tensor, state: Tensor, all_lines: bool) -> Tensor:
    """Candidates over the top-p prefix (all of them with ``all_lines``) and not cut by the cap, as bits."""
    cap_mass = _line_state(state, segment, CAP_MASS)
    cut = (mass < cap_mass) | ((mass == cap_mass) & (tie.long() < _line_state(state, segment, CAP_TIE)))
    enough = torch.ones_like(cut) if all_lines else mass >= _line_state(state, segment, P_PREFIX)
    return pack_bits(_candidates(mass, segment, all_lines) & enough & ~cut)


def select_lines(
    mass: Tensor,
    segment: Tensor,
    tie: Tensor,
    documents: int,
    digit_bits: int,
    mass_rounds: int,
    tie_rounds: int,
    p_num: int,
    p_den: int,
    cap: int,
    all_lines: bool,
) -> Tensor:
    """All rounds and the packing, for lines that one process holds."""
    budget = (digit_bits, mass_rounds, tie_rounds, p_num, p_den, cap, all_lines)
    rounds = 0 if all_lines and cap < 0 else mass_rounds + tie_rounds
    if rounds == 0:
        return _pack(mass, segment, tie, mass.new_zeros((*mass.shape[:2], documents, STATE_FIELDS)), all_lines)
    previous = state = None
    for number in range(rounds):
        histogram = mass.new_zeros((*mass.shape[:2], documents, 2 if cap >= 0 else 1, 1 << digit_bits))
        state = select_round_(mass, segment, tie, previous, state, histogram, number, *budget)
        previous = histogram
    assert previous is not None and state is not None
    return select_pack(mass, segment, tie, previous, state, *budget)
