"""The attention operators one by one: merging, empty rows, several chunks, poisoned outputs, refusals."""

import pytest
import torch
from torch import Tensor

from megatron_mtraining.index import document_table
from megatron_mtraining.ops import ARCHITECTURES, native, reference
from tests.gpu.helpers import Case, kernels, mixed_qkv, random_index

pytestmark = pytest.mark.gpu
SCALE = 128**-0.5


class Call:
    """Operands of the operators for one rank's queries and all chunks."""

    def __init__(self, case: Case, rank: int, kernel: str) -> None:
        native.load()
        self.ops, self.arch = torch.ops.megatron_mtraining, ARCHITECTURES[kernel]
        layout = case.make_layout()
        self.index = random_index(case)
        q, k, v = mixed_qkv(case)
        ranks = range(case.cp_size)
        self.q = layout.shard(q, rank)
        self.k = torch.stack([layout.shard(k, r) for r in ranks])
        self.v = torch.stack([layout.shard(v, r) for r in ranks])
        self.table = layout.table("cuda")
        self.lines = (
            self.index.slash_words,
            document_table(self.index.documents, "doc_start", self.q.device),
            self.table[rank],
        )
        batch, seq, heads, dim = self.q.shape
        self.rows = (batch, seq, heads, dim)
        every = torch.arange(self.index.num_blocks, dtype=torch.int32, device="cuda")
        capacity = -(-max(self.index.column_capacity, 1) // 64) * 64
        self.columns = self.ops.list_columns(self.index.column_words, every, capacity, 0)[0]
        # The contract: unused slots hold finite values.
        self.compact = [
            torch.full((batch, heads, capacity, dim), 100.0, dtype=q.dtype, device="cuda") for _ in range(2)
        ]
        self.ops.gather_columns_(self.k, self.v, self.table, self.columns, *self.compact)

    def poisoned(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device="cuda")

    def new_lse(self) -> Tensor:
        return self.poisoned(self.rows[0], self.rows[2], self.rows[1])

    def forward(self, chunks: slice, columns: bool, accumulate: bool, partial, final, lse, ops=None) -> None:  # type: ignore[no-untyped-def]
        (ops or self.ops).attention_forward_(
            self.q, self.k[chunks], self.v[chunks], *self.lines, self.table[chunks],
            *((*self.compact, self.columns) if columns else (None, None, None)),
            SCALE, accumulate, self.arch, partial, final, lse,
        )  # fmt: skip


@pytest.mark.parametrize("kernel", kernels())
def test_one_launch_equals_many(kernel: str) -> None:
    case = Case(cp_size=4, batch=2)
    call = Call(case, 1, kernel)
    lse, partial = call.new_lse(), call.poisoned(*call.rows)
    for step in range(4):
        call.forward(slice(step, step + 1), False, step > 0, partial, None, lse)
    final = call.poisoned(*call.rows, dtype=case.dtype)
    before = partial.clone()
    call.forward(slice(0, 0), True, True, partial, final, lse)
    assert torch.equal(partial, before), "partial is only read where final is given"
    whole, whole_lse = call.poisoned(*call.rows, dtype=case.dtype), call.new_lse()
    call.forward(slice(None), True, False, None, whole, whole_lse)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(final.float(), whole.float(), rtol=2e-2, atol=4e-3)
    truth, truth_lse = call.poisoned(*call.rows), call.new_lse()
    call.forward(slice(None), True, False, truth, None, truth_lse, ops=reference)
    torch.testing.assert_close(whole_lse, truth_lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole.float(), truth, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("kernel", kernels())
def test_rows_without_work(kernel: str) -> None:
    """No chunk at all, and a chunk that meets no row: 0 and -inf; merged, they change nothing."""
    call = Call(Case(cp_size=4, slash=0, vertical=0), 0, kernel)
    for chunks in (slice(0, 0), slice(1, 3)):
        lse, partial = call.new_lse(), call.poisoned(*call.rows)
        call.forward(chunks, False, False, partial, None, lse)
        assert torch.equal(lse, torch.full_like(lse, float("-inf")))
        assert torch.equal(partial, torch.zeros_like(partial))
    full, full_lse = call.poisoned(*call.rows), call.new_lse()
    call.forward(slice(None), False, False, full, None, full_lse)
    expected, expected_lse = full.clone(), full_lse.clone()
    call.forward(slice(0, 0), False, True, full, None, full_lse)
    torch.testing.assert_close(full_lse, expected_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(full, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("old", [float("-inf"), -1e4, 0.0, 1e4])
def test_merge_survives_gaps(kernel: str, old: float) -> None:
    call = Call(Case(), 0, kernel)
    new, new_lse = call.poisoned(*call.rows), call.new_lse()
    call.forward(slice(None), False, False, new, None, new_lse)
    merged, lse = torch.full_like(new, 2.0), torch.full_like(new_lse, old)
    if old == float("-inf"):
        merged.zero_()
    expected, expected_lse = reference.blocks.merge_rows(
        merged.double(), lse.transpose(1, 2).double(), new.double(), new_lse.transpose(1, 2).double()
    )
    call.forward(slice(None), False, True, merged, None, lse)
    torch.testing.assert_close(lse.transpose(1, 2).double(), expected_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", kernels())
def test_gradients_accumulate_and_overwrite(kernel: str) -> None:
    """dq adds up over launches; dk, dv and the columns' gradients are overwritten, also where nothing attends."""
    case = Case(cp_size=4, batch=2, heads=6, kv_heads=2)
    call = Call(case, 2, kernel)
    out, lse = call.poisoned(*call.rows, dtype=case.dtype), call.new_lse()
    call.forward(slice(None), True, False, None, out, lse)
    dout = torch.randn_like(out)
    delta = call.ops.attention_delta(out, dout)
    torch.testing.assert_close(delta, reference.attention_delta(out, dout), rtol=1e-4, atol=1e-4)
    found = gradients(call, dout, lse, delta, call.ops, range(4))
    truth = gradients(call, dout, lse, delta, reference, range(4))
    once = gradients(call, dout, lse, delta, call.ops, [slice(None)])
    for name, a, b, c in zip(("dq", "dk", "dv", "d_compact_k", "d_compact_v"), found, truth, once, strict=True):
        assert torch.isfinite(a).all(), name
        largest = float(b.abs().max())
        torch.testing.assert_close(a, b, rtol=0, atol=1e-2 * largest, msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(a, c, rtol=0, atol=1e-4 * largest, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 7])
def test_gradients_of_columns_that_few_rows_attend(kernel: str, blocks: int) -> None:
    """The Hopper kernel deals the rows of a column tile out to four warpgroups: some have none, or one more."""
    case = Case(seq_len=64 * blocks, heads=3, kv_heads=3, slash=0, vertical=64 * blocks - 5)
    call = Call(case, 0, kernel)
    out, lse = call.poisoned(*call.rows, dtype=case.dtype), call.new_lse()
    call.forward(slice(None), True, False, None, out, lse)
    dout = torch.randn_like(out)
    delta = call.ops.attention_delta(out, dout)
    found = gradients(call, dout, lse, delta, call.ops, [])
    truth = gradients(call, dout, lse, delta, reference, [])
    for name, a, b in zip(
        ("dq", "d_compact_k", "d_compact_v"), (found[0], *found[3:]), (truth[0], *truth[3:]), strict=True
    ):
        atol = 1e-2 * max(float(b.abs().max()), 1e-3)
        torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def gradients(call: Call, dout: Tensor, lse: Tensor, delta: Tensor, ops, steps) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """dq, dk, dv, d_compact_k, d_compact_v, from poisoned buffers."""
    dq = call.poisoned(*call.rows)
    dk, dv = (call.poisoned(*call.k.shape) for _ in range(2))
    d_compact = [call.poisoned(*x.shape) for x in call.compact]
    ops.vertical_backward_(
        call.q,
        dout,
        lse,
        delta,
        *call.compact,
        call.columns,
        *call.lines,
        SCALE,
        False,
        True,
        call.arch,
        dq,
        *d_compact,
    )
    for step in steps:
        part = step if isinstance(step, slice) else slice(step, step + 1)
        ops.attention_backward_(
            call.q, call.k[part], call.v[part], dout, lse, delta, *call.lines, call.table[part], SCALE, True, True,
            call.arch, dq, dk[part], dv[part],
        )  # fmt: skip
    return [dq, dk, dv, *d_compact]


def test_refusals() -> None:
    call = Call(Case(), 0, kernels()[0])
    lse, partial = call.new_lse(), call.poisoned(*call.rows)
    with pytest.raises(RuntimeError, match="out is float32; the CUDA kernels take bfloat16 and float16"):
        call.ops.attention_delta(call.q.float(), call.q.float())
    good = call.q
    call.q = good[..., :96]
    with pytest.raises(RuntimeError, match="head_dim 96 is not built"):
        call.forward(slice(None), False, False, partial, None, lse)
    call.q = good
    with pytest.raises(RuntimeError, match=r"lse has shape .*, must be \["):
        call.forward(slice(None), False, False, partial, None, lse[..., :-1])
    with pytest.raises(RuntimeError, match="partial is needed to accumulate"):
        call.forward(slice(None), False, True, None, torch.empty_like(good), lse)
    with pytest.raises(RuntimeError, match="contiguous last dimension and rows at multiples of 16 bytes"):
        call.q = torch.randn(*call.rows[:3], 129, device="cuda").to(good.dtype)[..., 1:]
        call.forward(slice(None), False, False, partial, None, lse)
    call.q, call.arch = good, 75
    with pytest.raises(RuntimeError, match="arch=75 must be 0, 80 or 90"):
        call.forward(slice(None), False, False, partial, None, lse)
    call.arch, call.k = 0, call.k.cpu()
    with pytest.raises(RuntimeError, match="k is not on cuda"):
        call.forward(slice(None), False, False, partial, None, lse)


def test_expanded_gradients() -> None:
    """A gradient expanded from a scalar (zero strides) through the public function."""
    from megatron_mtraining import MTrainingConfig, mtraining_attention

    case = Case()
    index = random_index(case)
    results = []
    for copy in (False, True):
        leaves = [x.detach().requires_grad_() for x in mixed_qkv_once(case)]
        out = mtraining_attention(*leaves, index=index, config=MTrainingConfig())
        dout = torch.ones((), device="cuda", dtype=case.dtype).expand_as(out)
        results.append(torch.autograd.grad(out, leaves, dout.contiguous() if copy else dout))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def mixed_qkv_once(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return mixed_qkv(case)
