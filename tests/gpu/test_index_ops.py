"""Index kernels against the reference: selection and columns exactly, probe scores to fp32 accuracy."""

import random
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_mtraining import Documents, Layout, MTrainingConfig
from megatron_mtraining.bitmap import unpack_bits
from megatron_mtraining.documents import ProbeTables
from megatron_mtraining.ops import native, reference
from megatron_mtraining.testing import estimate_virtual
from tests.gpu.helpers import Case, mixed_qkv

pytestmark = pytest.mark.gpu
PACKED = Documents(2048, (0, 1, 5, 20), (50, 256, 900, 768))


@pytest.fixture
def ops():  # type: ignore[no-untyped-def]
    native.load()
    return torch.ops.megatron_mtraining


def probe_arguments(case: Case, last_q: int, blocks: Tensor) -> tuple[object, ...]:
    documents = case.documents or Documents.single(case.seq_len)
    tables = ProbeTables.make(documents, last_q).to("cuda")
    q, k, _ = mixed_qkv(case)
    split = q.unflatten(1, (-1, 64))
    probe_q = split[:, tables.blocks.long()].contiguous()
    keys = k.unflatten(1, (-1, 64))[:, blocks.long()].flatten(1, 2)
    return probe_q, keys, tables.blocks, tables.rows, tables.block_probes, documents.doc_start.cuda(), blocks, 0.1


