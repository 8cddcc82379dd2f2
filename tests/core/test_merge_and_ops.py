"""Operators of the reference on their own: merge, empty work, columns, registered schemas."""

import pytest
import torch

from megatron_mtraining import Documents, MTrainingConfig, VerticalSlashIndex
from megatron_mtraining.ops import SCHEMAS, operators, reference
from megatron_mtraining.ops.reference.blocks import merge_rows
from megatron_mtraining.testing import oracle

from .helpers import random_index, random_qkv

INF = float("inf")


@pytest.mark.parametrize("pair", [(-200.0, 200.0), (200.0, -200.0), (0.0, 1e4), (-INF, 3.0), (3.0, -INF), (1.0, 1.0)])
def test_merge_survives_any_gap(pair: tuple[float, float]) -> None:  # B3
    a, b = (torch.tensor([x]) for x in pair)
    out_a = torch.zeros(1, 4) if pair[0] == -INF else torch.ones(1, 4)
    out, lse = merge_rows(out_a, a, torch.full((1, 4), 2.0), b)
    exact = torch.logsumexp(torch.tensor([pair], dtype=torch.float64), 1)
    assert torch.allclose(lse.double(), exact, rtol=1e-5)
    weight = torch.sigmoid(torch.tensor(pair[1] - pair[0], dtype=torch.float64))
    assert torch.allclose(out.double(), (out_a.double() * (1 - weight) + 2.0 * weight), rtol=1e-5)


def test_merge_of_two_empty_rows_is_empty() -> None:  # B2
    nothing = torch.full((1,), -INF)
    out, lse = merge_rows(torch.zeros(1, 4), nothing, torch.zeros(1, 4), nothing)
    assert torch.equal(out, torch.zeros(1, 4)) and torch.equal(lse, nothing)


def forward(q, k, v, index, q_blocks, kv_blocks, **outputs):
    doc_start = index.documents.doc_start
    reference.attention_forward_(
        q, k, v, index.slash_words, doc_start, q_blocks, kv_blocks, None, None, None, 0.125,
        outputs.get("accumulate", False), 0, outputs.get("partial"), outputs.get("final"), outputs["lse"],
    )  # fmt: skip


def test_a_step_without_work_is_zero_and_minus_infinity() -> None:  # B2
    q, k, v = (x.detach() for x in random_qkv(256))
    index = VerticalSlashIndex.from_lines([[[0]] * 4], [[[]] * 4], seq_len=512)
    early, late = torch.arange(4, dtype=torch.int32), torch.arange(4, 8, dtype=torch.int32)
    for q_blocks, kv_blocks in ((late, early), (early, late)):
        partial, lse = torch.full_like(q, float("nan")), torch.full((1, 4, 256), float("nan"), dtype=torch.float64)
        forward(q, k[None], v[None], index, q_blocks, kv_blocks[None], partial=partial, lse=lse)
        assert (partial == 0).all() and (lse == -INF).all()
        final = torch.full_like(q, float("nan"))
        forward(
            q,
            k[None],
            v[None],
            index,
            q_blocks,
            kv_blocks[None],
            partial=partial,
            lse=lse,
            final=final,
            accumulate=True,
        )
        assert (final == 0).all() and (lse == -INF).all()


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_several_chunks_a_launch_are_the_same_attention(chunks: int) -> None:
    q, k, v = (x.detach() for x in random_qkv(512, batch=2))
    index = random_index(512, 4, batch=2)
    blocks = torch.arange(8, dtype=torch.int32)
    parts = blocks.view(chunks, -1)
    stacked = [x.unflatten(1, (chunks, -1)).transpose(0, 1) for x in (k, v)]
    out, lse = torch.empty_like(q), torch.empty(2, 4, 512, dtype=torch.float64)
    forward(q, *stacked, index, blocks, parts, final=out, lse=lse)
    slash_only = VerticalSlashIndex(index.slash_words, torch.zeros_like(index.column_words), index.documents, 0)
    expected, expected_lse = oracle(q, k, v, slash_only.to_mask())
    assert (out - expected).abs().max() < 1e-12 and (lse - expected_lse).abs().max() < 1e-12


def test_no_chunk_is_no_work() -> None:
    q, k, v = (x.detach() for x in random_qkv(128))
    index = VerticalSlashIndex.dense(1, 4, Documents.single(128))
    lse = torch.empty(1, 4, 128, dtype=torch.float64)
    out = torch.empty_like(q)
    none = torch.empty(0, 2, dtype=torch.int32)
    forward(q, k[None][:0], v[None][:0], index, torch.arange(2, dtype=torch.int32), none, final=out, lse=lse)
    assert (out == 0).all() and (lse == -INF).all()


