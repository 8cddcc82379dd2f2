"""Index policies: each forward and backward against the mask oracle, in every layout and ring, and by its own definition."""

import pytest
import torch

from megatron_mtraining import (
    BlockListIndex,
    Documents,
    Layout,
    MTrainingConfig,
    VerticalSlashIndex,
    mtraining_attention,
)
from megatron_mtraining.config import ROW_LIST_POLICIES
from megatron_mtraining.policies.select import row_top_k, row_top_p
from megatron_mtraining.testing import estimate_virtual, run_virtual

from .helpers import assert_close, oracle_results, random_qkv

SEQ = 1024
PACKED = Documents.from_cu_seqlens([0, 300, 301, 700], SEQ, [0, 320, 384, SEQ])

# The baselines of docs/baselines.md, as values of the config.
BASELINES = {
    "ours": {"top_p": 0.7},
    "dense": {"dense": True},
    "fixed": {"index_policy": "fixed", "fixed_vertical": 40, "fixed_slash": 3},
    "flexprefill by row": {"index_policy": "flexprefill", "top_p": 0.7, "flexprefill_tau": 1.0},
    "flexprefill by line": {"index_policy": "flexprefill", "top_p": 0.7, "flexprefill_tau": 0.0},
    "flexprefill": {"index_policy": "flexprefill", "top_p": 0.7, "flexprefill_tau": 0.2},
    "xattention": {"index_policy": "xattention", "top_p": 0.7},
    "xattention stride 4": {"index_policy": "xattention", "top_p": 0.5, "xattention_stride": 4},
    "moba": {"index_policy": "moba", "moba_block_size": 128, "moba_top_k": 3},
}
PLACES = [("striped", 1, 1), ("striped", 4, 4), ("striped", 4, 2), ("zigzag", 4, 4), ("contiguous", 4, 2)]


