"""Attention kernels, forward and backward, against the fp64 oracle, at most twice the error of SDPA."""

import pytest
import torch

from megatron_mtraining import Documents
from tests.gpu.helpers import (
    Case,
    assert_as_good_as_sdpa,
    kernels,
    mixed_qkv,
    random_index,
    run_oracle,
    run_ours,
    run_sdpa,
)

pytestmark = pytest.mark.gpu

PACKED = Documents(1024, (0, 1, 5, 12), (64, 256, 448, 200))
CASES = {
    "plain": Case(),
    "fp16": Case(dtype=torch.float16),
    "d64": Case(dim=64, heads=9, kv_heads=3),
    "d64-fp16": Case(dim=64, dtype=torch.float16, cp_size=4),
    "mha": Case(heads=3, kv_heads=3),
    "gqa8": Case(heads=16, kv_heads=2, cp_size=2),
    "gqa4": Case(heads=32, kv_heads=8, cp_size=2),
    "batch": Case(batch=3, heads=4, kv_heads=1, cp_size=2),
    "one-block": Case(seq_len=64, slash=1, vertical=10),
    "two-blocks": Case(seq_len=128, cp_size=2, slash=1, vertical=20),
    "long": Case(seq_len=4096, heads=2, kv_heads=1, slash=9, vertical=400),
    "striped": Case(cp_size=4),
    "striped-hierarchical": Case(cp_size=8, inner_size=4),
    "zigzag": Case(cp_size=4, layout="zigzag"),
    "contiguous": Case(cp_size=4, layout="contiguous"),
    "documents": Case(documents=PACKED),
    "documents-striped": Case(documents=PACKED, cp_size=4, batch=2),
    "large-logits": Case(scale_up=30.0, cp_size=2),
    "spikes": Case(spikes=12, cp_size=2),
    "spikes-fp16": Case(spikes=12, dtype=torch.float16),
    "no-columns": Case(vertical=0, cp_size=2),
    "diagonal-only": Case(slash=0, vertical=0, cp_size=4),
    "columns-only": Case(slash=0, vertical=300),
    "dense": Case(slash=16, vertical=0),
    "all-columns": Case(slash=0, vertical=1024),
    "many-columns": Case(heads=32, kv_heads=8, vertical=900),
    "pieces": Case(cp_size=4, vertical=500, config={"max_compact_columns": 64}),
    "gather-again": Case(cp_size=4, vertical=200, config={"vertical_backward": "gather"}),
}


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("name", CASES)
def test_against_oracle(name: str, kernel: str) -> None:
    case = CASES[name]
    index, qkv = random_index(case), mixed_qkv(case)
    dout = torch.randn_like(qkv[0])
    mask = index.to_mask()
    ours = run_ours(case, kernel, index, qkv, dout)
    assert_as_good_as_sdpa(ours, run_sdpa(qkv, mask, dout), run_oracle(qkv, mask, dout), f"{name} {kernel}")


@pytest.mark.parametrize("kernel", kernels())
def test_ragged_length_and_short_sequences(kernel: str) -> None:
    for seq_len in (1, 63, 65, 777):
        case = Case(seq_len=seq_len, slash=3, vertical=min(seq_len, 30))
        index, qkv = random_index(case), mixed_qkv(case)
        dout = torch.randn_like(qkv[0])
        mask = index.to_mask()
        ours = run_ours(case, kernel, index, qkv, dout)
        assert_as_good_as_sdpa(ours, run_sdpa(qkv, mask, dout), run_oracle(qkv, mask, dout), f"{seq_len} {kernel}")


@pytest.mark.parametrize("kernel", kernels())
def test_logits_far_below_zero_do_not_meet_zero_keys(kernel: str) -> None:
    """The tail of the last block holds zero keys: with scores near -20 they would dominate if they were not masked."""
    case = Case(seq_len=1000, slash=16, vertical=0)
    q, k, v = mixed_qkv(case)
    direction = torch.nn.functional.normalize(torch.randn(case.dim, device="cuda"), dim=0)
    q = (q * 0.1 + 15 * direction).to(case.dtype)
    k = (k * 0.1 - 15 * direction).to(case.dtype)
    index = random_index(case)
    dout = torch.randn_like(q)
    mask = index.to_mask()
    ours = run_ours(case, kernel, index, (q, k, v), dout)
    truth = run_oracle((q, k, v), mask, dout)
    assert float(truth["lse"].max()) < -10
    assert_as_good_as_sdpa(ours, run_sdpa((q, k, v), mask, dout), truth, kernel)


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("dim", [64, 128])
def test_same_bits_in_every_run(kernel: str, dim: int) -> None:
    """Large enough that a thread block of a persistent kernel works on several row tiles."""
    case = Case(seq_len=8192, heads=16, kv_heads=2, dim=dim, cp_size=2, slash=6, vertical=200)
    index, qkv = random_index(case), mixed_qkv(case)
    dout = torch.randn_like(qkv[0])
    first = run_ours(case, kernel, index, qkv, dout)
    for _ in range(29):
        again = run_ours(case, kernel, index, qkv, dout)
        for name, x in first.items():
            assert torch.equal(x, again[name]), f"{name} differs between two runs"


