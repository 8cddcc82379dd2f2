"""The simulator: its counts and plans are the product's, the paper's breakdown, the balance of issue-sized rings."""

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_mtraining import Layout, MTrainingConfig, simulate
from megatron_mtraining.buffers import pool
from megatron_mtraining.launches import backward_plan, forward_plan
from megatron_mtraining.metrics import pair_counts
from megatron_mtraining.simulator import (
    H200_LINKS,
    H200_RATES,
    PAPER,
    Balance,
    Choice,
    Cluster,
    Link,
    Links,
    Pattern,
    Predictor,
    RankWork,
    Shape,
    StepTimes,
    fit_rates,
    head_parallel_imbalance,
    make_profile,
    work,
)
from megatron_mtraining.simulator.memory import (
    MODELS,
    Parallel,
    Training,
    memory_plan,
    ring_buffer_bytes,
    ring_plans,
    smallest_cp,
)
from megatron_mtraining.simulator.timeline import Ring, chunk_table
from megatron_mtraining.simulator.timeline import simulate as simulate_plan
from megatron_mtraining.simulator.work import to_index
from megatron_mtraining.testing import run_virtual

from .helpers import random_qkv

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize(
    "layout",
    [
        Layout.striped(8192, 8),
        Layout.striped(8192, 4, 128),
        Layout.striped(8192, 8, 64, 4),
        Layout.striped(12288, 12, 64, 6),
        Layout.zigzag(8192, 8),
        Layout.contiguous(8192, 4),
    ],
    ids=["striped", "wide", "rotated", "rotated 12", "zigzag", "contiguous"],
)
def test_work_is_what_the_product_counts(layout: Layout) -> None:
    profile = make_profile(Pattern(0.1, 0.005), layout.seq_len, 3)
    index = to_index(profile)
    blocks, columns = pair_counts(index, layout)
    work = RankWork.of(profile, layout)
    assert (blocks.numpy() * 4096 == work.slash).all() and (columns.sum(1).numpy() * 64 == work.columns).all()
    assert float(index.density()) == pytest.approx(profile.density())
    assert (index.pairs()[0].numpy() == profile.head_pairs()).all()


