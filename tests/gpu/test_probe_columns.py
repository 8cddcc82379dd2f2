"""The third probe pass with the selection in one kernel: the same bits as both one after the other, and its memory."""

import pytest
import torch
from torch import Tensor

from megatron_mtraining import Documents, Layout, MTrainingConfig
from megatron_mtraining.bitmap import unpack_bits
from megatron_mtraining.comm import drive
from megatron_mtraining.documents import ProbeTables
from megatron_mtraining.estimate import Estimation, estimate_steps
from megatron_mtraining.ops import native, operators
from tests.gpu.helpers import Case, mixed_qkv

pytestmark = pytest.mark.gpu
PACKED = Documents(2048, (0, 1, 5, 20), (50, 256, 900, 768))
MANY = Documents(8192, tuple(range(0, 128, 2)), (100,) * 64)


@pytest.fixture
def ops():  # type: ignore[no-untyped-def]
    native.load()
    return torch.ops.megatron_mtraining


def probes(ops, q: Tensor, k: Tensor, documents: Documents, last_q: int):  # type: ignore[no-untyped-def]
    """Operands of the third pass, and the columns' documents and ties."""
    tables = ProbeTables.make(documents, last_q).to("cuda")
    blocks = torch.arange(documents.num_blocks, dtype=torch.int32, device="cuda")
    probe_q = q.unflatten(1, (-1, 64))[:, tables.blocks.long()]
    args = (probe_q, k, tables.blocks, tables.rows, tables.block_probes, documents.doc_start.cuda(), blocks, 0.1)
    row_max = ops.probe_row_max(*args)
    segment = documents.doc_id.cuda().to(torch.int32).repeat_interleave(64)
    tie = torch.arange(documents.num_blocks * 64, dtype=torch.int32, device="cuda")
    return (*args, row_max, ops.probe_row_sum(*args, row_max)), segment, tie


def check(ops, q, k, documents, last_q, cap, all_lines, bits=10):  # type: ignore[no-untyped-def]
    args, segment, tie = probes(ops, q, k, documents, last_q)
    segment = torch.where(torch.rand(segment.shape, device="cuda") < 0.05, -1, segment)
    tie_rounds = -(-tie.numel().bit_length() // bits) if cap >= 0 else 0
    count = len(documents.starts)
    selection = (segment, tie, count, bits, -(-44 // bits), tie_rounds, 9, 10, cap, all_lines)
    words, slash = ops.probe_columns(*args, *selection)
    columns, true_slash = ops.probe_mass(*args)
    assert torch.equal(slash, true_slash)
    assert torch.equal(words, ops.select_lines(columns, *selection))
    return unpack_bits(words, tie.numel())


@pytest.mark.parametrize("cap", [-1, 25])
@pytest.mark.parametrize("all_lines", [False, True])
@pytest.mark.parametrize(
    ("case", "last_q"),
    [
        (Case(seq_len=64, heads=1, kv_heads=1), 64),
        (Case(seq_len=2048, heads=16, kv_heads=2), 64),
        (Case(seq_len=2048, heads=9, kv_heads=3, dim=64, batch=2), 192),
        (Case(seq_len=2048, heads=4, kv_heads=4, dtype=torch.float16), 128),
        (Case(seq_len=2048, heads=6, kv_heads=2, dim=64, dtype=torch.float16, spikes=20, scale_up=5.0), 64),
        (Case(seq_len=2048, heads=6, kv_heads=2, documents=PACKED, batch=2), 128),
        (Case(seq_len=8192, heads=4, kv_heads=1, documents=MANY), 64),
        (Case(seq_len=4096, heads=64, kv_heads=8, batch=12), 64),
    ],
)
def test_same_bits_as_its_parts(ops, case: Case, last_q: int, cap: int, all_lines: bool) -> None:  # type: ignore[no-untyped-def]
    q, k, _ = mixed_qkv(case)
    documents = case.documents or Documents.single(case.seq_len)
    kept = check(ops, q, k, documents, last_q, cap, all_lines, bits=11 if case.documents is None else 8)
    assert kept.any()


@pytest.mark.parametrize("documents", [Documents.single(2048), PACKED])
def test_ties_at_the_cap(ops, documents: Documents) -> None:  # type: ignore[no-untyped-def]
    """Equal keys have equal masses: the later position wins."""
    q = torch.randn(1, 2048, 4, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.ones(1, 2048, 2, 128, device="cuda", dtype=torch.bfloat16)
    kept = check(ops, q, k, documents, 64, 25, False)
    assert int(kept.sum(-1).max()) <= 25 * len(documents.starts)


@pytest.mark.parametrize(
    ("seq_len", "heads", "dim"),
    [(131072, 16, 128), (524288, 8, 128), (1 << 21, 3, 64)],
    ids=["at once", "launches", "through memory"],
)
def test_long_sequences(ops, seq_len: int, heads: int, dim: int) -> None:  # type: ignore[no-untyped-def]
    """One launch, several, and more columns than the shared memory of the device holds."""
    q = torch.randn(1, seq_len, heads, dim, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, seq_len, 1, dim, device="cuda", dtype=torch.bfloat16)
    kept = check(ops, q, k, Documents.single(seq_len), 64, 4096, False)
    assert (kept.sum(-1) == 4096).all()


def test_same_bits_in_every_run(ops) -> None:  # type: ignore[no-untyped-def]
    q = torch.randn(1, 32768, 16, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 32768, 2, 128, device="cuda", dtype=torch.bfloat16)
    args, *lines = probes(ops, q, k, Documents.single(32768), 64)
    first = ops.probe_columns(*args, *lines, 1, 10, 4, 2, 9, 10, 1000, False)
    for _ in range(30):
        again = ops.probe_columns(*args, *lines, 1, 10, 4, 2, 9, 10, 1000, False)
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize(("seq_len", "most"), [(131072, 1.0), (524288, 4.0)])
def test_memory_of_an_estimation(seq_len: int, most: float) -> None:
    """16 heads on one rank: at its peak no more than `most` MiB, the index included."""
    q = torch.randn(1, seq_len, 16, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, seq_len, 2, 128, device="cuda", dtype=torch.bfloat16)
    call = Estimation(
        q=q, k=k, config=MTrainingConfig(), layout=Layout.striped(seq_len, 1), documents=Documents.single(seq_len),
        cp_rank=0, scale=0.1, ops=operators("auto", q),
    )  # fmt: skip
    drive(estimate_steps(call), None)  # copies the tables to the device once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    index = drive(estimate_steps(call), None)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    assert peak <= most, f"{peak:.2f} MiB"
    assert index.column_words.shape == (1, 16, seq_len // 64)
