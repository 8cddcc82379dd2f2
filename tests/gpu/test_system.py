"""What holds for the native library as a whole: no synchronisation, opcheck, streams, graphs, torch.compile."""

import pytest
import torch

from megatron_mtraining import Documents, Layout, MTrainingConfig, mtraining_attention
from megatron_mtraining.comm import VirtualExchange
from megatron_mtraining.estimate import Estimation, estimate_steps
from megatron_mtraining.index import document_table
from megatron_mtraining.ops import native, operators
from megatron_mtraining.ring_call import RingCall
from megatron_mtraining.testing import VirtualRing, lockstep
from tests.gpu.helpers import Case, kernels, mixed_qkv, random_index

pytestmark = pytest.mark.gpu


class Ranks:
    """All ranks of a ring, with tensors that are already dealt out: what each rank does by itself."""

    def __init__(self, case: Case, kernel: str) -> None:
        self.case, self.layout = case, case.make_layout()
        self.config = MTrainingConfig(kernel=kernel, top_p=0.7, **case.config)  # type: ignore[arg-type]
        self.parts = [
            [self.layout.shard(x, rank).contiguous().requires_grad_() for rank in range(case.cp_size)]
            for x in mixed_qkv(case)
        ]
        self.grads = [torch.randn_like(x) for x in self.parts[0]]
        self.ops = operators(kernel, self.parts[0][0])

    def step(self) -> tuple[torch.Tensor, ...]:
        """Index estimation, ring forward, ring backward."""
        size, documents = self.case.cp_size, Documents.single(self.case.seq_len)
        common = {"config": self.config, "layout": self.layout, "scale": 0.1, "ops": self.ops}
        index = lockstep(
            [
                estimate_steps(
                    Estimation(
                        q=self.parts[0][rank].detach(),
                        k=self.parts[1][rank].detach(),
                        documents=documents,
                        cp_rank=rank,
                        **common,
                    )
                )
                for rank in range(size)
            ]
        )[0]
        mailbox: dict[object, object] = {}
        calls = [
            RingCall(index=index, cp_rank=rank, inner_size=size, exchange=VirtualExchange(mailbox, rank), **common)  # type: ignore[arg-type]
            for rank in range(size)
        ]
        leaves = [x for part in self.parts for x in part]
        out = VirtualRing.apply(calls, *leaves)[:size]
        return torch.autograd.grad(out, leaves, self.grads)


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("columns", [16384, 64])
def test_no_host_synchronisation(kernel: str, cp_size: int, columns: int) -> None:
    """Around index estimation, ring forward and backward: no synchronisation and no copy to the host."""
    ranks = Ranks(Case(seq_len=2048, cp_size=cp_size, config={"max_compact_columns": columns}), kernel)
    ranks.step()  # copies the tables to the device once
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        torch.cuda.set_sync_debug_mode("error")
        try:
            ranks.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    names = {event.name for event in trace.events()}
    assert any("attention_forward" in name for name in names), "the profiler saw the kernels"
    # The profiler itself ends with a synchronisation of the device.
    bad = {n for n in names if "Synchronize" in n or "DtoH" in n} - {"cudaDeviceSynchronize"}
    assert not bad, bad