@pytest.mark.parametrize("lines", ["none", "all", "some"])
def test_columns_are_listed_in_order(lines: str) -> None:  # D3
    positions = {"none": [], "all": list(range(512)), "some": [0, 1, 63, 64, 300, 511]}[lines]
    index = VerticalSlashIndex.from_lines([[[0]] * 2], [[positions] * 2], seq_len=512)
    for blocks in (torch.arange(8), torch.tensor([1, 4, 6]), torch.tensor([0])):
        listed = [c for b in blocks.tolist() for c in positions if c // 64 == b]
        for capacity in (64, 128, 512):
            for first in (0, 64, 448):
                found, count = reference.list_columns(index.column_words, blocks.to(torch.int32), capacity, first)
                expected = listed[first : first + capacity]
                assert count.tolist() == [[len(expected)] * 2] and found.dtype == torch.int32
                assert found[0, 1].tolist() == expected + [-1] * (capacity - len(expected))


def test_gather_and_scatter_are_transposed() -> None:
    k, v = torch.randn(2, 1, 128, 2, 16), torch.randn(2, 1, 128, 2, 16)
    kv_blocks = torch.tensor([[0, 5], [2, 7]], dtype=torch.int32)
    columns = torch.tensor([[[3, 70, 130, 400, 511, -1]] * 4], dtype=torch.int32)
    compact = [torch.full((1, 4, 6, 16), 9.0) for _ in range(2)]
    reference.gather_columns_(k, v, kv_blocks, columns, *compact)
    for head in range(4):
        for slot, (chunk, row) in {0: (0, 3), 2: (1, 2), 4: (1, 127)}.items():
            assert torch.equal(compact[0][0, head, slot], k[chunk, 0, row, head // 2])
            assert torch.equal(compact[1][0, head, slot], v[chunk, 0, row, head // 2])
        assert (compact[0][0, head, [1, 3, 5]] == 9.0).all(), "slots of other chunks must stay"
    grads = [torch.randn(1, 4, 6, 16) for _ in range(2)]
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    reference.scatter_columns_(*grads, columns, kv_blocks, dk, dv)
    assert torch.allclose(dk[0, 0, 3, 1], grads[0][0, 2, 0] + grads[0][0, 3, 0])
    assert torch.allclose(dv[1, 0, 127, 0], grads[1][0, 0, 4] + grads[1][0, 1, 4])
    assert int((dk != 0).any(-1).sum()) == 6


def test_reference_is_registered_for_every_schema() -> None:
    for name in SCHEMAS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"megatron_mtraining::{name}", "CPU")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"megatron_mtraining::{name}", "Meta")


def test_opcheck_of_functional_operators() -> None:
    index = random_index(256, 2)
    blocks = torch.arange(4, dtype=torch.int32)
    ops = torch.ops.megatron_mtraining
    torch.library.opcheck(ops.list_columns, (index.column_words, blocks, 64, 0))
    x = torch.randn(1, 128, 2, 16)
    torch.library.opcheck(ops.attention_delta, (x, x))
    mass = torch.randint(0, 2**30, (1, 2, 100))
    segment, tie = torch.zeros(100, dtype=torch.int32), torch.arange(100, dtype=torch.int32)
    histogram, budget = torch.zeros(1, 2, 1, 2, 2048, dtype=torch.int64), (11, 4, 1, 9, 10, 5, False)
    torch.library.opcheck(ops.select_round_, (mass, segment, tie, None, None, histogram, 0, *budget))
    state = ops.select_round_(mass, segment, tie, None, None, histogram, 0, *budget)
    previous, histogram = histogram, torch.zeros_like(histogram)
    torch.library.opcheck(ops.select_round_, (mass, segment, tie, previous, state, histogram, 1, *budget))
    torch.library.opcheck(ops.select_pack, (mass, segment, tie, previous, state, *budget))
    lse = torch.empty(1, 2, 128)
    args = (x, x[None], x[None], index.slash_words, index.documents.doc_start, blocks[:2], blocks[None, :2])
    torch.library.opcheck(
        ops.attention_forward_, (*args, None, None, None, 0.25, False, 0, None, torch.empty_like(x), lse)
    )


def test_native_kernels_are_never_replaced_silently() -> None:
    x = torch.zeros(1, 64, 1, 64)
    for kernel in ("sm80", "sm90"):
        with pytest.raises(RuntimeError, match=f"kernel='{kernel}' needs CUDA tensors"):
            operators(kernel, x)
    assert operators("auto", x).table is reference
    assert MTrainingConfig().kernel == "auto"