def make_qkv(heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    """Inputs whose attention has structure: neighbours are alike, some heads look for particular keys."""
    drift = torch.randn(1, SEQ, 1, 64, dtype=torch.float64).cumsum(1) / 12
    q, k, v = (x.detach() for x in random_qkv(SEQ, heads, kv_heads))
    return [x.requires_grad_() for x in (q + drift, k + drift, v)]


@pytest.mark.parametrize("documents", [None, PACKED], ids=["one", "packed"])
@pytest.mark.parametrize(("kind", "cp_size", "inner_size"), PLACES)
@pytest.mark.parametrize("name", BASELINES)
def test_against_the_mask_oracle(
    name: str, kind: str, cp_size: int, inner_size: int, documents: Documents | None
) -> None:
    q, k, v = make_qkv(2, 1)
    config = MTrainingConfig(**BASELINES[name], layout=kind)
    layout = Layout.from_config(config, SEQ, cp_size)
    out, aux = run_virtual(
        q, k, v, layout=layout, config=config, inner_size=inner_size, documents=documents, return_aux=True
    )
    alone = estimate_virtual(q, k, layout=Layout.striped(SEQ, 1), config=config, documents=documents)
    assert torch.equal(aux.index.slash_words, alone.slash_words), "another number of ranks or layout keeps other pairs"
    dout = torch.randn_like(out)
    results = [out, aux.lse, *torch.autograd.grad(out, (q, k, v), dout)]
    assert_close(results, oracle_results((q, k, v), aux.index.to_mask(), dout), 1e-10)


@pytest.mark.parametrize("policy", ROW_LIST_POLICIES)
def test_own_block_is_kept_and_nothing_leaks(policy: str) -> None:
    q, k, _ = make_qkv()
    config = MTrainingConfig(index_policy=policy, top_p=0.5, moba_block_size=64, moba_top_k=1)
    index = estimate_virtual(q, k, layout=Layout.striped(SEQ, 4), config=config, documents=PACKED)
    assert isinstance(index, BlockListIndex)
    raw = BlockListIndex(index.kept_words(), index.row_blocks, index.documents)
    assert torch.equal(raw.slash_words, index.slash_words), "bits of the future or of another document are set"
    assert index.block_bits().diagonal(dim1=2, dim2=3).all()


@pytest.mark.parametrize("policy", ["flexprefill", "xattention"])
def test_share_one_is_dense(policy: str) -> None:
    q, k, v = make_qkv()
    out = mtraining_attention(q, k, v, config=MTrainingConfig(index_policy=policy, top_p=1))
    assert torch.equal(out, mtraining_attention(q, k, v, config=MTrainingConfig(dense=True)))


def test_moba_keeps_everything_while_the_budget_covers_the_sequence() -> None:  # D5
    q, k, v = make_qkv()
    config = MTrainingConfig(index_policy="moba", moba_block_size=256, moba_top_k=4)
    out = mtraining_attention(q, k, v, config=config)
    assert torch.equal(out, mtraining_attention(q, k, v, config=MTrainingConfig(dense=True)))


def test_moba_by_its_definition() -> None:
    q, k, _ = make_qkv()
    config = MTrainingConfig(index_policy="moba", moba_block_size=128, moba_top_k=3)
    found = estimate_virtual(q, k, layout=Layout.zigzag(SEQ, 2), config=config).block_bits()
    gates = k.detach()[0].unflatten(0, (8, 128)).mean(1)
    rows = q.detach()[0].unflatten(0, (16, 64)).mean(1)
    for head in range(4):
        for row in range(16):
            own = row // 2
            past = sorted(range(own), key=lambda gate: -float(rows[row, head] @ gates[gate, head // 2]))[:2]
            kept = {b for gate in [*past, own] for b in (2 * gate, 2 * gate + 1) if b <= row}
            assert set(found[0, head, row].nonzero().flatten().tolist()) == kept


def test_xattention_by_its_definition() -> None:
    q, k, _ = make_qkv(2, 1)
    stride, share = 16, 0.6
    config = MTrainingConfig(index_policy="xattention", top_p=share, xattention_stride=stride)
    found = estimate_virtual(q, k, layout=Layout.striped(SEQ, 4), config=config).block_bits()
    scores = torch.einsum("qhd,kd->hqk", q.detach()[0], k.detach()[0, :, 0]) / 8
    tiles = scores.unflatten(2, (-1, stride)).unflatten(1, (-1, stride))
    sums = sum(tiles[:, :, stride - 1 - i, :, i] for i in range(stride)) / stride
    causal = torch.ones_like(sums[0], dtype=torch.bool).tril()
    mass = sums.masked_fill(~causal, float("-inf")).softmax(-1)
    mass = mass.unflatten(2, (16, 4)).unflatten(1, (16, 4)).sum((2, 4))
    for head in range(2):
        for row in range(16):
            kept = {0, row}
            order = sorted(set(range(row + 1)) - kept, key=lambda b: -float(mass[head, row, b]))
            while sum(float(mass[head, row, b]) for b in kept) < share * float(mass[head, row].sum()):
                kept.add(order.pop(0))
            assert set(found[0, head, row].nonzero().flatten().tolist()) == kept


def test_fixed_budgets_keep_as_many_lines_as_they_say() -> None:
    q, k, _ = make_qkv()
    config = MTrainingConfig(index_policy="fixed", fixed_vertical=40, fixed_slash=5)
    index = estimate_virtual(q, k, layout=Layout.striped(SEQ, 2), config=config)
    assert isinstance(index, VerticalSlashIndex)
    # MInference's sinks and local diagonals are united with the budget.
    assert (index.column_bits()[..., :30]).all() and (index.slash_bits()[..., :2]).all()
    columns, lines = index.column_bits().sum(-1), index.slash_bits().sum(-1)
    assert ((columns >= 40) & (columns <= 70)).all() and ((lines >= 5) & (lines <= 7)).all()
    assert int(columns.max()) <= index.column_capacity
    full = MTrainingConfig(index_policy="fixed", fixed_vertical=SEQ, fixed_slash=SEQ)
    assert estimate_virtual(q, k, layout=Layout.striped(SEQ, 2), config=full).slash_bits().all()


def test_flexprefill_tells_heads_apart() -> None:
    """A head whose keys are alike within blocks is estimated well by means; one that looks for single keys is not."""
    smooth = torch.randn(1, SEQ // 64, 1, 64, dtype=torch.float64).repeat_interleave(64, 1)
    rough = torch.randn(1, SEQ, 1, 64, dtype=torch.float64) * 4
    q = torch.cat([smooth / 8, rough[:, torch.arange(SEQ) // 64 * 64]], 2)
    k = torch.cat([smooth, rough], 2)
    config = {"index_policy": "flexprefill", "top_p": 0.8}
    words = [
        estimate_virtual(q, k, layout=Layout.striped(SEQ, 1), config=MTrainingConfig(**config, flexprefill_tau=tau))
        for tau in (0.0, 0.1, 1.0)
    ]
    by_line, found, by_row = (x.block_bits() for x in words)
    assert torch.equal(found[:, 0], by_row[:, 0]) and not torch.equal(found[:, 0], by_line[:, 0])
    assert torch.equal(found[:, 1], by_line[:, 1]) and not torch.equal(found[:, 1], by_row[:, 1])


def test_row_selections() -> None:
    mass = torch.tensor([[5, 4, 4, 1, 0], [0, 0, 0, 0, 0], [10, 1, 1, 1, 1]])
    forced = torch.tensor([[False] * 5, [True, False, False, False, False], [False, False, False, False, True]])
    kept = row_top_p(mass, forced, MTrainingConfig(top_p=0.6).slash_share)
    assert kept.tolist() == [[True, True, True, False, False], [True] + [False] * 4, [True, False, False, False, True]]
    score = torch.tensor([[1.0, 3.0, 3.0, 3.0], [float("-inf"), 0.0, float("inf"), float("-inf")]])
    assert row_top_k(score, 2).tolist() == [[False, True, True, False], [False, True, True, False]]
    assert row_top_k(score, 9).sum(-1).tolist() == [4, 2]


def test_a_diverged_model_and_padding_are_finite() -> None:
    q, k, v = make_qkv()
    with torch.no_grad():
        k[0, 1000] = float("nan")
    for policy in ROW_LIST_POLICIES:
        config = MTrainingConfig(index_policy=policy, top_p=0.5)
        index = estimate_virtual(q, k, layout=Layout.striped(SEQ, 2), config=config)
        assert index.block_bits().diagonal(dim1=2, dim2=3).all()
        out = mtraining_attention(*(x[:, :200] for x in (q, k, v)), config=config)
        assert out.shape[1] == 200 and torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("index_policy", "quest", "index_policy='quest': must be one of top_p, fixed, flexprefill, xattention, moba"),
        ("fixed_vertical", -1, "fixed_vertical=-1: must be an integer from 0 up"),
        ("fixed_slash", 0, "fixed_slash=0: must be an integer from 1 up"),
        ("flexprefill_tau", 1.5, "flexprefill_tau=1.5: must be a number from 0 to 1"),
        ("xattention_stride", 12, "xattention_stride=12: must be one of 4, 8, 16, 32, 64"),
        ("moba_block_size", 100, "moba_block_size=100: must be a multiple of 64 from 64 up"),
        ("moba_top_k", 0, "moba_top_k=0: must be an integer from 1 up"),
    ],
)
def test_wrong_options_are_refused(option: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MTrainingConfig(**{option: value})