@pytest.mark.parametrize(
    ("case", "last_q"),
    [
        (Case(seq_len=2048, heads=8), 64),
        (Case(seq_len=2048, heads=9, kv_heads=3, dim=64, batch=2), 192),
        (Case(seq_len=2048, heads=4, kv_heads=4, dtype=torch.float16), 128),
        (Case(seq_len=2048, documents=PACKED, batch=2), 128),
        (Case(seq_len=2048, spikes=20, scale_up=5.0), 64),
    ],
)
def test_probes(ops, case: Case, last_q: int) -> None:  # type: ignore[no-untyped-def]
    blocks = torch.randperm(case.seq_len // 64).to(torch.int32).cuda()
    args = probe_arguments(case, last_q, blocks)
    row_max = ops.probe_row_max(*args)
    true_max = reference.probe_row_max(*args)
    torch.testing.assert_close(row_max, true_max, rtol=1e-4, atol=1e-4)
    row_sum = ops.probe_row_sum(*args, row_max)
    true_sum = reference.probe_row_sum(*args, row_max)
    torch.testing.assert_close(row_sum.double(), true_sum.double(), rtol=1e-3, atol=1.0)
    masses = ops.probe_mass(*args, row_max, row_sum)
    truths = reference.probe_mass(*args, row_max, row_sum)
    for name, mass, truth in zip(("column", "slash"), masses, truths, strict=True):
        assert mass.shape == truth.shape and mass.dtype == torch.int64
        difference = (mass - truth).double().abs().sum() / truth.double().sum()
        assert float(difference) < 1e-4, f"{name} mass differs by {float(difference):.1e} of the total"
    assert torch.equal(masses[0].sum(-1), masses[1].sum(-1)), "both masses count the same pairs"


def test_probe_bits_do_not_depend_on_the_place_of_a_key_block(ops) -> None:  # type: ignore[no-untyped-def]
    case = Case(seq_len=2048, heads=6, kv_heads=2, documents=PACKED)
    order = torch.randperm(32).to(torch.int32).cuda()
    torch.manual_seed(5)
    whole = probe_arguments(case, 128, torch.arange(32, dtype=torch.int32, device="cuda"))
    torch.manual_seed(5)
    mixed = probe_arguments(case, 128, order)
    assert torch.equal(whole[0], mixed[0])  # type: ignore[arg-type]
    row_max = ops.probe_row_max(*whole)
    row_sum = ops.probe_row_sum(*whole, row_max)
    assert torch.equal(row_max, ops.probe_row_max(*mixed))
    assert torch.equal(row_sum, ops.probe_row_sum(*mixed, row_max))
    columns, lines = ops.probe_mass(*whole, row_max, row_sum)
    other_columns, other_lines = ops.probe_mass(*mixed, row_max, row_sum)
    assert torch.equal(lines, other_lines)
    split = columns.unflatten(-1, (-1, 64))[:, :, order.long()].flatten(2)
    assert torch.equal(split, other_columns)


@pytest.mark.parametrize(("last_q", "cap"), [(64, None), (64, 10), (128, 3)])
@pytest.mark.parametrize("documents", [None, PACKED])
def test_same_index_for_every_number_of_ranks(last_q: int, cap: int | None, documents: Documents | None) -> None:
    case = Case(seq_len=2048, heads=8, kv_heads=2, spikes=10, documents=documents)
    q, k, _ = mixed_qkv(case)
    config = MTrainingConfig(top_p=0.8, last_q=last_q, max_vertical=cap, max_slash=cap, kernel="auto")
    layouts = [Layout.striped(2048, 1), Layout.striped(2048, 4), Layout.zigzag(2048, 4), Layout.contiguous(2048, 8)]
    indices = [
        estimate_virtual(q, k, layout=layout, config=config, documents=documents, check_same=True) for layout in layouts
    ]
    for other in indices[1:]:
        assert torch.equal(other.slash_words, indices[0].slash_words)
        assert torch.equal(other.column_words, indices[0].column_words)


@pytest.mark.parametrize("dim", [64, 128])
def test_segments_keep_what_the_beginnings_of_the_sequence_keep(dim: int) -> None:
    """A line is kept iff the sequence up to the end of some segment would keep it by itself, bit for bit."""
    case = Case(seq_len=2048, heads=8, kv_heads=2, dim=dim, spikes=10)
    q, k, _ = mixed_qkv(case)
    config = MTrainingConfig(top_p=0.6, max_vertical=40, probe_segments=4, kernel="auto")
    alone = replace(config, probe_segments=1)
    slash, columns = torch.zeros(8, 32, dtype=torch.bool), torch.zeros(8, 2048, dtype=torch.bool)
    for end in (2048, 1536, 1024, 512):
        part = estimate_virtual(q[:, :end], k[:, :end], layout=Layout.striped(end, 1), config=alone)
        slash[:, : end // 64] |= part.slash_bits()[0].cpu()
        columns[:, :end] |= part.column_bits()[0].cpu()
    for layout in (
        Layout.striped(2048, 1),
        Layout.striped(2048, 4),
        Layout.zigzag(2048, 4),
        Layout.contiguous(2048, 8),
    ):
        index = estimate_virtual(q, k, layout=layout, config=config, check_same=True)
        assert torch.equal(index.slash_bits()[0].cpu(), slash), layout
        assert torch.equal(index.column_bits()[0].cpu(), columns), layout
    assert int(columns.sum()) > int(part.column_bits().sum()) > 0


@pytest.mark.parametrize("documents", [None, PACKED])
def test_same_index_in_every_run(documents: Documents | None) -> None:
    case = Case(seq_len=2048, heads=8, kv_heads=2, documents=documents)
    q, k, _ = mixed_qkv(case)
    config = MTrainingConfig(top_p=0.8, max_vertical=100, kernel="auto")
    layout = Layout.striped(2048, 2)
    first = estimate_virtual(q, k, layout=layout, config=config, documents=documents)
    for _ in range(29):
        again = estimate_virtual(q, k, layout=layout, config=config, documents=documents)
        assert torch.equal(first.slash_words, again.slash_words)
        assert torch.equal(first.column_words, again.column_words)


def random_masses(kind: str, rows: int, lines: int) -> Tensor:
    if kind == "zeros":
        return torch.zeros(1, rows, lines, dtype=torch.int64, device="cuda")
    if kind == "ties":
        return torch.randint(0, 4, (1, rows, lines), device="cuda") << 30
    if kind == "one":
        mass = torch.zeros(1, rows, lines, dtype=torch.int64, device="cuda")
        mass[..., lines // 3] = 1 << 38
        return mass
    return (torch.rand(1, rows, lines, device="cuda", dtype=torch.float64) ** 12 * 2**36).long()


@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "one"])
@pytest.mark.parametrize(("lines", "documents"), [(70, 1), (5000, 1), (5000, 7), (300, 40), (40000, 1)])
@pytest.mark.parametrize("all_lines", [False, True])
@pytest.mark.parametrize("cap", [-1, 25])
def test_selection_is_exactly_the_reference(ops, kind, lines, documents, all_lines, cap) -> None:  # type: ignore[no-untyped-def]
    rows = 3
    mass = random_masses(kind, rows, lines)
    segment = torch.randint(-1, documents, (lines,), device="cuda", dtype=torch.int32).sort().values
    tie = torch.randperm(lines, device="cuda").to(torch.int32)
    bits = 11 if documents == 1 else 8
    mass_rounds = -(-40 // bits)
    tie_rounds = -(-lines.bit_length() // bits) if cap >= 0 else 0
    budget = (bits, mass_rounds, tie_rounds, 9, 10, cap, all_lines)
    previous, states = None, (None, None)
    for number in range(mass_rounds + tie_rounds):
        sizes = (1, rows, documents, 1 if cap < 0 else 2, 1 << bits)
        ours, truth = (torch.zeros(sizes, dtype=torch.int64, device="cuda") for _ in range(2))
        states = (
            ops.select_round_(mass, segment, tie, previous, states[0], ours, number, *budget),
            reference.select_round_(mass, segment, tie, previous, states[1], truth, number, *budget),
        )
        assert torch.equal(*states), f"state of round {number}"
        assert torch.equal(ours, truth), f"histogram of round {number}"
        previous = 2 * truth if number % 2 else truth  # what other ranks would add
    kept = ops.select_pack(mass, segment, tie, previous, states[0], *budget)
    assert torch.equal(kept, reference.select_pack(mass, segment, tie, previous, states[1], *budget))
    at_once = ops.select_lines(mass, segment, tie, documents, *budget)
    assert torch.equal(at_once, reference.select_lines(mass, segment, tie, documents, *budget))
    kept = at_once
    if cap >= 0:
        per_document = [
            unpack_bits(kept, lines)[..., segment == document].sum(-1).max() for document in range(documents)
        ]
        assert max(int(count) for count in per_document) <= cap


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ((12, 4, 0, 9, 10, -1), "digit_bits=12 must be in 1 ... 11"),
        ((8, 8, 0, 9, 10, -1), "mass_rounds=8 must be in 1 ... 7 with digits of 8 bits"),
        ((8, 5, 8, 9, 10, 25), "tie_rounds=8 must be in 0 ... 7 with digits of 8 bits"),
        ((8, 5, 1, 9, 10, -1), "tie_rounds=1 without a cap, must be 0"),
        ((8, 5, 0, 9, 0, -1), "a share of 9 / 0 is none"),
    ],
)
def test_budgets_that_are_refused(ops, budget: tuple[int, ...], message: str) -> None:  # type: ignore[no-untyped-def]
    mass = torch.ones(1, 2, 70, dtype=torch.int64, device="cuda")
    lines = torch.zeros(70, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match=f"select_lines: {re.escape(message)}"):
        ops.select_lines(mass, lines, lines, 1, *budget, False)


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("first", [0, 3, 500])
def test_columns(ops, heads: int, first: int) -> None:  # type: ignore[no-untyped-def]
    """Duplicate-free lists in the order of any table; gather and scatter with chunks in any order."""
    batch, blocks, kv_heads, dim, capacity = 2, 48, 2, 64, 192
    words = torch.randint(-(2**62), 2**62, (batch, heads, blocks), device="cuda")
    words &= torch.randint(-(2**62), 2**62, words.shape, device="cuda")
    words &= torch.randint(-(2**62), 2**62, words.shape, device="cuda")
    words[0, 0] = 0
    words[0, 1] = -1
    order = torch.randperm(blocks, device="cuda").to(torch.int32)[:40]
    columns, count = ops.list_columns(words, order, capacity, first)
    true_columns, true_count = reference.list_columns(words, order, capacity, first)
    assert torch.equal(columns, true_columns) and torch.equal(count, true_count)
    table = order.view(4, 10)[:2].contiguous()
    k, v = (torch.randn(2, batch, 640, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    compact = [torch.full((batch, heads, capacity, dim), 7.0, device="cuda", dtype=k.dtype) for _ in range(4)]
    ops.gather_columns_(k, v, table, columns, *compact[:2])
    reference.gather_columns_(k, v, table, columns, *compact[2:])
    assert torch.equal(compact[0], compact[2]) and torch.equal(compact[1], compact[3])
    d_compact = [torch.randn(batch, heads, capacity, dim, device="cuda") for _ in range(2)]
    grads = [torch.randn(2, batch, 640, kv_heads, dim, device="cuda") for _ in range(2)]
    ours, truth = [x.clone() for x in grads], [x.clone() for x in grads]
    ops.scatter_columns_(*d_compact, columns, table, *ours)
    reference.scatter_columns_(*d_compact, columns, table, *truth)
    assert torch.equal(ours[0], truth[0]) and torch.equal(ours[1], truth[1])


def test_full_budget_is_full() -> None:
    """p = 1 keeps every block, at lengths where a running sum in 16 or 32 bits would not reach 1."""
    for seq_len in (256, 4096, 65536):
        case = Case(seq_len=seq_len, heads=2, kv_heads=1)
        q, k, _ = mixed_qkv(case)
        index = estimate_virtual(q, k, layout=Layout.striped(seq_len, 1), config=MTrainingConfig(top_p=1.0))
        blocks = seq_len // 64
        assert (index.block_pairs() == blocks * (blocks + 1) // 2).all()


def test_planted_columns_are_found_at_their_exact_positions() -> None:
    """Positions beyond the integers that 16-bit types hold, under autocast."""
    seq_len, planted = 131072, [257, 2049, 65537, 100003]
    q = torch.randn(1, seq_len, 2, 64, device="cuda", dtype=torch.bfloat16) + 1
    k = torch.randn(1, seq_len, 1, 64, device="cuda", dtype=torch.bfloat16)
    k[:, planted] = 4.0
    config = MTrainingConfig(top_p=0.9, vertical_top_p=0.5)
    with torch.autocast("cuda", torch.bfloat16):
        index = estimate_virtual(q, k, layout=Layout.striped(seq_len, 1), config=config)
    for head in range(2):
        assert index.column_bits()[0, head].nonzero().flatten().tolist() == planted


def test_random_seed_is_untouched() -> None:
    case = Case(seq_len=512)
    q, k, _ = mixed_qkv(case)
    state, cuda_state = random.getstate(), torch.cuda.get_rng_state()
    estimate_virtual(q, k, layout=Layout.striped(512, 2), config=MTrainingConfig())
    assert random.getstate() == state and torch.equal(torch.cuda.get_rng_state(), cuda_state)
