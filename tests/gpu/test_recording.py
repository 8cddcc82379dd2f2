"""What training records on a GPU: nothing waits for the device before the numbers are read; ranges; memory."""

import pytest
import torch

from megatron_mtraining import MTrainingConfig, VerticalSlashIndex, mtraining_attention
from megatron_mtraining.metrics import Recorder
from megatron_mtraining.recall import probe_recall

pytestmark = pytest.mark.gpu
CONFIG = MTrainingConfig(top_p=0.7)


def qkv(seq_len: int, heads: int = 8, kv_heads: int = 2, dim: int = 128) -> list[torch.Tensor]:
    return [
        torch.randn(1, seq_len, h, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def recorded_call(recorder: Recorder, tensors: list[torch.Tensor]) -> None:
    """A logged step of one layer: forward, recall, backward."""
    q, k, _ = tensors
    out, aux = mtraining_attention(*tensors, config=CONFIG, return_aux=True)
    recorder.record(1, aux.index, aux.layout, aux.inner_size)
    recorder.recalls[1] = probe_recall(q, k, aux.index, config=CONFIG)
    out.backward(torch.ones_like(out))


def test_a_recorded_step_waits_for_nothing() -> None:
    recorder, tensors = Recorder(takes_recall=True), qkv(8192)
    with recorder.active():
        recorded_call(recorder, tensors)  # copies the tables to the device once
        recorder.summary()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                recorded_call(recorder, tensors)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = recorder.summary()
    assert all(found["seconds"][phase] > 0 for phase in ("index", "forward", "backward", "recall"))
    assert 0.7 <= found["recall_by_layer"][1] < 1
    pairs = 8 * 8192**2 / 2 * found["density_by_layer"][1]
    assert found["useful_flops"] == pytest.approx(2 * 14 * 128 * pairs)


def test_ranges_around_real_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    push = torch.cuda.nvtx.range_push
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (names.append(name), push(name)))
    recorded_call(Recorder(), qkv(1024))
    expected = ["index", "forward", "launch 0", "recall", "backward", "launch 0", "merge"]
    assert names == [f"mtraining {name}" for name in expected]


def test_memory_grows_with_the_length() -> None:  # I3
    """Twice the tokens take about twice the memory: nothing has as many entries as there are pairs."""

    def peak(seq_len: int) -> int:
        tensors = qkv(seq_len)
        index = VerticalSlashIndex.from_lines(
            [[[0, 1, 5]] * 8], [[list(range(0, 1024, 16))] * 8], seq_len=seq_len, device="cuda"
        )
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        mtraining_attention(*tensors, config=CONFIG, index=index).sum().backward()
        mtraining_attention(*tensors, config=CONFIG)  # estimation
        return torch.cuda.max_memory_allocated() - before

    peak(4096)
    shorter, longer = peak(65536), peak(131072)
    assert longer <= 2.2 * shorter, f"{shorter} bytes at 65,536 tokens, {longer} at 131,072"
    assert longer < 131072**2 / 8
