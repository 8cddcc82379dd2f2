"""Selection of the heaviest lines and blocks, in integers and without host synchronisation."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from ..budget import STATE_FIELDS, Selection
from ..comm import AllReduce
from ..ops import Operators
from .estimation import Steps


def select_lines(
    mass: Tensor, segment: Tensor, tie: Tensor, selection: Selection, documents: int, ops: Operators, *, shared: bool
) -> Steps:
    """Top-p selection with a cap of the lines with the given masses.

    Args:
        mass: int64 ``[batch, heads, lines]``.
        segment: int32 ``[lines]``, the document of each line, -1 for a line that is no candidate.
        tie: int32 ``[lines]``, unique within a document; the larger wins a tie at the cap.
        selection: the budget.
        documents: number of documents.
        ops: implementation of the operators.
        shared: whether every rank has all lines; otherwise each has its own and the histograms are all-reduced.

    Returns:
        int64 words of the kept lines, ``[batch, heads, ceil(lines / 64)]``.
    """
    if shared:  # nothing to exchange between the rounds
        return ops.select_lines(mass, segment, tie, documents, *selection.arguments)
    rounds = (selection.digit_bits, selection.mass_rounds, selection.tie_rounds)
    budget = (selection.share.numerator, selection.share.denominator, selection.cap)
    state = mass.new_zeros((*mass.shape[:2], documents, STATE_FIELDS))
    for number in range(selection.rounds):
        histogram = yield AllReduce(
            ops.select_histogram(mass, segment, tie, state, number, *rounds, selection.all_lines)
        )
        ops.select_update_(histogram, state, number, *rounds, *budget)
    return ops.select_pack(mass, segment, tie, state, selection.all_lines)


def row_top_p(mass: Tensor, forced: Tensor, share: Fraction) -> Tensor:
    """Per row the heaviest entries that hold ``share`` of the row's mass together with the forced ones.

    Args:
        mass: int64 ``[..., entries]``, at least 0; a row's sum times the share's denominator must stay below 2**63.
        forced: bool, broadcastable to it: entries that are kept in any case and count first.
        share: of the mass of each row.

    Returns:
        Bool, shape of ``mass``. The entry that crosses the share is kept, so are its equals; others without mass are not.
    """
    held = mass.masked_fill(~forced, 0).sum(-1, keepdim=True)
    rest = mass.masked_fill(forced, 0)
    descending = rest.sort(-1, descending=True).values
    before = descending.cumsum(-1) - descending + held
    needed = before * share.denominator < mass.sum(-1, keepdim=True) * share.numerator
    lightest = descending.masked_fill(~needed, torch.iinfo(torch.int64).max).amin(-1, keepdim=True)
    return forced | ((rest >= lightest) & (rest > 0))


def row_top_k(score: Tensor, count: int) -> Tensor:
    """Bool, shape of ``score``: the ``count`` largest entries of each row, ties by the smaller place; ``-inf`` never."""
    order = score.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order, True) & (score > float("-inf"))