def test_opcheck() -> None:
    native.load()
    ops = torch.ops.megatron_mtraining
    case = Case(seq_len=512, heads=4)
    index = random_index(case)
    q, k, v = (x.contiguous() for x in mixed_qkv(case))
    start = document_table(index.documents, "doc_start", q.device)
    table = torch.arange(8, dtype=torch.int32, device="cuda")
    rows = (1, 512, 4, 128)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    dout, lse, delta = torch.randn_like(q), torch.randn(1, 4, 512, device="cuda"), torch.randn(1, 4, 512, device="cuda")
    columns = ops.list_columns(index.column_words, table, 64, 0)[0]
    compact = [torch.zeros(1, 4, 64, 128, device="cuda", dtype=q.dtype) for _ in range(2)]
    fp32 = [torch.zeros(rows, device="cuda") for _ in range(1)]
    dk, dv = (torch.zeros(1, *k.shape, device="cuda") for _ in range(2))
    d_compact = [torch.zeros(1, 4, 64, 128, device="cuda") for _ in range(2)]
    lines = (index.slash_words, start, table)
    mass = torch.randint(0, 1 << 36, (1, 4, 512), device="cuda")
    segment, tie = (
        torch.zeros(512, dtype=torch.int32, device="cuda"),
        torch.arange(512, dtype=torch.int32, device="cuda"),
    )
    probes = (
        q[:, None, -64:].contiguous(), k, torch.tensor([7], dtype=torch.int32, device="cuda"),
        torch.tensor([[0, 64]], dtype=torch.int32, device="cuda"),
        torch.tensor([[0, 1]] * 8, dtype=torch.int32, device="cuda"), start, table, 0.1,
    )  # fmt: skip
    row_max = ops.probe_row_max(*probes)
    row_sum = ops.probe_row_sum(*probes, row_max)
    histograms, budget = torch.zeros(2, 1, 4, 1, 2, 256, dtype=torch.int64, device="cuda"), (8, 5, 0, 9, 10, 5, False)
    state = ops.select_round_(mass, segment, tie, None, None, histograms[0], 0, *budget)
    calls = {
        "attention_forward_": (q, k[None], v[None], *lines, table[None], *compact, columns, 0.1, False, 0, fp32[0], None, lse),
        "attention_delta": (q, dout),
        "attention_backward_": (
            q, k[None], v[None], dout, lse, delta, *lines, table[None], 0.1, False, True, 0, fp32[0], dk, dv
        ),
        "list_columns": (index.column_words, table, 64, 0),
        "gather_columns_": (k[None], v[None], table[None], columns, *compact),
        "vertical_backward_": (
            q, dout, lse, delta, *compact, columns, *lines, 0.1, False, True, 0, fp32[0], *d_compact
        ),
        "scatter_columns_": (*d_compact, columns, table[None], dk, dv),
        "probe_row_max": probes,
        "probe_row_sum": (*probes, row_max),
        "probe_mass": (*probes, row_max, row_sum),
        "probe_columns": (*probes, row_max, row_sum, segment, tie, 1, 10, 4, 0, 9, 10, 5, False),
        "select_round_": (mass, segment, tie, histograms[0], state, histograms[1], 1, *budget),
        "select_pack": (mass, segment, tie, histograms[0], state, *budget),
        "select_lines": (mass, segment, tie, 1, *budget),
    }  # fmt: skip
    for name, arguments in calls.items():
        torch.library.opcheck(getattr(ops, name).default, arguments, test_utils=tests)


@pytest.mark.parametrize("kernel", kernels())
def test_side_stream_and_graph(kernel: str) -> None:
    """The kernels run on the current stream, also while it is captured."""
    case = Case(seq_len=1024)
    index = random_index(case)
    q, k, v = (x.contiguous() for x in mixed_qkv(case))
    config = MTrainingConfig(kernel=kernel)
    layout = Layout.striped(case.seq_len, 1)  # one object: its tables are copied to the device once
    with torch.no_grad():
        expected = mtraining_attention(q, k, v, index=index, config=config, layout=layout)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            again = mtraining_attention(q, k, v, index=index, config=config, layout=layout)
        side.synchronize()
        assert torch.equal(expected, again)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = mtraining_attention(q, k, v, index=index, config=config, layout=layout)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(expected, captured)


def test_operators_compile_without_graph_breaks() -> None:
    native.load()
    ops = torch.ops.megatron_mtraining

    def function(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
        return ops.attention_delta(out * 2, dout) + 1

    x, y = (torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, y), function(x, y))


def test_missing_kernels_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    case = Case(seq_len=128)
    q, k, v = mixed_qkv(case)
    with pytest.raises(RuntimeError, match=r"take bfloat16 and float16, not torch\.float32"):
        mtraining_attention(q.float(), k.float(), v.float())
    with pytest.raises(RuntimeError, match="take head_dim 64 and 128, not 96"):
        mtraining_attention(q[..., :96], k[..., :96], v[..., :96])
    native.load.cache_clear()
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "libnone.so")
    with pytest.raises(RuntimeError, match=r"not built .*MTRAINING_CUDA=ON"):
        mtraining_attention(q, k, v)
    native.load.cache_clear()


def test_layout_of_one_rank_needs_no_table_copy() -> None:
    """A second call of the same shape copies nothing to the device."""
    case = Case(seq_len=512)
    q, k, v = mixed_qkv(case)
    layout = Layout.striped(512, 1)
    mtraining_attention(q, k, v, layout=layout)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        mtraining_attention(q, k, v, layout=layout)
    assert not [event.name for event in trace.events() if "HtoD" in event.name]
