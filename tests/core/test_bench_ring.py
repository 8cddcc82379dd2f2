"""The parts of the ring benchmarks that can be wrong without a GPU: what is counted, kept, gathered and put together."""

import os
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import bench_links, bench_ring, plot_ring
from benchmarks.bench_policies import kept_of_block, sample, sampled_recall
from benchmarks.problems import Problem
from benchmarks.ring import megatron_dense
from benchmarks.ring.cases import Case, comparison, in_pairs, pattern_index, slash_table
from benchmarks.ring.gathered import GatheredDense, GatheredRanks, gather_ms, local_tensors
from benchmarks.ring.heads import of_heads, share_of
from benchmarks.ring.played import Played, compute_tables, in_time, rows_of, with_links
from benchmarks.structured import structured_tensors
from megatron_mtraining import BlockListIndex, Documents, Layout, MTrainingConfig, estimate_index, mtraining_attention
from megatron_mtraining.metrics import work_table
from megatron_mtraining.simulator import Link, Links, Shape
from megatron_mtraining.simulator.timeline import Ring
from megatron_mtraining.testing import oracle

from .helpers import random_index, random_qkv, refusal

SLOW = Links(Link(0.0, 1e9), Link(0.0, 1e9))


def test_pairs_of_a_case_are_the_products() -> None:
    problem = Problem(8192, 4, 2, 64, device="cpu")
    index = pattern_index(problem, "bands")
    for case in comparison(2, False):
        ring = case.ring(8, 4)
        layout = case.layout_of(8192, ring)
        slash, columns = slash_table(index, layout, ring)
        slash[:, -1] += columns
        assert torch.equal(slash, work_table(index, layout, ring.inner_size))
        assert 1 <= in_pairs(index, layout, ring)["pairs_total"] < 2


def test_a_flat_ring_over_nodes_launches_chunk_by_chunk_as_the_product_does() -> None:
    flat, hierarchical = Case("a"), Case("b", hierarchical=True)
    assert flat.config(flat.ring(8, 4)).chunks_per_launch == 1 == flat.launched(flat.ring(8, 4), 4096, False)
    assert hierarchical.config(hierarchical.ring(8, 4)).chunks_per_launch is None
    assert flat.config(flat.ring(8, 8)).chunks_per_launch is None
    assert hierarchical.launched(hierarchical.ring(8, 4), 32768, False) == 4
    assert Case("c", rotated=True, hierarchical=True).config(Ring(8, 4, 4)).stripe_rotation == 4


def test_played_ranks_with_links() -> None:
    """Every rank and launch has a time; with links of no cost a pass is what its ranks compute, with slow ones more."""
    problem = Problem(2048, 4, 2, 64, device="cpu")
    index = pattern_index(problem, "bands")
    case = Case("ours", hierarchical=True, rotated=True, chunks=1)
    ring, shape = case.ring(4, 2), Shape(2048, 4, 2, 64)
    tables = compute_tables(problem.tensors(), index, case, ring, 1)
    assert {phase: tuple(table.shape) for phase, table in tables.items()} == {"forward": (4, 4), "backward": (4, 4)}
    assert all(bool((table > 0).all()) for table in tables.values())
    free = with_links(tables, case, ring, shape, Links(Link(0.0, 1e30), Link(0.0, 1e30)))
    slow = with_links(tables, case, ring, shape, SLOW)
    for phase, table in tables.items():
        slowest = float(table.double().sum(1).max()) / 1e3
        assert slowest <= free[phase].seconds * (1 + 1e-9) and free[phase].seconds <= slow[phase].seconds
    row = rows_of(problem, case, ring, index, Played(tables, slow))[0]
    assert row["compute_ms"] == pytest.approx(float(tables["forward"].sum(1).mean()), abs=1e-3)
    assert row["simulated_ms"] == pytest.approx(slow["forward"].seconds * 1e3, abs=1e-3)


