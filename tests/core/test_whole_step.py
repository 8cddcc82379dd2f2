"""The measured training step: loss and gradients against plain torch, on one rank and on two; budgets; scaling."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from benchmarks import bench_step
from benchmarks.ring import transformer
from benchmarks.ring.systems import SYSTEMS, Sparse, dense_attend, top_gates
from benchmarks.ring.transformer import Transformer
from megatron_mtraining import Layout, MTrainingConfig, estimate_index
from megatron_mtraining.attention import attention_on_groups
from megatron_mtraining.comm import RingGroups
from megatron_mtraining.simulator.memory import Model

MODEL = Model(3, 32, 48, 4, 2, 16, 97, tied=True)
SEQ, LAYERS = 256, 2


def plain_loss(step: Transformer, weights: list[torch.Tensor]) -> torch.Tensor:
    """The loss of all logits at once, nothing recomputed, attention by torch."""
    embedding, norm, *layers = weights
    x = embedding[step.tokens]
    cos, sin = step.rotary
    for first in range(0, len(layers), 6):
        qkv, project, up, down, norm1, norm2 = layers[first : first + 6]
        heads = (F.rms_norm(x, (32,), norm1) @ qkv.T).view(SEQ, 8, 16)
        q, k, v = heads[:, :4], heads[:, 4:6], heads[:, 6:]
        q, k = (
            torch.cat((y[..., :8] * cos - y[..., 8:] * sin, y[..., 8:] * cos + y[..., :8] * sin), -1) for y in (q, k)
        )
        out = F.scaled_dot_product_attention(
            *(y.transpose(0, 1)[None] for y in (q, k, v)), is_causal=True, enable_gqa=True
        )
        x = x + out[0].transpose(0, 1).flatten(1) @ project.T
        both = F.rms_norm(x, (32,), norm2) @ up.T
        x = x + (F.silu(both[:, :48]) * both[:, 48:]) @ down.T
    return F.cross_entropy(F.rms_norm(x, (32,), norm) @ embedding.T, step.labels)


def one_rank() -> Transformer:
    return Transformer(MODEL, LAYERS, SEQ, torch.arange(SEQ))


def expected() -> tuple[float, torch.Tensor]:
    """Loss and all gradients, one after another, of the first step."""
    step = one_rank()
    weights = [weight.clone().requires_grad_() for weight in step.main]
    loss = plain_loss(step, weights)
    grads = torch.autograd.grad(loss, weights)
    return float(loss.detach()), torch.cat([grad.flatten() for grad in grads])


def test_a_step_has_the_loss_and_the_gradients_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "PIECE", 100)  # pieces that do not divide the sequence
    loss, grads = expected()
    step = one_rank()
    before = [weight.clone() for weight in step.main]
    how, attend = dense_attend(MODEL, RingGroups())
    found, times = step.step(attend)
    assert how == "cuDNN" and found == pytest.approx(loss, rel=1e-5)
    assert torch.allclose(step.grad_sum, grads, atol=1e-6)
    parts = ("forward", "output layer and loss", "backward", "gradients", "optimizer")
    assert times["step"] == pytest.approx(sum(times[part] for part in parts)) and len(times) == 6
    for weight, main, old in zip(step.weights, step.main, before, strict=True):
        assert torch.equal(weight, main) and not torch.equal(main, old)
    # The next step starts from new weights and from gradients of zero.
    again, _ = step.step(attend)
    assert again < loss and not torch.allclose(step.grad_sum, grads + grads, atol=1e-3)


def _two_ranks(rank: int, folder: str, layout_name: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    config = MTrainingConfig(layout=layout_name, dense=True)
    layout = Layout.from_config(config, SEQ, 2)
    groups = RingGroups(dist.group.WORLD, inner_grad=dist.new_group([0, 1]))
    step = Transformer(MODEL, LAYERS, SEQ, layout.token_position(rank), dist.group.WORLD)
    share, _ = step.step(lambda q, k, v: attention_on_groups(q, k, v, config=config, groups=groups, layout=layout))
    loss = torch.tensor(share)
    dist.all_reduce(loss)
    wanted, grads = expected()
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    assert torch.allclose(step.grad_sum, grads, atol=1e-6)
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
def test_two_ranks_have_those_of_one(tmp_path: Path, layout: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(_two_ranks, (str(tmp_path), layout), nprocs=2)


@pytest.mark.parametrize("name", [name for name, system in SYSTEMS.items() if system.policy])
def test_budgets_keep_the_wanted_share(name: str) -> None:
    seq_len, system = 16384, SYSTEMS[name]
    torch.manual_seed(0)
    q, k = torch.randn(1, seq_len, 2, 32), torch.randn(1, seq_len, 1, 32)
    sparse = Sparse(system, seq_len, 0.05, RingGroups())
    for _ in range(1 + system.fitted):
        sparse.indices = [estimate_index(q, k, config=sparse.config)]
        found = sparse.measured_density()
        if system.fitted:
            sparse.fit()
    # Whole gates and block distances, some of them always kept: coarse at this length.
    assert found == pytest.approx(0.05, rel=0.3)


def test_gates_for_a_density() -> None:
    # 512 gates: 13 keep 25 / 512 - 156 / 512^2 = 4.82 %, 14 keep 5.20 %.
    assert top_gates(512, 0.05) == 13 and top_gates(512, 0.052) == 14
    assert top_gates(8, 0.01) == 1 and top_gates(8, 1.0) == 8


def test_dense_has_no_budgets_and_needs_transformer_engine_on_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="dense: has no index"):
        SYSTEMS["dense"].config(1024, 0.05)
    monkeypatch.setattr(RingGroups, "cp_size", property(lambda _: 2))
    monkeypatch.setattr("benchmarks.ring.megatron_dense.installed", lambda: False)
    with pytest.raises(RuntimeError, match="needs Transformer Engine, which is not installed"):
        dense_attend(MODEL, RingGroups("a group"))  # type: ignore[arg-type]


def test_the_step_of_all_layers_by_hand() -> None:
    times = {"forward": 10.0, "backward": 20.0, "output layer and loss": 5.0, "gradients": 1.0, "optimizer": 2.0}
    model = Model(6, 10, 5, 1, 1, 10, 20, tied=True)
    weights = 10 * 20, 10 * 10 * 2 * 2 + 3 * 10 * 5  # embedding, a layer
    grown = (weights[0] + 6 * weights[1]) / (weights[0] + 2 * weights[1])
    assert bench_step.scaled_ms(times, model, 2) == pytest.approx(3 * 30 + 5 + grown * 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--density", "1"], "--density 1.0: must be between 0 and 1"),
        (["--layers", "37"], "--layers 37: must be from 1 to 36, those of qwen2.5-3b"),
        (["--repeats", "0"], "--repeats 0: must be at least 1"),
        (["--seq-len", "1000"], "--seq-len 1000: must be a multiple of 256"),
    ],
)
def test_wrong_options_are_named(
    given: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["bench_step", "--out", "x", *given])
    with pytest.raises(SystemExit):
        bench_step.arguments()
    assert message in capsys.readouterr().err
