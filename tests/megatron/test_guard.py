"""The guard: which calls go dense, that it is counted, and that every rank of the layer decides alike."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from megatron_mtraining import MTrainingConfig, estimate_index
from megatron_mtraining.index import VerticalSlashIndex
from megatron_mtraining.integration.guard import Guard, format_line, merged
from megatron_mtraining.integration.layer_plan import LayerPlan
from megatron_mtraining.recall import probe_recall

from .ranks import run_ranks
from .test_core_attention import core, qkv

SPARSE = MTrainingConfig(top_p=0.3)


def recall_of(q, k, config=SPARSE):
    q, k = q.transpose(0, 1), k.transpose(0, 1)
    index = estimate_index(q, k, config=config)
    return float(probe_recall(q, k, index, config=config).amin()), float(index.density())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("watched", ["recall", "density"])
@pytest.mark.parametrize("breaks", [True, False])
def test_a_call_outside_the_bounds_is_dense_and_counted(plugin, watched, breaks):
    state = plugin(SPARSE)
    q, k, v = qkv(seq=512)
    sparse = core()(q, k, v, None)
    state.plan = LayerPlan(dense_steps=1)
    dense = core()(q, k, v, None)
    assert float((sparse - dense).detach().abs().max()) > 1e-2
    state.plan = LayerPlan()
    recall, density = recall_of(q, k)
    off = 1e-3 if breaks else -1e-3
    state.guard = Guard(recall=recall + off) if watched == "recall" else Guard(density=density - off)
    out = core()(q, k, v, None)
    torch.testing.assert_close(out, dense if breaks else sparse, rtol=1e-5, atol=1e-6)
    calls, went_dense, lowest, highest = state.guard.take()[0]
    assert (calls, went_dense) == (1, int(breaks))
    assert lowest == (recall if watched == "recall" else 1)
    assert highest == density
    assert not state.guard.take()


@pytest.mark.usefixtures("one_rank")
def test_gradients_of_a_guarded_call_are_those_of_dense_attention(plugin):
    state = plugin(SPARSE)
    q, k, v = qkv(seq=512)
    state.guard = Guard(recall=1.0)
    ours = torch.autograd.grad(core()(q, k, v, None).square().sum(), (q, k, v))
    state.guard, state.plan = None, LayerPlan(dense_layers=frozenset({0}))
    dense = torch.autograd.grad(core()(q, k, v, None).square().sum(), (q, k, v))
    for x, wanted in zip(ours, dense, strict=True):
        torch.testing.assert_close(x, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_evaluation_is_guarded_and_not_counted(plugin):
    state = plugin(SPARSE)
    q, k, v = qkv(seq=512)
    state.guard = Guard(recall=1.0)
    training = core()(q, k, v, None)
    state.guard.take()
    with torch.no_grad():
        assert torch.equal(core().eval()(q, k, v, None), training)
    assert not state.guard.take()


WATCHED = ("guard.py", "recall.py", "core_attention.py", "layer_plan.py", "index.py", "bitmap.py")
"""Files on a guarded call's way; the reference operators (CPU alone) and host tables are read elsewhere."""


def not_where_it_would_wait(name):
    """A method of tensors that waits for the device, and fails if one of the watched files calls it."""
    method = getattr(torch.Tensor, name)

    def refusing(*args, **kwargs):
        caller = Path(sys._getframe(1).f_code.co_filename).name
        if caller in WATCHED:
            pytest.fail(f"Tensor.{name} in {caller} waits for the device")
        return method(*args, **kwargs)

    return refusing


@pytest.mark.usefixtures("one_rank")
def test_nothing_is_copied_to_the_host(plugin, monkeypatch):
    state = plugin(SPARSE)
    q, k, v = qkv(seq=512)
    state.guard = Guard(recall=0.9, density=0.5)
    core()(q, k, v, None)  # makes the tables of this shape
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, not_where_it_would_wait(name))
    core()(q, k, v, None)
    with pytest.raises(pytest.fail.Exception, match=r"Tensor\.tolist .*waits for the device"):
        state.guard.take()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("segments", [1, 4])