def test_the_launch_with_the_columns_is_left_out_of_the_degrees_by_step() -> None:
    table = torch.tensor([[1.0, 1.0, 8.0], [1.0, 3.0, 4.0]])
    found = in_time(table, "forward", one_chunk=True)
    assert found == {"time_worker": 1.25, "time_critical": 1.333, "time_step": 1.5, "time_total": 1.111}
    assert in_time(table.flip(1), "backward", one_chunk=False) == {
        "time_worker": 1.25, "time_critical": 1.333, "time_total": 1.111,
    }  # fmt: skip


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_pieces_of_gathered_dense_are_dense_attention(cp_size: int) -> None:
    """The pieces of a rank, merged by their own log-sum-exp, are the rows of causal attention."""
    q, k, v = (x.detach() for x in random_qkv(512))
    out, _ = oracle(q, k, v, torch.ones(512, 512, dtype=torch.bool).tril())
    for rank in range(cp_size):
        local = local_tensors((q, k, v, q), rank, cp_size)
        passes = GatheredDense(*local, rank=rank, cp_size=cp_size)
        passes.forward()
        assert len(passes.backward()) == 3
        pieces, rows = iter(passes.outs), 512 // (2 * cp_size) if cp_size > 1 else 512
        for number in passes.numbers:
            first = number * rows
            own = slice(first, first + rows)
            mask = torch.ones(rows, rows, dtype=torch.bool).tril()
            _, own_lse = oracle(q[:, own], k[:, own], v[:, own], mask)
            merged, weights = next(pieces).transpose(1, 2), own_lse
            if number:
                earlier = slice(0, first)
                _, lse = oracle(q[:, own], k[:, earlier], v[:, earlier], torch.ones(rows, first, dtype=torch.bool))
                share = torch.sigmoid(lse - weights).transpose(1, 2)[..., None]
                merged = merged + share * (next(pieces).transpose(1, 2) - merged)
            assert torch.allclose(merged, out[:, own], atol=1e-10)