@pytest.mark.parametrize(("size", "inner"), [(8, 8), (8, 4), (12, 3), (6, 1)])
@pytest.mark.parametrize("chunks", [1, 3])
def test_every_rank_runs_the_plan_of_rank_0_turned(size: int, inner: int, chunks: int) -> None:
    ring = Ring(size, inner, inner)
    for backward, make in ((False, forward_plan), (True, backward_plan)):
        plan = ring.plan(backward, chunks)
        table = chunk_table(ring, plan)
        for rank in range(size):
            own = make(rank, inner, size // inner, chunks)
            assert [c for launch in own.launches for c in launch.chunks] == table[rank].tolist()
            for launch, first in zip(own.launches, plan.launches, strict=True):
                for moves, moves_of_first in ((launch.keys, first.keys), (launch.grads, first.grads)):
                    found = [ring.turned(move.transfer.send_to)[rank] for move in moves_of_first]
                    assert [move.transfer.send_to for move in moves] == found


def test_the_papers_breakdown() -> None:
    assert PAPER.forward_seconds(32, 8, "flat") * 1e3 == pytest.approx(34.10, abs=0.005)
    assert PAPER.forward_seconds(32, 8, "hierarchical") * 1e3 == pytest.approx(19.53, abs=0.005)


def test_against_shaped_links() -> None:
    """Real rings over gloo between network namespaces: within 5%."""
    measured = json.loads((RESULTS / "links-2026-11-30-netns.json").read_text())
    links = measured["links"]
    times = StepTimes(links["compute_ms"] / 1e3, links["intra_ms"] / 1e3, links["inter_ms"] / 1e3)
    for ring in ("flat", "hierarchical"):
        assert times.forward_seconds(4, 2, ring) * 1e3 == pytest.approx(measured[ring]["ms"], rel=0.05)


def predictor(seq_len: int = 524288, outer: int = 4) -> Predictor:
    cluster = Cluster(8 * outer, 8, H200_LINKS, H200_RATES)
    return Predictor(Shape(seq_len), make_profile(Pattern(), seq_len, 16), cluster)


def test_balance_at_512k_on_32_ranks() -> None:
    found = predictor()
    plain, rotated = (found.predict(Choice(stripe_rotation=rotation)).balance for rotation in (1, 8))
    zigzag = found.predict(Choice("zigzag", "flat")).balance
    assert plain.worker <= 1.06 and plain.critical <= 1.06 and plain.step <= 1.10
    assert rotated.worker <= 1.03 and rotated.critical <= 1.03 and rotated.step <= 1.10
    assert zigzag.worker > 1.2 and zigzag.step > 8


def test_recommends_a_hierarchical_striped_ring_in_few_launches() -> None:
    best = predictor().recommend()[0]
    assert (best.choice.layout, best.choice.ring) == ("striped", "hierarchical") and best.choice.chunks_per_launch > 1
    assert best.forward.compute_share > 0.9 and best.backward.compute_share > 0.9
    assert best.total_imbalance < 1.01


@pytest.mark.parametrize(
    "layout",
    [Layout.striped(8192, 8, 64, 4), Layout.striped(16384, 8, 128, 8), Layout.zigzag(8192, 8), Layout.striped(8192, 8)],
    ids=["rotated", "rotated, wide", "zigzag", "striped"],
)
def test_both_ways_to_count_pairs_agree(layout: Layout) -> None:
    profile = make_profile(Pattern(0.1, 0.005), layout.seq_len, 3)
    owner = (layout.inverse("cpu").long() // layout.local_blocks).numpy()
    offset, residues = work._folded(profile.slash.sum(0), owner, layout.cp_size)
    found, by_runs = (way(offset, residues, layout.cp_size) for way in (work._by_transforms, work._by_runs))
    assert (found == by_runs).all() and (found * 4096 == RankWork.of(profile, layout).slash).all() and found.any()


def a_thousand_ranks() -> Predictor:
    cluster = Cluster(1024, 128, H200_LINKS, H200_RATES)
    return Predictor(Shape(1 << 22), make_profile(Pattern(), 1 << 22, 16), cluster)


def test_a_thousand_ranks_in_seconds() -> None:
    """4M tokens; rotated stripes of 128 ranks a node do not repeat."""
    began = time.process_time()
    found = a_thousand_ranks().predict(Choice(stripe_rotation=128, chunks_per_launch=8))
    assert found.forward.end.shape == (1024,) and time.process_time() - began < 20


@pytest.mark.full
def test_all_choices_of_a_thousand_ranks_in_seconds() -> None:
    began = time.process_time()
    best = a_thousand_ranks().recommend()[0]
    assert time.process_time() - began < 40
    assert best.choice == Choice(stripe_rotation=128, chunks_per_launch=8)


def test_a_flat_ring_over_nodes_is_predicted_chunk_by_chunk_as_it_runs() -> None:
    found = predictor(65536)
    asked = found.predict(Choice(ring="flat", chunks_per_launch=8))
    assert asked.choice.chunks_per_launch == 1 and asked.forward.compute.shape[1] == 32
    assert {p.choice.chunks_per_launch for p in found.recommend() if p.choice.ring == "flat"} == {1}
    with pytest.raises(ValueError, match="chunks_per_launch=0: must be at least 1"):
        found.predict(Choice(chunks_per_launch=0))


def test_balance_has_the_degrees_of_the_metrics() -> None:
    # Rank 1 idles in the first step. By step the slowest are 2 and 4, the means 1 and 4.
    assert Balance.of(np.array([[2.0, 4.0], [0.0, 4.0]])) == Balance(1.5, 1.2, pytest.approx(4 / 3))
    assert Balance.of(np.zeros((2, 3))) == Balance(1.0, 1.0, 1.0)


def test_a_slow_outer_transfer_is_waited_for_where_its_window_begins() -> None:
    """2 x 2, a second a launch: posted at 0, the outer transfer takes 5 and is needed at 2; nothing else waits."""
    ring = Ring(4, 2, 2)
    plan = ring.plan(False, 1)
    found = simulate_plan(ring, plan, np.ones((4, 4)), Links(Link(0.0, 1e9), Link(0.0, 0.2)), 1.0, 1.0)
    assert found.exposed == pytest.approx(np.tile([0.0, 0.0, 3.0, 0.0], (4, 1)), abs=1e-6)
    assert found.seconds == pytest.approx(7.0)


def test_a_slow_rank_is_waited_for() -> None:
    """One rank with twice the work holds up all others in the ring, which then count waiting, not work."""
    found = predictor(65536)
    ring = Ring(32, 8, 8)
    plan = ring.plan(False, 1)
    from megatron_mtraining.simulator.timeline import simulate as run

    work = np.full((32, len(plan.launches)), 1e-3)
    work[3] *= 2
    line = run(ring, plan, work, found.cluster.links, 1e6, 2e6)
    assert line.seconds == pytest.approx(2e-3 * 32, rel=0.01)
    assert line.exposed[3].sum() < 1e-3 < line.exposed[4].sum()


def test_rates_are_those_of_the_result_file() -> None:
    rows = json.loads((RESULTS / "ops-2026-11-30-nvidia-h200-second.json").read_text())["rows"]
    for passed in ("forward", "backward"):
        rate, launch = fit_rates(rows, "mtraining-sm90", passed)
        assert getattr(H200_RATES, passed) == pytest.approx(rate, rel=0.01)
        assert getattr(H200_RATES, passed + "_launch") == pytest.approx(launch, rel=0.02)
    with pytest.raises(ValueError, match="0 rows, at least 2"):
        fit_rates(rows, "mtraining-sm70", "forward")


def test_rates_are_fitted_to_long_sparse_rows_of_a_head_dimension() -> None:
    row = {"impl": "x", "pass": "forward", "head_dim": 64, "density": 0.05, "seq_len": 131072}
    fitted = [
        {**row, "ms": 1.0 + 0.5 * chunks, "tflops": 100 / (1.0 + 0.5 * chunks), "cp_size": chunks} for chunks in (1, 4)
    ]
    others = [{**fitted[0], "ms": 9.0, **other} for other in ({"head_dim": 128}, {"density": 1.0}, {"seq_len": 32768})]
    rate, launch = fit_rates(fitted + others, "x", "forward", 64)
    assert (rate, launch) == (pytest.approx(100e12), pytest.approx(0.5e-3))
    with pytest.raises(ValueError, match="1 rows, at least 2 are needed \\(head_dim=128, density below 0.5"):
        fit_rates(fitted + others, "x", "forward")


def test_head_parallel_imbalance() -> None:
    assert head_parallel_imbalance(np.array([1, 1, 1, 1]), 2) == 1
    assert head_parallel_imbalance(np.array([[3, 1], [1, 3]]), 2) == 1.5, "layers wait for each other"
    with pytest.raises(ValueError, match="ranks=3: must divide the 4 heads"):
        head_parallel_imbalance(np.ones(4), 3)


def test_memory_plans() -> None:
    model = MODELS["qwen2.5-3b"]
    assert model.parameters == pytest.approx(3.09e9, rel=0.02)
    assert MODELS["llama-3.1-8b"].parameters == pytest.approx(8.03e9, rel=0.02)
    few, many = (memory_plan(model, 524288, Parallel(1, cp)) for cp in (8, 32))
    assert few["total"] > many["total"] and few["weights"] == many["weights"]
    needed = [smallest_cp(model, n, 131.0) or 0 for n in (131072, 524288)]
    assert 1 <= needed[0] <= needed[1]
    with pytest.raises(ValueError, match="tp=3: must divide the 2 key heads, or be a multiple"):
        memory_plan(model, 131072, Parallel(3, 8))
    # With more tensor-parallel ranks than key heads each holds one: halves of two heads on four ranks are two heads.
    of_two, of_four = (memory_plan(model, 131072, Parallel(tp, 8)) for tp in (2, 4))
    assert of_four["ring buffers"] == of_two["ring buffers"] and of_four["weights"] == of_two["weights"] / 2


@pytest.mark.parametrize(
    ("cp", "inner", "chunks"), [(1, 1, None), (2, 2, 1), (4, 4, 1), (4, 4, 2), (4, 2, None), (8, 4, 2), (8, 8, 8)]
)
def test_ring_buffers_are_those_that_the_product_takes(
    monkeypatch: pytest.MonkeyPatch, cp: int, inner: int, chunks: int | None
) -> None:
    """Every size of buffer once: the pool gives a rank's second pass what its first one gave back."""
    taken: set[tuple[int, ...]] = set()
    take = pool.take

    def noted(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        taken.add((*shape, dtype.itemsize))
        return take(shape, dtype, device)

    monkeypatch.setattr(pool, "take", noted)
    q, k, v = random_qkv(64 * 2 * cp, heads=4, kv_heads=2, dtype=torch.bfloat16)
    layout = Layout.striped(q.shape[1], cp)
    config = MTrainingConfig(top_p=0.7, chunks_per_launch=chunks)
    run_virtual(q, k, v, layout=layout, config=config, inner_size=inner).sum().backward()
    key = 2 * k[:, : layout.local_seq_len].numel() * 2
    plans = ring_plans(layout.local_seq_len, Parallel(1, cp, inner_size=inner), chunks)
    assert sum(math.prod(shape) for shape in taken) == ring_buffer_bytes(*plans, key, 2 * key)


def test_memory_of_pipeline_stages_and_of_a_run_without_recomputation() -> None:
    model = MODELS["llama-3.1-8b"]
    whole = memory_plan(model, 524288, Parallel(1, 32))
    stages = [memory_plan(model, 524288, Parallel(1, 32, pp=4), stage=stage) for stage in range(4)]
    assert sum(stage["weights"] for stage in stages) == pytest.approx(whole["weights"])
    assert [stage["logits"] > 0 for stage in stages] == [False, False, False, True]
    assert stages[0]["activations"] == pytest.approx(4 * stages[3]["activations"])
    assert stages[0]["activations"] == pytest.approx(
        whole["activations"]
    )  # a quarter of the layers, four micro-batches
    kept = memory_plan(model, 524288, Parallel(1, 32), Training(recompute=False))
    assert kept["activations"] > 8 * whole["activations"]
    alone = memory_plan(model, 524288, Parallel(1, 32), Training(sharded_optimizer=False))
    assert alone["optimizer"] == pytest.approx(32 * whole["optimizer"])
    assert model.stage_embeddings(0, 1) == 2 * model.stage_embeddings(0, 4) == model.embedding_parameters
    tied = MODELS["qwen2.5-3b"]
    assert tied.stage_embeddings(0, 1) == tied.stage_embeddings(3, 4) == tied.embedding_parameters


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    simulate.main(["--seq-len", "65536", "--inner", "4", "--outer", "2", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["cp_size"] == 8 and result["choices"][0]["ms"] <= result["choices"][-1]["ms"]
    simulate.main(["--preset", "paper"])
    assert "34.10" in capsys.readouterr().out
    simulate.main(["--model", "llama-3.1-8b"])
    assert "1048576 tokens" in capsys.readouterr().out
    simulate.main(["--seq-len", "65536", "--inner", "4", "--outer", "2", "--layout", "zigzag", "--ring", "flat"])
    assert "--mtraining-layout zigzag" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="simulate: seq_len=100000: the striped layout"):
        simulate.main(["--seq-len", "100000", "--layout", "striped"])


def test_given_rates_take_the_place_of_fitted_ones(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--seq-len 65536 --inner 2 --outer 1 --layout striped --ring flat --json".split()
    found = []
    for more in ([], ["--forward-tflops", "59.7"], ["--backward-tflops", "39.4"]):
        simulate.main([*words, *more])
        found.append(json.loads(capsys.readouterr().out)["choices"][0])
    stock, forward, backward = found
    assert forward["forward_ms"] > 5 * stock["forward_ms"] and forward["backward_ms"] == stock["backward_ms"]
    assert backward["backward_ms"] > 5 * stock["backward_ms"] and backward["forward_ms"] == stock["forward_ms"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seq-len -5", "--seq-len=-5: must be at least 1"),
        ("--inner 0", "--inner=0: must be at least 1"),
        ("--heads 0", "--heads=0: must be at least 1"),
        ("--inter-gbs 0", "--inter-gbs=0.0: must be above 0"),
        ("--rates none.json", "--rates=none.json: must be a JSON file of benchmarks.bench_ops"),
        ("--rates README.md", "--rates=README.md: must be a JSON file of benchmarks.bench_ops"),
        (
            "--rates benchmarks/results/ring-2026-11-30-2-gpus.json",
            "--rates=benchmarks/results/ring-2026-11-30-2-gpus.json: must be a JSON file of benchmarks.bench_ops, this is",
        ),
        ("--index none.pt", "--index=none.pt: No such file or directory"),
        ("--index README.md", "--index=README.md: README.md: not an index of format 1"),
        (
            "--index docs/images/ring.png",
            "--index=docs/images/ring.png: docs/images/ring.png: not an index of format 1",
        ),
        ("--forward-tflops 0", "--forward-tflops=0.0: must be above 0"),
        ("--inter-gbs nan", "--inter-gbs=nan: must be above 0"),
        ("--intra-us -5", "--intra-us=-5.0: must be at least 0"),
        ("--layout striped --chunks 0", "--chunks=0: must be at least 1"),
        ("--model qwen2.5-3b --tp 0", "--tp=0: must be at least 1"),
        ("--model qwen2.5-3b --tp 3", "tp=3: must divide the 2 key heads"),
        ("--inter-gbs inf", "--inter-gbs=inf: must be above 0 and finite"),
        ("--ring flat", r"--ring: needs --layout \(without, all choices are tried\)"),
        ("--stripe-size 64", "--stripe-size: needs --layout"),
        ("--layout zigzag --stripe-size 128", "--stripe-size: --layout zigzag has no stripes"),
        ("--preset paper --inner 4", "--inner: --preset paper has its own cluster"),
        ("--preset paper --model qwen2.5-3b", "--model: --preset paper has its own cluster"),
        ("--model qwen2.5-3b --seq-len 524288", "--seq-len: --model plans memory"),
        ("--tp 2", "--tp: needs --model"),
        ("--impl mtraining-sm80", "--impl: needs --rates"),
        ("--index dump.pt --seq-len 65536", "--seq-len: --index has its own"),
        ("--model qwen2.5-3b --gpu-memory -3", "--gpu-memory=-3.0: must be above 0"),
    ],
)
def test_bad_input_is_one_line_that_names_the_option(words: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(SystemExit, match=f"^simulate: {message}") as refused:
        simulate.main(words.split())
    assert "\n" not in str(refused.value)
