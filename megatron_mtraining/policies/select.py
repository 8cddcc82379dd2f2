"""Selection of the heaviest lines and blocks, in integers and without host synchronisation."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from fractions import Fraction
from math import prod

import torch
from torch import Tensor

from ..budget import Selection
from ..comm import AllReduce, Collective
from ..ops import Operators
from .estimation import Steps

MOST_CLEARED_TOGETHER = 1 << 19
"""int64 entries (4 MiB) of the histograms of a selection that are cleared at once."""


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
    words, _ = yield from select_over_ranks(mass, segment, tie, selection, documents, ops)
    return words


def select_over_ranks(
    mass: Tensor,
    segment: Tensor,
    tie: Tensor,
    selection: Selection,
    documents: int,
    ops: Operators,
    along: tuple[Tensor, ...] = (),
) -> Generator[Collective, Tensor, tuple[Tensor, list[Tensor]]]:
    """:func:`select_lines` where each rank has its own lines.

    Args:
        along: int64 tensors to be summed over the ranks on the way: they travel with the first histogram.

    Returns:
        The words of the kept lines of this rank, and the sums.
    """
    if selection.rounds == 0:
        sums = []
        for x in along:
            sums.append((yield AllReduce(x)))
        return ops.select_lines(mass, segment, tie, documents, *selection.arguments), sums
    sizes = (*mass.shape[:2], documents, *selection.histogram_sizes)
    previous = state = None
    for number, histogram in enumerate(_histograms(mass, selection.rounds, sizes)):
        state = ops.select_round_(mass, segment, tie, previous, state, histogram, number, *selection.arguments)
        if number == 0:
            previous, *sums = yield from _sums([histogram, *along])
        else:
            previous = yield AllReduce(histogram)
    return ops.select_pack(mass, segment, tie, previous, state, *selection.arguments), sums


def _histograms(mass: Tensor, rounds: int, sizes: tuple[int, ...]) -> Iterator[Tensor]:
    """Zeros ``sizes`` for each round: cleared together, one launch, while that is little memory. Those of many documents
    are large, and are made when their round comes.
    """
    if rounds * prod(sizes) <= MOST_CLEARED_TOGETHER:
        yield from mass.new_zeros((rounds, *sizes)).unbind(0)
    else:
        for _ in range(rounds):
            yield mass.new_zeros(sizes)


def _sums(tensors: list[Tensor]) -> Generator[Collective, Tensor, list[Tensor]]:
    """The sums of some tensors of one type over the ranks, by one collective."""
    if len(tensors) == 1:
        return [(yield AllReduce(tensors[0]))]
    flat = yield AllReduce(torch.cat([x.flatten() for x in tensors]))
    return [part.view(x.shape) for part, x in zip(flat.split([x.numel() for x in tensors]), tensors, strict=True)]


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
