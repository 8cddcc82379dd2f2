"""The whole attention against the dense oracle under the mask of its own index; all ranks in one process."""

import gc
import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mtraining import Documents, Layout, MTrainingConfig, VerticalSlashIndex, mtraining_attention, testing
from megatron_mtraining.ring import RingForward
from megatron_mtraining.testing import run_virtual

from .helpers import BOUNDS, assert_close, oracle_results, random_index, random_qkv, relative_error

DENSE = MTrainingConfig(top_p=1, max_vertical=None)
HIERARCHIES = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8)]


def make_layout(kind: str, seq_len: int, cp_size: int) -> Layout:
    if kind == "rotated":
        return Layout.striped(seq_len, cp_size, rotation=min(cp_size, 4))
    if kind.startswith("striped"):
        return Layout.striped(seq_len, cp_size, int(kind[7:]))
    return getattr(Layout, kind)(seq_len, cp_size)


LAYOUTS = ["rotated", "striped64", "striped128", "zigzag", "contiguous"]


def run_and_compare(q, k, v, layout, config=DENSE, inner_size=None, index=None, documents=None, bound=1e-10):
    out, aux = run_virtual(
        q, k, v, layout=layout, config=config, inner_size=inner_size, index=index, documents=documents, return_aux=True
    )
    dout = torch.randn_like(out)
    results = [out, aux.lse, *torch.autograd.grad(out, (q, k, v), dout)]
    assert_close(results, oracle_results((q, k, v), aux.index.to_mask(), dout), bound)
    return aux


@pytest.mark.parametrize(("cp_size", "inner_size"), HIERARCHIES)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_p_one_is_dense_attention(kind: str, cp_size: int, inner_size: int) -> None:
    q, k, v = random_qkv(1024, heads=2, kv_heads=1)
    layout = make_layout(kind, 1024, cp_size)
    aux = run_and_compare(q, k, v, layout, inner_size=inner_size)
    assert aux.index.to_mask().equal(torch.ones(1024, 1024, dtype=torch.bool).tril().expand(1, 2, -1, -1))


@pytest.mark.parametrize(("cp_size", "inner_size"), HIERARCHIES)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_any_index(kind: str, cp_size: int, inner_size: int) -> None:
    random.seed(cp_size * 10 + inner_size)
    q, k, v = random_qkv(1024, heads=4, kv_heads=2)
    run_and_compare(q, k, v, make_layout(kind, 1024, cp_size), inner_size=inner_size, index=random_index(1024, 4))


@pytest.mark.parametrize("columns", [{}, {"max_compact_columns": 64}, {"vertical_backward": "gather"}])
@pytest.mark.parametrize(("cp_size", "inner_size", "chunks"), [(8, 8, 3), (8, 4, 2), (8, 4, 8), (4, 4, 1), (4, 2, 2)])
def test_several_chunks_a_launch(cp_size: int, inner_size: int, chunks: int, columns: dict) -> None:
    q, k, v = random_qkv(1024)
    config = MTrainingConfig(chunks_per_launch=chunks, **columns)
    index = random_index(1024, 4, vertical=300)
    run_and_compare(q, k, v, Layout.striped(1024, cp_size), config, inner_size, index=index)


def test_buffers_serve_one_call_at_a_time() -> None:  # nested calls: a call's kept chunk and result are its own
    layout, config = Layout.striped(512, 4), MTrainingConfig(top_p=0.7, chunks_per_launch=2)
    inputs = [random_qkv(512, dtype=torch.float32) for _ in range(3)]
    outs = [run_virtual(*x, layout=layout, config=config) for x in inputs]
    alone = [run_virtual(*x, layout=layout, config=config).detach().clone() for x in inputs]
    grads = [torch.autograd.grad(out.sum(), x) for out, x in zip(outs, inputs, strict=True)]
    for x, out, expected, grad in zip(inputs, outs, alone, grads, strict=True):
        assert torch.equal(out, expected)
        again = torch.autograd.grad(run_virtual(*x, layout=layout, config=config).sum(), x)
        assert all(torch.equal(a, b) for a, b in zip(grad, again, strict=True))


