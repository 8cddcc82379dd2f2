"""Top-p selection against the definition, by sorting."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mtraining.bitmap import unpack_bits
from megatron_mtraining.budget import Selection
from megatron_mtraining.comm import drive
from megatron_mtraining.ops import Operators, reference
from megatron_mtraining.policies.select import MOST_CLEARED_TOGETHER, _histograms, select_lines
from megatron_mtraining.testing import lockstep

OPS = Operators(reference, 0)


def by_sorting(mass: list[int], ties: list[int], share: Fraction, cap: int | None) -> set[int]:
    """The definition: heaviest first until the share is reached, equals of the last one too, then the cap."""
    order = sorted(range(len(mass)), key=lambda i: (-mass[i], -ties[i]))
    if share == 1:
        kept = order
    else:
        kept, held, total = [], 0, sum(mass)
        for i in order:
            if mass[i] == 0 or (held >= share * total and mass[i] != mass[kept[-1]]):
                break
            kept.append(i)
            held += mass[i]
    return set(kept if cap is None else kept[:cap])


def select(
    mass: torch.Tensor, segment: torch.Tensor, tie: torch.Tensor, share: Fraction, cap: int | None
) -> torch.Tensor:
    documents = int(segment.max()) + 1
    plan = Selection.make(share, cap, last_q=64, lines=mass.shape[-1], documents=documents)
    words = drive(select_lines(mass, segment, tie, plan, documents, OPS, shared=True), None)
    return unpack_bits(words, mass.shape[-1])


@given(
    st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**38)), min_size=1, max_size=200),
    st.sampled_from(["0.3", "0.5", "0.75", "0.9", "0.95", "0.999999", "1"]),
    st.one_of(st.none(), st.integers(0, 20)),
    st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_selection_is_the_definition(mass: list[int], p: str, cap: int | None, later_wins: bool) -> None:
    n = len(mass)
    ties = list(range(n)) if later_wins else list(range(n))[::-1]
    share = Fraction(p)
    kept = select(
        torch.tensor(mass)[None, None],
        torch.zeros(n, dtype=torch.int32),
        torch.tensor(ties, dtype=torch.int32),
        share,
        cap,
    )[0, 0]
    assert set(kept.nonzero().flatten().tolist()) == by_sorting(mass, ties, share, cap)


@pytest.mark.parametrize("documents", [1, 3, 5, 70])
def test_documents_are_selected_apart(documents: int) -> None:
    torch.manual_seed(documents)
    per = 40
    mass = torch.randint(0, 2**36, (2, 3, documents * per)) >> torch.randint(0, 36, (2, 3, documents * per))
    segment = torch.arange(documents, dtype=torch.int32).repeat_interleave(per)
    segment[::7] = -1
    tie = torch.arange(documents * per, dtype=torch.int32)
    kept = select(mass, segment, tie, Fraction(9, 10), 5)
    for b in range(2):
        for h in range(3):
            for document in range(documents):
                lines = [i for i in range(document * per, (document + 1) * per) if segment[i] == document]
                masses = [int(mass[b, h, i]) for i in lines]
                expected = {lines[i] for i in by_sorting(masses, lines, Fraction(9, 10), 5)}
                found = {i for i in range(document * per, (document + 1) * per) if kept[b, h, i]}
                assert found == expected


@pytest.mark.parametrize("documents", [1, 3, 100])
@pytest.mark.parametrize("cap", [None, 3])
def test_ranks_select_together(documents: int, cap: int | None) -> None:
    """Ranks with different numbers of lines, one of them with none; 100 documents: histograms cleared one by one."""
    torch.manual_seed(documents)
    mass = torch.randint(0, 2**38, (2, 6, 512)) >> torch.randint(0, 38, (2, 6, 512))
    tie = torch.arange(512, dtype=torch.int32)
    segment = torch.arange(512, dtype=torch.int32) * documents // 512
    whole = select(mass, segment, tie, Fraction(19, 20), cap)
    plan = Selection.make(Fraction(19, 20), cap, last_q=64, lines=512, documents=documents)
    parts = lockstep(
        [
            select_lines(mass[..., part], segment[part], tie[part], plan, documents, OPS, shared=False)
            for part in (slice(0, 128), slice(128, 320), slice(320, 320), slice(320, 512))
        ]
    )
    assert torch.equal(torch.cat(parts, -1), pack(whole))
    assert 0 < int(whole.sum()) < whole.numel()


@pytest.mark.parametrize(("documents", "together"), [(1, True), (100, False)])
def test_histograms_of_many_documents_are_not_held_together(documents: int, together: bool) -> None:
    plan = Selection.make(Fraction(19, 20), 3, last_q=64, lines=2**20, documents=documents)
    sizes = (1, 16, documents, *plan.histogram_sizes)
    found = list(_histograms(torch.zeros(1, dtype=torch.int64), plan.rounds, sizes))
    assert len(found) == plan.rounds
    for histogram in found:
        assert histogram.shape == sizes and histogram.is_contiguous() and not histogram.any()
        held = histogram.untyped_storage().nbytes()
        assert held == (plan.rounds if together else 1) * histogram.nbytes
        assert not together or held <= 8 * MOST_CLEARED_TOGETHER


@pytest.mark.parametrize("number", [0, 1])
def test_only_the_first_round_begins_with_nothing(number: int) -> None:
    mass, lines = torch.ones(1, 1, 10, dtype=torch.int64), torch.zeros(10, dtype=torch.int32)
    histogram, state = torch.zeros(1, 1, 1, 1, 256, dtype=torch.int64), torch.zeros(1, 1, 1, 8, dtype=torch.int64)
    budget = (8, 5, 0, 9, 10, -1, False)
    before = (histogram.clone(), state) if number == 0 else (None, None)
    with pytest.raises(RuntimeError, match="select_round_: previous and state belong to every round but the first"):
        torch.ops.megatron_mtraining.select_round_(mass, lines, lines, *before, histogram, number, *budget)


def pack(bits: torch.Tensor) -> torch.Tensor:
    from megatron_mtraining.bitmap import pack_bits

    return pack_bits(bits)


def test_no_mass_keeps_nothing() -> None:
    zeros = torch.zeros(1, 1, 10, dtype=torch.int64)
    segment, tie = torch.zeros(10, dtype=torch.int32), torch.arange(10, dtype=torch.int32)
    assert not select(zeros, segment, tie, Fraction(1, 2), None).any()
    assert select(zeros, segment, tie, Fraction(1), None).all()
    assert select(zeros, segment, tie, Fraction(1), 3)[0, 0].nonzero().flatten().tolist() == [7, 8, 9]


def test_a_cap_that_cannot_cut_costs_no_rounds() -> None:
    assert Selection.make(Fraction(1, 2), 100, last_q=64, lines=100, documents=1).tie_rounds == 0
    assert Selection.make(Fraction(1), None, last_q=64, lines=100, documents=1).rounds == 0


@pytest.mark.parametrize("last_q", [64, 1024])
def test_masses_stay_inside_int64(last_q: int) -> None:
    plan = Selection.make(Fraction(999999, 1000000), None, last_q=last_q, lines=2**22, documents=1)
    largest = last_q * 2**32 + 2**23
    assert largest < 2 ** (plan.digit_bits * plan.mass_rounds)
    assert largest * plan.share.denominator < 2**63