@pytest.mark.parametrize("kernel", kernels())
def test_fast_mode_is_as_accurate(kernel: str) -> None:
    case = Case(cp_size=2, config={"deterministic": False})
    index, qkv = random_index(case), mixed_qkv(case)
    dout = torch.randn_like(qkv[0])
    mask = index.to_mask()
    ours = run_ours(case, kernel, index, qkv, dout)
    assert_as_good_as_sdpa(ours, run_sdpa(qkv, mask, dout), run_oracle(qkv, mask, dout), kernel)


@pytest.mark.parametrize("kernel", kernels())
def test_offsets_beyond_32_bits(kernel: str) -> None:  # I1
    """2^31 elements and one block more: the first and the last rows are right."""
    heads, kv_heads, dim = 32, 4, 128
    for seq_len in (524288, 524352):
        case = Case(seq_len=seq_len, heads=heads, kv_heads=kv_heads, dim=dim)
        q = torch.randn(1, seq_len, heads, dim, device="cuda", dtype=case.dtype).requires_grad_()
        k, v = (
            torch.randn(1, seq_len, kv_heads, dim, device="cuda", dtype=case.dtype).requires_grad_() for _ in range(2)
        )
        check_ends(case, kernel, (q, k, v))


def check_ends(case: Case, kernel: str, qkv: tuple[torch.Tensor, ...]) -> None:
    """Compares the first and last block of rows (out, dq) and the last keys (dk, dv) with fp64."""
    from megatron_mtraining import MTrainingConfig, VerticalSlashIndex, mtraining_attention

    q, k, v = qkv
    far = case.seq_len // 64 - 1
    index = VerticalSlashIndex.from_lines(
        [[[0, 1, far]] * case.heads], [[[5, 70000]] * case.heads], seq_len=case.seq_len, device="cuda"
    )
    out = mtraining_attention(q, k, v, index=index, config=MTrainingConfig(kernel=kernel))
    dout = torch.randn(1, 64, case.heads, case.dim, device="cuda", dtype=case.dtype)
    grads = torch.autograd.grad(out, qkv, torch.nn.functional.pad(dout, (0, 0, 0, 0, case.seq_len - 64, 0)))
    group = case.heads // case.kv_heads
    last = slice(case.seq_len - 64, case.seq_len)
    keys = torch.cat([torch.arange(64), torch.tensor([70000]), torch.arange(case.seq_len - 128, case.seq_len)]).cuda()
    # Column 5 lies in block 0, which the farthest distance covers.
    position = torch.arange(case.seq_len - 64, case.seq_len, device="cuda")
    mask = keys[None, :] <= position[:, None]
    leaves = [q[:, last].detach().double().requires_grad_()] + [
        x[:, keys].detach().double().requires_grad_() for x in (k, v)
    ]
    expanded = [x.repeat_interleave(group, 2) for x in leaves[1:]]
    scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], expanded[0]) * case.dim**-0.5
    truth = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), expanded[1])
    true_grads = torch.autograd.grad(truth, leaves, dout.double())
    pairs = [
        (out[:, last], truth),
        (grads[0][:, last], true_grads[0]),
        (grads[1][:, last], true_grads[1][:, -64:]),
        (grads[2][:, last], true_grads[2][:, -64:]),
    ]
    for x, reference in pairs:
        assert float((x.double() - reference).norm() / reference.norm()) < 1e-2
    first = torch.softmax(
        (torch.einsum("qhd,khd->hqk", q[0, :64].double(), k[0, :64].double().repeat_interleave(group, 1)))
        .mul(case.dim**-0.5)
        .masked_fill(torch.ones(64, 64, device="cuda", dtype=torch.bool).triu(1), float("-inf")),
        -1,
    )
    reference = torch.einsum("hqk,khd->qhd", first, v[0, :64].double().repeat_interleave(group, 1))
    assert float((out[0, :64].double() - reference).norm() / reference.norm()) < 1e-2
    assert not grads[0][:, :64].any()
