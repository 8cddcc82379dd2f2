"""Ranges for NVIDIA's profilers, through a stand-in that notes them."""

import pytest
import torch

from megatron_mtraining import Layout, MTrainingAttention, MTrainingConfig, mtraining_attention, nvtx
from megatron_mtraining.recall import probe_recall
from megatron_mtraining.testing import run_virtual

from .helpers import random_qkv

CONFIG = MTrainingConfig(top_p=0.7)


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ranges in the order of their beginning, each with the names of those around it."""
    found: list[str] = []
    stack: list[str] = []

    def push(name: str) -> None:
        stack.append(name.removeprefix("mtraining "))
        found.append("/".join(stack))

    monkeypatch.setattr(nvtx, "shows", lambda _: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", stack.pop)
    yield found
    assert not stack, "a range was left open"


def test_index_launches_and_merges(ranges: list[str]) -> None:
    q, k, v = random_qkv(512, dtype=torch.float32)
    out = mtraining_attention(q, k, v, config=CONFIG)
    assert ranges == ["index", "forward", "forward/launch 0"]
    out.sum().backward()
    assert ranges[3:] == ["backward", "backward/launch 0", "backward/launch 0/merge"]


def test_every_launch_of_a_ring_has_a_range(ranges: list[str]) -> None:
    """Four ranks played in one process: a launch is one range, the sums of partial gradients one a rank in it."""
    q, k, v = random_qkv(512, dtype=torch.float32)
    config = MTrainingConfig(dense=True, chunks_per_launch=1)
    run_virtual(q, k, v, layout=Layout.striped(512, 4), config=config).sum().backward()
    launches = [name for name in ranges if name.split("/")[-1].startswith("launch")]
    assert [name.split("/")[-1] for name in launches] == [f"launch {n}" for n in range(4)] * 2
    assert sum(name.endswith("merge") for name in ranges) == 4 * 4


def test_recall_has_a_range_and_errors_close_theirs(ranges: list[str]) -> None:
    q, k, v = random_qkv(512, dtype=torch.float32)
    _, aux = mtraining_attention(q, k, v, config=CONFIG, return_aux=True)
    probe_recall(q, k, aux.index, config=CONFIG)
    assert ranges[-1] == "recall"
    with pytest.raises(ZeroDivisionError), nvtx.nvtx_range("mtraining x", q.device):
        raise ZeroDivisionError


def test_a_compiled_module_has_no_graph_break(ranges: list[str]) -> None:
    module = torch.compile(MTrainingAttention(256, 64, config=CONFIG), backend="eager", fullgraph=True)
    q, k, v = random_qkv(256, dtype=torch.float32)
    module(q, k, v)
    assert "forward/launch 0" in ranges


def test_nothing_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda _: pytest.fail("a range was opened"))
    q, k, v = random_qkv(256, dtype=torch.float32)
    mtraining_attention(q, k, v, config=CONFIG)