SPECIAL = {
    "diagonal only": ([0], []),
    "band": ([0, 1, 2], []),
    "far distance only": ([15], []),
    "all columns": ([0], range(1024)),
    "all lines": (range(16), range(1024)),
    "columns of the last block": ([0], range(960, 1024)),
    "first and last column": ([3], [0, 1023]),
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize(("cp_size", "inner_size"), [(1, 1), (4, 4), (4, 2)])
def test_special_indices(name: str, cp_size: int, inner_size: int) -> None:  # B2
    slash, vertical = (list(x) for x in SPECIAL[name])
    index = VerticalSlashIndex.from_lines([[slash] * 4], [[vertical] * 4], seq_len=1024)
    q, k, v = random_qkv(1024)
    run_and_compare(q, k, v, Layout.striped(1024, cp_size), inner_size=inner_size, index=index)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (8, 1)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dim", [64, 80])
def test_groups_batches_and_dimensions(heads: int, kv_heads: int, batch: int, dim: int) -> None:
    q, k, v = random_qkv(512, heads, kv_heads, dim, batch)
    run_and_compare(q, k, v, Layout.striped(512, 2), index=random_index(512, heads, batch))
    run_and_compare(q, k, v, Layout.striped(512, 4), inner_size=2)


@pytest.mark.parametrize("dim", [96, 128, 256])
def test_more_dimensions(dim: int) -> None:
    q, k, v = random_qkv(256, 2, 1, dim)
    run_and_compare(q, k, v, Layout.striped(256, 2), index=random_index(256, 2))


@pytest.mark.parametrize("seq_len", [1, 40, 63, 64, 65, 127, 200, 1000])
def test_one_rank_takes_any_length(seq_len: int) -> None:  # D4, D7
    q, k, v = random_qkv(seq_len)
    layout = Layout.striped(seq_len, 1)
    run_and_compare(q, k, v, layout)
    run_and_compare(q, k, v, layout, config=MTrainingConfig(top_p=0.6))


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("last_q", [64, 192])
def test_short_sequences(cp_size: int, last_q: int) -> None:  # D4
    for seq_len in {64 * cp_size, max(last_q // (64 * cp_size), 1) * 64 * cp_size, last_q * cp_size + 64 * cp_size}:
        q, k, v = random_qkv(seq_len, 2, 1)
        config = MTrainingConfig(top_p=1, max_vertical=None, last_q=last_q)
        run_and_compare(q, k, v, Layout.striped(seq_len, cp_size), config)
        run_and_compare(q, k, v, Layout.striped(seq_len, cp_size), MTrainingConfig(top_p=0.5, last_q=last_q))


def test_a_zero_key_in_the_tail_would_dominate() -> None:  # D7
    seq_len = 849
    q = (torch.randn(1, seq_len, 2, 64, dtype=torch.float64) * 0.1 + 2).requires_grad_()
    k = (torch.randn(1, seq_len, 1, 64, dtype=torch.float64) * 0.1 - 1.25).requires_grad_()
    v = torch.randn(1, seq_len, 1, 64, dtype=torch.float64, requires_grad=True)
    run_and_compare(q, k, v, Layout.striped(seq_len, 1))


@pytest.mark.parametrize("columns", [MTrainingConfig(top_p=0.7, max_compact_columns=64),
                                     MTrainingConfig(top_p=0.7, vertical_backward="gather"),
                                     MTrainingConfig(top_p=0.7, max_vertical=0)])  # fmt: skip
@pytest.mark.parametrize(("cp_size", "inner_size"), [(1, 1), (4, 4), (4, 2), (4, 1)])
def test_columns_in_pieces_and_gathered_again(columns: MTrainingConfig, cp_size: int, inner_size: int) -> None:
    q, k, v = random_qkv(1024)
    run_and_compare(
        q, k, v, Layout.striped(1024, cp_size), columns, inner_size, index=random_index(1024, 4, vertical=300)
    )


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_documents_do_not_see_each_other(cp_size: int) -> None:
    documents = Documents.from_cu_seqlens([0, 300, 301, 700], 1024, [0, 320, 384, 1024])
    q, k, v = random_qkv(1024)
    layout = Layout.striped(1024, cp_size)
    run_and_compare(q, k, v, layout, documents=documents)
    run_and_compare(q, k, v, layout, MTrainingConfig(top_p=0.6), documents=documents)
    run_and_compare(q, k, v, layout, index=random_index(1024, 4, documents=documents))


def test_padded_rows_do_not_reach_real_ones() -> None:  # F1
    real, padded = random_qkv(698), []
    for x in real:
        extra = torch.nn.functional.pad(x.detach(), (0, 0, 0, 0, 0, 70), value=1e3)
        padded.append(extra.requires_grad_())
    documents = Documents.from_cu_seqlens([0, 698], 768, [0, 768])
    dout = torch.randn(1, 698, 4, 64, dtype=torch.float64)
    expected = mtraining_attention(*real, config=MTrainingConfig(top_p=0.9))
    grads = torch.autograd.grad(expected, real, dout)
    for cp_size in (2, 4):
        layout = Layout.striped(768, cp_size)
        outs = [
            run_virtual(*padded, layout=layout, config=MTrainingConfig(top_p=0.9), documents=documents)
            for _ in range(2)
        ]
        assert torch.equal(outs[0], outs[1])
        assert relative_error(outs[0][:, :698], expected) < 1e-10 and (outs[0][:, :698].abs().amax(-1) > 0).all()
        found = torch.autograd.grad(outs[0], padded, torch.nn.functional.pad(dout, (0, 0, 0, 0, 0, 70)))
        for x, y in zip(found, grads, strict=True):
            assert relative_error(x[:, :698], y) < 1e-10


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_fp32_error_does_not_grow_with_the_ranks(cp_size: int) -> None:
    q, k, v = random_qkv(1024, dtype=torch.float32)
    run_and_compare(q, k, v, Layout.striped(1024, cp_size), index=random_index(1024, 4), bound=BOUNDS[torch.float32])
    run_and_compare(q, k, v, Layout.striped(1024, cp_size), bound=BOUNDS[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cp_size", [1, 2, 8])
def test_half_precision_is_within_twice_sdpa(dtype: torch.dtype, cp_size: int) -> None:
    q, k, v = random_qkv(1024, dtype=dtype)
    index = random_index(1024, 4)
    mask = index.to_mask()
    out, _aux = run_virtual(q, k, v, layout=Layout.striped(1024, cp_size), index=index, return_aux=True)
    dout = torch.randn(out.shape).to(dtype)
    found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    exact = oracle_results((q, k, v), mask, dout)
    sdpa = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    peer = [sdpa, *torch.autograd.grad(sdpa, (q, k, v), dout)]
    for name, x, y, z in zip(("out", "dq", "dk", "dv"), found, peer, [exact[0], *exact[2:]], strict=True):
        assert out.dtype == dtype and x.dtype == dtype
        ours, theirs = ((t.detach().double() - z).abs().max() for t in (x, y))
        assert ours <= 2 * theirs + 1e-5, f"{name}: {ours:.2e} > 2 * {theirs:.2e}"


def test_large_logits_and_growing_lse() -> None:  # B2, B3
    index = random_index(1024, 4)
    layout = Layout.striped(1024, 4)
    growing = (torch.arange(1024).div(64, rounding_mode="floor") * 2 + 1)[None, :, None, None]
    for scale_q, scale_k in ((300.0, 300.0), (1.0, growing)):
        q, k, v = (x.detach() for x in random_qkv(1024))
        leaves = [x.requires_grad_() for x in (q * scale_q, k * scale_k, v)]
        # Logits of 1e6 leave 10 digits of their exponentials, and the gradients are small differences of these.
        run_and_compare(*leaves, layout, index=index, bound=1e-4)
    q, k, v = (torch.randn(1, 1024, h, 64, dtype=torch.float64) for h in (4, 2, 2))
    leaves = [x.requires_grad_() for x in (q.abs() * 200 + 50, -k.abs() * 200 - 50, v)]
    aux = run_and_compare(*leaves, layout, index=index, bound=1e-4)
    assert float(aux.lse.max()) < -6e4


@pytest.mark.parametrize("cp_size", [2, 4])
def test_gradients_of_keys_come_from_remote_queries(cp_size: int) -> None:  # C1
    layout = Layout.striped(1024, cp_size)
    for index in (random_index(1024, 4), VerticalSlashIndex.dense(1, 4, Documents.single(1024))):
        q, k, v = random_qkv(1024)
        out = run_virtual(q, k, v, layout=layout, index=index)
        dout = torch.randn_like(out)
        own = layout.token_position(0)
        dout[:, own] = 0
        found = torch.autograd.grad(out, (q, k, v), dout)
        exact = oracle_results((q, k, v), index.to_mask(), dout)[2:]
        assert all(relative_error(x, y) < 1e-10 for x, y in zip(found, exact, strict=True))
        assert found[1][:, own].abs().sum() > 0 and found[2][:, own].abs().sum() > 0


@pytest.mark.parametrize("kind", ["transposed", "expanded"])
def test_views_and_strange_gradients(kind: str) -> None:  # C4
    mixed = torch.randn(512, 2, 8 * 64, dtype=torch.float64, requires_grad=True)
    q, k, v = (x.unflatten(-1, (-1, 64)).transpose(0, 1) for x in mixed.split([4 * 64, 2 * 64, 2 * 64], -1))
    config = MTrainingConfig(top_p=0.8)
    out = mtraining_attention(q, k, v, config=config)
    plain = mtraining_attention(q.contiguous(), k.contiguous(), v.contiguous(), config=config)
    assert torch.equal(out, plain)
    dout = torch.randn(out.shape[::-1], dtype=torch.float64).permute(3, 2, 1, 0) if kind == "transposed" else None
    if dout is None:
        (a,) = torch.autograd.grad(out.sum(), mixed, retain_graph=True)
        dout = torch.ones_like(out)
    else:
        (a,) = torch.autograd.grad(out, mixed, dout, retain_graph=True)
    (b,) = torch.autograd.grad(plain, mixed, dout.contiguous())
    assert torch.equal(a, b)


def test_batch_samples_do_not_mix() -> None:  # D1
    q, k, v = random_qkv(512, batch=2)
    both = run_virtual(q, k, v, layout=Layout.striped(512, 2))
    for sample in range(2):
        alone = run_virtual(*(x[sample : sample + 1] for x in (q, k, v)), layout=Layout.striped(512, 2))
        assert torch.equal(both[sample], alone[0])


def test_flat_and_hierarchical_rings_agree() -> None:
    q, k, v = random_qkv(1024)
    index = random_index(1024, 4)
    outs = [run_virtual(q, k, v, layout=Layout.striped(1024, 8), inner_size=i, index=index) for i in (1, 2, 4, 8)]
    assert all(relative_error(x, outs[0]) < 1e-12 for x in outs[1:])


def test_dense_option_estimates_nothing() -> None:
    q, k, v = random_qkv(512)
    _, aux = run_virtual(q, k, v, layout=Layout.zigzag(512, 2), config=MTrainingConfig(dense=True), return_aux=True)
    assert torch.equal(aux.index.to_mask()[0, 0], torch.ones(512, 512, dtype=torch.bool).tril())


@given(
    st.integers(1, 12), st.sampled_from([1, 2, 3]), st.sampled_from([(1, 1), (2, 1), (6, 3)]), st.integers(0, 2**31),
    st.sampled_from(["striped64", "contiguous"]),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_shapes(blocks: int, cp_size: int, heads: tuple[int, int], seed: int, kind: str) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    seq_len = blocks * 64 * cp_size
    q, k, v = random_qkv(seq_len, *heads, dim=16)
    index = random_index(seq_len, heads[0], slash=random.randint(0, 4), vertical=random.randint(0, 60))
    run_and_compare(q, k, v, make_layout(kind, seq_len, cp_size), index=index)


@given(st.integers(1, 500), st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_lengths_on_one_rank(seq_len: int, seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    q, k, v = random_qkv(seq_len, 2, 1, dim=16)
    run_and_compare(q, k, v, Layout.striped(seq_len, 1), index=random_index(seq_len, 2))


def test_refusals() -> None:
    q, k, v = random_qkv(256)
    other = torch.zeros(1, 256, 3, 64, dtype=torch.float64)
    cases = [
        ((q, k, v.float()), {}, "v is torch.float32"),
        ((q, k[:, :128], v[:, :128]), {}, "q_len != k_len"),
        ((q, k, v[..., :32]), {}, "64, 64, 32"),
        ((q, other, other), {}, "q has 4 heads, k has 3"),
        ((q[0], k, v), {}, "q has shape"),
        ((q, k, v), {"layout": Layout.striped(512, 1)}, "layout is for 1 ranks of 512"),
        ((q, k, v), {"layout": Layout.striped(512, 2)}, "layout is for 2 ranks"),
        ((q, k, v), {"index": random_index(256, 2)}, "index is for"),
        ((q, k, v), {"index": random_index(512, 4)}, "documents are for 512"),
        ((q, k, v), {"documents": Documents.single(128)}, "documents are for 128"),
        ((q.int(), k, v), {}, "q is torch.int32"),
        ((q[:0], k[:0], v[:0]), {}, "none of them 0"),
        ((q, k, v), {"config": {"top_p": 0.5}}, "must be an MTrainingConfig"),
        ((q, k, v), {"softmax_scale": -1.0}, "softmax_scale=-1.0"),
        ((q, k, v), {"softmax_scale": float("nan")}, "softmax_scale=nan"),
    ]
    for inputs, options, message in cases:
        with pytest.raises(ValueError, match=message):
            mtraining_attention(*inputs, **options)
    with pytest.raises(ValueError, match="inner_size=3"):
        run_virtual(q, k, v, layout=Layout.striped(256, 2), inner_size=3)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_autocast_changes_no_bit(cp_size: int) -> None:
    q, k, v = random_qkv(512, dtype=torch.float32)
    dout = torch.randn(1, 512, 4, 64)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            if cp_size == 1:
                out = mtraining_attention(q, k, v, config=MTrainingConfig(top_p=0.7))
                results.append([out, *torch.autograd.grad(out, (q, k, v), dout)])
            else:
                out = run_virtual(q, k, v, layout=Layout.striped(512, 2), config=MTrainingConfig(top_p=0.7))
                results.append([out, *torch.autograd.grad(out, (q, k, v), dout)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_random_state_is_untouched() -> None:  # K3
    q, k, v = random_qkv(512)
    before = torch.get_rng_state()
    run_virtual(q, k, v, layout=Layout.striped(512, 2)).sum().backward()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("cp_size", [1, 4])
def test_backward_may_run_twice(cp_size: int) -> None:
    q, k, v = random_qkv(512)
    out = run_virtual(q, k, v, layout=Layout.striped(512, cp_size), config=MTrainingConfig(top_p=0.8))
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(out, (q, k, v), dout), strict=True))


def test_the_reference_costs_seconds_not_minutes() -> None:
    # 8K tokens, 8 heads; the memory of one N x N matrix per head would be 2 GiB.
    q, k, v = random_qkv(8192, 8, 2, dtype=torch.float32)
    n = 128
    index = VerticalSlashIndex.from_lines(
        [[list(range(0, n, 20))] * 8], [[list(range(0, 8192, 200))] * 8], seq_len=8192
    )
    import time

    began = time.process_time()
    mtraining_attention(q, k, v, index=index).sum().backward()
    assert time.process_time() - began < 20


def test_played_calls_are_freed_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle through the outputs kept every played call alive, 8 GiB each at 512K tokens."""
    made: list[weakref.ref] = []

    class Recorded(RingForward):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            made.append(weakref.ref(self))

    monkeypatch.setattr(testing, "RingForward", Recorded)
    q, k, v = random_qkv(512)
    gc.disable()
    try:
        out = run_virtual(q, k, v, layout=Layout.striped(512, 4))
        torch.autograd.grad(out.sum(), (q, k, v))
        assert len(made) == 4
        del out
        assert all(ring() is None for ring in made)
    finally:
        gc.enable()