def test_heads_are_judged_for_themselves(plugin, segments):
    """With the scope head, those below the bound keep every line, the others what was estimated for them."""
    plugin(SPARSE)
    q, k, _ = (x.transpose(0, 1).detach() for x in qkv(seq=512))
    index = estimate_index(q, k, config=SPARSE)
    recall = probe_recall(q, k, index, config=SPARSE, segments=segments).amin(-1)
    bound = float(recall.flatten().sort().values[recall.numel() // 2])
    guard = Guard(recall=bound, scope="head", segments=segments)
    chosen = guard(
        q, k, index, config=SPARSE, layout=None, cp_group=None, tp_group=None, softmax_scale=None, layer=2
    )  # fmt: skip
    failed = recall < bound
    assert 0 < int(failed.sum()) < failed.numel()
    assert torch.equal(chosen.slash_bits().all(-1), failed | index.slash_bits().all(-1))
    assert torch.equal(chosen.slash_words[~failed], index.slash_words[~failed])
    assert torch.equal(chosen.column_words[~failed], index.column_words[~failed])
    calls, dense, lowest, _ = guard.take()[2]
    assert (calls, dense, lowest) == (failed.numel(), int(failed.sum()), float(recall.min()))


def test_a_head_that_only_the_middle_needs_goes_dense():
    """The end attends near keys, the middle of head 1 attends key 10: seen by the segments, not by the end."""
    q, k = torch.zeros(1, 1024, 2, 16), torch.zeros(1, 1024, 2, 16)
    k[..., 0] = 1e-2 * torch.arange(1024)[None, :, None]
    q[..., 0] = 400.0
    q[:, :960, 1, 0], q[:, :960, 1, 1], k[:, 10, 1, 1] = 0.0, 400.0, 1.0
    config = MTrainingConfig(top_p=0.9)
    index = estimate_index(q, k, config=config)
    dense = []
    for segments in (1, 4):
        guard = Guard(recall=0.8, scope="head", segments=segments)
        chosen = guard(
            q, k, index, config=config, layout=None, cp_group=None, tp_group=None, softmax_scale=None, layer=0
        )  # fmt: skip
        dense.append(chosen.slash_bits()[0].all(-1).tolist())
    assert dense == [[False, False], [False, True]]


def _heads_go_dense_together(rank):
    """Two tensor-parallel ranks: one holds heads of poor recall, both go dense."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 512, 2, 16, generator=generator) for _ in "qk")
    index = estimate_index(q, k, config=SPARSE)
    poor = VerticalSlashIndex.from_lines([[[0], [0]]], [[[], []]], seq_len=512)
    guard = Guard(recall=0.2)
    chosen = guard(
        q, k, poor if rank else index, config=SPARSE, layout=None, cp_group=None,
        tp_group=torch.distributed.group.WORLD, softmax_scale=None, layer=4,
    )  # fmt: skip
    assert bool(chosen.slash_bits().all())
    calls, dense, lowest, _ = guard.take()[4]
    assert (calls, dense) == (1, 1)
    assert (lowest < 0.2) == (rank == 1)


def test_heads_on_other_ranks_go_dense_too(tmp_path):
    run_ranks([_heads_go_dense_together], 2, tmp_path)


def test_what_ranks_saw_is_one_line_a_layer():
    seen = merged([{3: (4, 1, 0.5, 0.2)}, {3: (4, 0, 0.8, 0.3), 0: (2, 0, 1.0, 0.1)}])
    assert list(seen) == [0, 3]
    assert seen[3] == (8, 1, 0.5, 0.3)
    line = format_line(3, seen[3], Guard(recall=0.7))
    assert line == (
        "> megatron_mtraining: guard: layer 3 went dense in 1 of 8 calls of all ranks: lowest recall 0.5000 (bound 0.7)"
    )
