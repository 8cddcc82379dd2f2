"""Faults that sparse and ring attention kernels elsewhere had, each as a small case with the right answer."""

import pytest
import torch
from torch import Tensor

from megatron_mtraining import Documents, MTrainingConfig, VerticalSlashIndex, mtraining_attention
from megatron_mtraining.testing import run_virtual
from tests.gpu.helpers import (
    NAMES,
    Case,
    assert_as_good_as_sdpa,
    kernels,
    mixed_qkv,
    random_index,
    run_oracle,
    run_ours,
    run_sdpa,
)

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kernel", kernels())]
K0 = {"seq_len": 4096, "heads": 8, "kv_heads": 2, "slash": 10, "vertical": 300}


def compare(case: Case, kernel: str, index: VerticalSlashIndex, qkv: tuple[Tensor, ...], dout: Tensor) -> None:
    """Everything against the fp64 oracle under the mask of the index."""
    mask = index.to_mask()
    ours = run_ours(case, kernel, index, qkv, dout)
    assert_as_good_as_sdpa(ours, run_sdpa(qkv, mask, dout), run_oracle(qkv, mask, dout), kernel)


def run_estimated(
    case: Case, kernel: str, config: MTrainingConfig, qkv: tuple[Tensor, ...], dout: Tensor
) -> tuple[dict[str, Tensor], VerticalSlashIndex]:
    """out, lse and gradients with an index estimated from q and k by the same kernels, and the index."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out, aux = run_virtual(*leaves, layout=case.make_layout(), config=config, documents=case.documents, return_aux=True)
    grads = torch.autograd.grad(out, leaves, dout)
    return dict(zip(NAMES, (out.detach(), aux.lse, *grads), strict=True)), aux.index


@pytest.mark.parametrize("dim", [64, 128])
def test_every_ring_step_but_the_first_is_empty(kernel: str, dim: int) -> None:  # B2
    case = Case(cp_size=4, dim=dim, **{**K0, "slash": 0, "vertical": 0})
    qkv = mixed_qkv(case)
    compare(case, kernel, random_index(case), qkv, torch.randn_like(qkv[0]))


def test_logits_below_minus_60000(kernel: str) -> None:  # B2: no finite stand-in for infinity
    case = Case(cp_size=4, seq_len=1024)
    q, k, v = (x.clone() for x in mixed_qkv(case))
    q[..., 0], k[..., 0] = 1024, -768
    index, dout = random_index(case), torch.randn_like(q)
    mask = index.to_mask()
    truth = run_oracle((q, k, v), mask, dout)
    assert float(truth["lse"].max()) < -6e4
    assert_as_good_as_sdpa(
        run_ours(case, kernel, index, (q, k, v), dout), run_sdpa((q, k, v), mask, dout), truth, kernel
    )


def test_lse_that_grows_at_every_ring_step(kernel: str) -> None:  # B3
    case = Case(cp_size=4, **K0)
    q, k, v = (x.clone() for x in mixed_qkv(case))
    blocks = torch.arange(case.seq_len, device="cuda") // 64
    k *= torch.where(blocks % 4 == 3, 30, torch.where(blocks % 4 == 2, 10, 1)).to(k.dtype)[None, :, None, None]
    compare(case, kernel, random_index(case), (q, k, v), torch.randn_like(q))


@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("lines", ["sparse", "all"])
def test_key_gradients_that_come_from_other_ranks_alone(kernel: str, cp_size: int, lines: str) -> None:  # C1
    case = Case(cp_size=cp_size, **K0)
    layout, qkv = case.make_layout(), mixed_qkv(case)
    dout = torch.randn_like(qkv[0])
    own = layout.token_position(0).cuda()
    dout[:, own] = 0
    documents = Documents.single(case.seq_len)
    index = VerticalSlashIndex.dense(1, case.heads, documents, "cuda") if lines == "all" else random_index(case)
    mask = index.to_mask()
    ours = run_ours(case, kernel, index, qkv, dout)
    assert_as_good_as_sdpa(ours, run_sdpa(qkv, mask, dout), run_oracle(qkv, mask, dout), kernel)
    assert ours["dk"][:, own].any() and ours["dv"][:, own].any()


@pytest.mark.parametrize("dim", [64, 128])
def test_all_blocks_then_other_sparsities_in_one_process(kernel: str, dim: int) -> None:  # C2
    for slash, vertical in ((64, 0), (3, 0), (0, 40), (20, 500)):
        case = Case(dim=dim, **{**K0, "slash": slash, "vertical": vertical})
        qkv = mixed_qkv(case)
        compare(case, kernel, random_index(case), qkv, torch.randn_like(qkv[0]))


@pytest.mark.parametrize("dim", [96, 256])
def test_other_head_dimensions_are_refused(kernel: str, dim: int) -> None:  # C2
    q, k, v = (torch.randn(1, 128, 2, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(RuntimeError, match=f"head_dim 64 and 128, not {dim}"):
        mtraining_attention(q, k, v, config=MTrainingConfig(kernel=kernel))


@pytest.mark.parametrize("cp_size", [1, 2])
def test_strided_operands_have_the_bits_of_contiguous_ones(kernel: str, cp_size: int) -> None:  # C4
    case = Case(cp_size=cp_size, **{**K0, "seq_len": 1024})
    index, views = random_index(case), mixed_qkv(case)
    copies = tuple(x.contiguous() for x in views)
    assert not any(x.is_contiguous() for x in views)
    gradient = torch.randn(1, case.heads, case.seq_len, case.dim, device="cuda", dtype=case.dtype)
    transposed = gradient.transpose(1, 2)
    expanded = torch.ones((), device="cuda", dtype=case.dtype).expand_as(transposed)
    for dout in (transposed, expanded):
        found = run_ours(case, kernel, index, views, dout)
        expected = run_ours(case, kernel, index, copies, dout.contiguous())
        for name, x in found.items():
            assert torch.equal(x, expected[name]), name


def test_samples_of_a_batch_do_not_know_each_other(kernel: str) -> None:  # D1
    case = Case(cp_size=2, batch=2, **{**K0, "seq_len": 1024})
    qkv = mixed_qkv(case)
    dout = torch.randn_like(qkv[0])
    config = MTrainingConfig(kernel=kernel, top_p=0.7)
    together, _ = run_estimated(case, kernel, config, qkv, dout)
    swapped, _ = run_estimated(case, kernel, config, tuple(x.flip(0) for x in qkv), dout.flip(0))
    for sample in range(2):
        part = slice(sample, sample + 1)
        alone, _ = run_estimated(case, kernel, config, tuple(x[part] for x in qkv), dout[part])
        for name, x in alone.items():
            assert torch.equal(together[name][part], x), f"{name} of sample {sample}"
            assert torch.equal(swapped[name].flip(0)[part], x), f"{name} of sample {sample}, swapped"


def test_empty_full_and_duplicate_lines(kernel: str) -> None:  # D3
    case = Case(**{**K0, "seq_len": 1024})
    heads, blocks = case.heads, 16
    far, every = [blocks - 1], list(range(case.seq_len))
    lines = {
        "no columns": ([[3]] * heads, [[]] * heads),
        "no distances": ([[]] * heads, [[5, 700]] * heads),
        "the farthest distance": ([far] * heads, [[]] * heads),
        "duplicates": ([[2, 2, 0, 0]] * heads, [[9, 9, 9]] * heads),
        "all columns": ([[]] * heads, [every] * heads),
        "everything": ([list(range(blocks))] * heads, [every] * heads),
    }
    for name, (slash, vertical) in lines.items():
        index = VerticalSlashIndex.from_lines([slash], [vertical], seq_len=case.seq_len, device="cuda")
        assert index.slash_bits()[..., 0].all(), f"{name}: the diagonal is always kept"
        qkv = mixed_qkv(case)
        compare(case, kernel, index, qkv, torch.randn_like(qkv[0]))


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_sequences_about_as_short_as_the_probes(kernel: str, cp_size: int) -> None:  # D4
    """One block a rank, as many rows as probes (over several ranks), a block a rank more; then short after long."""
    config = MTrainingConfig(kernel=kernel, top_p=1.0, max_vertical=None, max_slash=None, last_q=128)
    for seq_len in (64 * cp_size, 256, 128 + 64 * cp_size, 2048, 64 * cp_size):
        if seq_len % (64 * cp_size):
            continue
        case = Case(seq_len=seq_len, cp_size=cp_size)
        qkv = mixed_qkv(case)
        dout = torch.randn_like(qkv[0])
        ours, index = run_estimated(case, kernel, config, qkv, dout)
        mask = torch.ones(seq_len, seq_len, dtype=torch.bool, device="cuda").tril()
        assert torch.equal(index.to_mask(), mask.expand_as(index.to_mask()))
        assert_as_good_as_sdpa(ours, run_sdpa(qkv, mask, dout), run_oracle(qkv, mask, dout), f"{seq_len}")


def test_tail_of_4049_tokens(kernel: str) -> None:  # D7
    """Keys opposite to the queries: a zero key behind the end would take nearly all of the weight."""
    case = Case(**{**K0, "seq_len": 4049, "slash": 64, "vertical": 0})
    q, k, v = mixed_qkv(case)
    direction = torch.nn.functional.normalize(torch.randn(case.dim, device="cuda"), dim=0)
    q, k = (q * 0.1 + 15 * direction).to(case.dtype), (k * 0.1 - 15 * direction).to(case.dtype)
    compare(case, kernel, random_index(case), (q, k, v), torch.randn_like(q))


@pytest.mark.parametrize("cp_size", [1, 4])
def test_estimated_index_end_to_end(kernel: str, cp_size: int) -> None:  # K0 at p < 1
    case = Case(cp_size=cp_size, **K0)
    qkv = mixed_qkv(case)
    dout = torch.randn_like(qkv[0])
    ours, index = run_estimated(case, kernel, MTrainingConfig(kernel=kernel, top_p=0.6), qkv, dout)
    mask = index.to_mask()
    assert not mask.all()
    assert_as_good_as_sdpa(ours, run_sdpa(qkv, mask, dout), run_oracle(qkv, mask, dout), kernel)