def _gathered_worker(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    q, k, v = (x.detach() for x in random_qkv(256))
    ranks = GatheredRanks((q, k, v, q), dist.group.WORLD)
    with torch.no_grad():
        for whole in ranks.passes.leaves[1:]:
            whole.fill_(float("nan"))
    ranks.forward()
    assert torch.equal(ranks.passes.leaves[1], k) and torch.equal(ranks.passes.leaves[2], v)
    grads = ranks.backward()
    assert [x.shape[1] for x in grads] == [128, 128, 128]
    # The reduced gradients of both ranks' own chunks are those that one process sums up.
    parts = []
    for other in range(2):
        passes = GatheredDense(*local_tensors((q, k, v, q), other, 2), rank=other, cp_size=2)
        passes.forward()
        parts.append(passes.backward()[1])
    chunks = sum(parts).chunk(4, 1)
    assert torch.allclose(grads[1], torch.cat([chunks[rank], chunks[3 - rank]], 1))
    dist.destroy_process_group()


def test_gathering_over_real_ranks(tmp_path: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(_gathered_worker, (str(tmp_path),), nprocs=2)


def _megatron_worker(rank: int, folder: str) -> None:
    """A stand-in for Transformer Engine notes what it is given: chunks and ring of this rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    made: list[dict] = []

    class DotProductAttention:
        def __init__(self, heads: int, dim: int, **options: object) -> None:
            made.append({"heads": heads, "dim": dim, **options})

        def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            made.append({"q": q, "k": k})
            return (q * k.sum() * v.sum()).flatten(2)

    engine = types.ModuleType("transformer_engine.pytorch")
    engine.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    sys.modules["transformer_engine"], sys.modules["transformer_engine.pytorch"] = types.ModuleType("te"), engine
    torch.cuda.Stream = lambda: "a stream"  # type: ignore[assignment,misc]
    torch.manual_seed(0)
    q, k, v = (x.detach() for x in random_qkv(256))
    times = megatron_dense.measured((q, k, v, q), dist.group.WORLD)
    assert times["call"] == pytest.approx(times["forward"] + times["backward"])
    given = made[0]
    assert (given["heads"], given["dim"], given["num_gqa_groups"], given["cp_comm_type"]) == (4, 64, 2, "p2p")
    assert given["cp_global_ranks"] == [0, 1] and given["attn_mask_type"] == "causal"
    for name, whole in (("q", q), ("k", k)):
        chunks = whole.chunk(4, 1)
        assert torch.equal(made[1][name], torch.cat([chunks[rank], chunks[3 - rank]], 1))
    dist.destroy_process_group()


def test_transformer_engine_gets_its_chunks(tmp_path: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(_megatron_worker, (str(tmp_path),), nprocs=2)


def test_gathering_is_paced_by_the_slowest_link() -> None:
    shape, links = Shape(65536), Links(Link(0.0, 100e9), Link(0.0, 10e9))
    chunk = 2 * 65536 / 8 * 2 * 128 * 2
    assert gather_ms(shape, 8, 8, links)[0] == pytest.approx(7 * chunk / 100e9 * 1e3)
    assert gather_ms(shape, 8, 4, links)[0] == pytest.approx(7 * chunk / 10e9 * 1e3)


def test_head_parallel_ranks_make_the_whole() -> None:
    q, k, v = (x.detach() for x in random_qkv(512, heads=8, kv_heads=2))
    index = random_index(512, 8)
    whole = mtraining_attention(q, k, v, index=index)
    for ranks in (2, 4, 8):
        parts = []
        for rank in range(ranks):
            mine = share_of((q, k, v, q), rank, ranks)
            own = of_heads(index, slice(rank * 8 // ranks, (rank + 1) * 8 // ranks))
            parts.append(mtraining_attention(*mine[:3], index=own))
        assert torch.allclose(torch.cat(parts, 2), whole, atol=1e-12)


def test_recall_is_the_share_of_the_oracles_mass() -> None:
    q, k, _ = (x.detach() for x in random_qkv(512, heads=2, kv_heads=1))
    lines = random_index(512, 2)
    lists = BlockListIndex.from_mask(torch.rand(1, 2, 8, 8) < 0.4, documents=Documents.single(512))
    mass = (torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) / 8).masked_fill(
        torch.ones(512, 512, dtype=torch.bool).triu(1), float("-inf")
    )
    for index in (lines, lists):
        mask, blocks = index.to_mask()[0], sample(8)
        causal = torch.ones(512, 512, dtype=torch.bool).tril()
        for block in blocks:
            rows = slice(block * 64, block * 64 + 64)
            kept = kept_of_block(index, block)
            assert torch.equal(kept[:, None] & causal[None, rows, : kept.shape[1]], mask[:, rows, : kept.shape[1]])
        true = ((mass.softmax(-1)[0] * mask).sum(-1)).mean(1)
        assert torch.allclose(sampled_recall(q, k, index, blocks), true, atol=1e-5)


def test_structured_tensors_are_sparse_and_the_policies_find_it() -> None:
    q, k, v, dout = structured_tensors(4096, 8, 2, 64, "cpu")
    assert (q.dtype, q.shape, k.shape, v.shape, dout.shape[2]) == (
        torch.bfloat16, (1, 4096, 8, 64), (1, 4096, 2, 64), (1, 4096, 2, 64), 8,
    )  # fmt: skip
    index = estimate_index(q, k, config=MTrainingConfig(top_p=0.9))
    recall = sampled_recall(q, k, index, sample(64))
    assert float(index.density()) < 0.5 and float(recall.mean()) > 0.6
    assert Layout.striped(4096, 1).num_blocks == index.num_blocks


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        (
            bench_ring,
            "--virtual 4x --seq-lens 4096",
            "argument --virtual: '4x': must be NODESxRANKS, positive integers",
        ),
        (bench_ring, "--virtual 0x8 --seq-lens 4096", "argument --virtual: '0x8': must be NODESxRANKS"),
        (bench_ring, "--virtual 4x8 --heads 16/2", "argument --heads: '16/2': must be heads/kv_heads/head_dim"),
        (bench_ring, "--virtual 4x8 --heads 16/3/128", "'16/3/128': heads must be a multiple of kv_heads"),
        (bench_ring, "--virtual 4x8 --seq-lens 1000", "--seq-lens 1000: must be a multiple of 4096"),
        (bench_ring, "--virtual 2x2 --repeats 0", "--repeats 0: must be at least 1"),
        (bench_ring, "--seq-lens 65536", "real ranks: run it under torchrun"),
        (bench_ring, "--virtual 4x8 --cases nonsense", "--cases: ['nonsense'] unknown, there are"),
        (bench_links, "--inter-mbit 0", "--inter-mbit 0.0: must be above 0"),
        (bench_links, "--chunk-mib 0.01", "--chunk-mib 0.01: must be at least 0.0625, 64 tokens"),
        (plot_ring, "--folder nowhere", "no ring-*-virtual-4x8-512k.json in nowhere"),
    ],
)
def test_wrong_options_end_in_one_line(
    module: types.ModuleType,
    words: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    out = [] if module is plot_ring else ["--out", "x"]
    assert message in refusal(module.main, [*words.split(), *out], monkeypatch, capsys)
