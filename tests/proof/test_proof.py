"""The whole pipeline of the study on a small random model: loading, training, evaluation, tasks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.proof.attention import pairs_of_rows
from benchmarks.proof.corpus import split
from benchmarks.proof.estimators import ProbeView, joint, spread_rows
from benchmarks.proof.mass import attention_rows, block_row_mass, kept_share
from benchmarks.proof.row_study import row_recalls
from benchmarks.proof.smollm import half_rotation, read_weights
from benchmarks.proof.state import RunState
from benchmarks.proof.summary import Run, gaps, recall_table, repeated, step_times, summarize
from benchmarks.proof.tasks import DIGITS, TASKS, Phrases, answer_rows, make_sample, make_samples, training_sequence
from megatron_mtraining import MTrainingConfig, estimate_index

from .conftest import DIM, HEADS, HIDDEN

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results(folder):
    """Lines of two runs, by variant, of the command itself."""
    options = (
        f"--gguf {folder}/model.gguf --data {folder} --output {folder}/out --variants dense top-p-0.95 joint-0.95 --seeds 3 "
        "--length 256 --steps 3 --questions 4 --windows 2 --retrieval needle:128:3 multikey:192:2 --study-layers 2 --planted 2 "
        "--recall-steps 0 2"
    )
    # A process of its own: without a GPU it makes Megatron run on the CPU, once and for all.
    command = [sys.executable, "-m", "benchmarks.proof.runs", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = {}
    for name in ("dense", "top-p-0.95", "joint-0.95"):
        lines = (folder / "out" / f"{name}-seed3-256.jsonl").read_text().splitlines()
        found[name] = [json.loads(line) for line in lines]
    return found


def test_runs_share_start_and_batches(results):
    """At 256 tokens of random text nearly all is kept, so that the first losses nearly agree; dense inference of equal
    weights would agree exactly."""
    first = {name: [line for line in lines if "step" in line] for name, lines in results.items()}
    assert [len(lines) for lines in first.values()] == [3, 3, 3]
    for name in ("top-p-0.95", "joint-0.95"):
        assert abs(first["dense"][0]["loss"] - first[name][0]["loss"]) < 0.05
        assert len(first[name][0]["density_by_layer"]) == 2
    assert "density_by_layer" not in first["dense"][0]
    assert all(line["grad_norm"] > 0 for lines in first.values() for line in lines)


def test_evaluation_is_complete(results):
    for lines in results.values():
        valid = [line for line in lines if "valid" in line]
        assert len(valid) == 2 and valid[0]["attention"] == "dense"
        assert all(len(line["valid"]["by_window"]) == 2 for line in valid)
        assert all(
            np.isclose(np.mean(line["valid"]["by_position"]), line["valid"]["loss"], atol=1e-4) for line in valid
        )
        asked = [(line["attention"], line["planted"]["count"]) for line in lines if "planted" in line]
        assert asked == [(line["attention"], 8) for line in valid]
        found = [line["retrieval"] for line in lines if "retrieval" in line]
        assert [(f["task"], f["count"]) for f in found] == [("needle", 3)] * 2 + [("multikey", 2)] * 2


def test_a_run_in_two_calls_is_the_run_in_one(folder, results):
    """State after two of three steps, then the rest: the same losses, and evaluation, to the last bit; no state is left."""
    command = (
        f"{sys.executable} -m benchmarks.proof.runs --gguf {folder}/model.gguf --data {folder} --output {folder}/two "
        f"--variants top-p-0.95 --seeds 3 --length 256 --steps 3 --questions 4 --windows 2 --retrieval needle:128:3 "
        f"multikey:192:2 --planted 2 --recall-steps 0 2 --states {folder}/states --steps-a-call 2"
    ).split()
    path = folder / "two" / "top-p-0.95-seed3-256.jsonl"
    for finished in (False, True):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert path.exists() == finished and (folder / "states" / "top-p-0.95-seed3-256.pt").exists() != finished
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in (*lines, *results["top-p-0.95"]):
        line.pop("seconds", None)
    assert lines == results["top-p-0.95"]


def test_the_state_of_another_run_is_refused(tmp_path):
    torch.save({"lines": [{"variant": "dense"}], "optimizer": {}, "steps": 1}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="state of another run"):
        RunState(tmp_path / "x.pt").begin({"variant": "moba"})


def test_recall_is_measured_after_the_steps_asked_for(results):
    """Where top-p keeps at least its share of the rows that chose, and dense runs have no index."""
    found = [line for line in results["top-p-0.95"] if "recall" in line]
    assert [line["recall_after"] for line in found] == [0, 2]
    for line in found:
        recall = line["recall"]
        assert [len(values) for values in recall.values()] == [2] * 4
        assert all(0.95 <= value <= 1 for value in recall["probe"])
        for worst, mean, rows in zip(recall["worst_head"], recall["true"], recall["rows_5th"], strict=True):
            assert 0.5 < worst <= mean <= 1.00001 and rows <= mean
    assert not [line for line in results["dense"] if "recall" in line]


def test_recall_of_a_layer_is_that_of_its_mask(monkeypatch):
    """Few rows, a low share: 256 rows of 256 are all rows, so that the mask itself tells the mean."""
    from benchmarks.proof import step_recall

    q, k = random_layer(seq=256)
    config = MTrainingConfig(top_p=0.3)
    index = estimate_index(q, k, config=config)
    layer = SimpleNamespace(core_attention=SimpleNamespace(mtraining=config))
    monkeypatch.setattr(step_recall, "attention_layers", lambda model: [layer])
    found = step_recall.layer_recall(None, 0, (q, k), index)
    held = (attention_rows(q, k, torch.arange(256), 32**-0.5) * index.to_mask()[0]).sum(2)
    assert found["true"] == pytest.approx(held.mean().item(), abs=1e-4)
    assert found["worst_head"] == pytest.approx(held.mean(1).min().item(), abs=1e-4)
    assert found["probe"] == pytest.approx(held[:, -64:].mean().item(), abs=1e-4)
    assert found["true"] < 0.95 and found["rows_5th"] < found["true"]


def test_index_study_covers_every_family(results, folder):
    """Recall at budgets that keep nearly everything is nearly 1, and no index keeps more than there is."""
    lines = [json.loads(line) for line in (folder / "out" / "index-256-seed3.jsonl").read_text().splitlines()]
    assert {line["layer"] for line in lines} == {2}
    assert {"paper", "token slash", "fixed", "moba", "xattention", "flexprefill", "spread + joint"} <= {
        line["family"] for line in lines
    }
    assert all(0 < line["recall"] <= 1.0001 and 0 < line["density"] <= 1.2501 for line in lines)
    assert all(line["recall"] > 0.9 for line in lines if line["family"] == "paper" and line["budget"] == 0.98)


def random_layer(seq=512, heads=3):
    torch.manual_seed(0)
    drift = torch.randn(1, seq, 1, 32).cumsum(1) / 12
    return torch.randn(1, seq, heads, 32) + drift, torch.randn(1, seq, 1, 32) + drift


@pytest.mark.parametrize("choose", ["library", "joint"])
def test_kept_share_is_that_of_the_mask(choose):
    q, k = random_layer()
    view = ProbeView.make(q, k, spread_rows(512, 64, q.device), 0.2)
    index = (
        joint(view, 0.8)
        if choose == "joint"
        else estimate_index(q, k, config=MTrainingConfig(top_p=0.7), softmax_scale=0.2)
    )
    attention = attention_rows(q, k, torch.arange(512), 0.2)
    expected = (attention * index.to_mask()[0]).sum((1, 2)) / attention.sum((1, 2))
    torch.testing.assert_close(kept_share(index, block_row_mass(q, k, 0.2)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["top_p", "xattention"])
def test_recall_of_rows_is_that_of_the_mask(policy):
    q, k = random_layer()
    index = estimate_index(q, k, config=MTrainingConfig(top_p=0.3, index_policy=policy), softmax_scale=0.02)
    rows = torch.tensor([0, 63, 64, 200, 511])
    mask = (
        index.to_mask()[0]
        if policy == "top_p"
        else index.block_bits()[0].repeat_interleave(64, 1).repeat_interleave(64, 2).tril()
    )
    expected = (attention_rows(q, k, rows, 0.02) * mask[:, rows]).sum(2)
    torch.testing.assert_close(row_recalls(q, k, rows, {"x": index}, 0.02)["x"], expected, rtol=1e-4, atol=1e-5)
    assert float(expected.min()) < 0.95


def test_pairs_of_rows_add_up():
    q, k = random_layer()
    index = estimate_index(q, k, config=MTrainingConfig(top_p=0.7), softmax_scale=0.2)
    assert torch.equal(pairs_of_rows(index, 0), index.pairs())
    mask = index.to_mask()[0].unflatten(1, (-1, 64)).any(2)  # a row block works off whole pairs of blocks or columns
    first = 3
    blocks = mask[:, first:].unflatten(2, (-1, 64))
    diagonal = torch.eye(8, dtype=torch.bool)[first:]
    whole = (blocks.all(3) | diagonal).sum((1, 2)) * 64 * 64
    single = (blocks & ~blocks.all(3, keepdim=True) & ~diagonal[None, :, :, None]).sum((1, 2, 3)) * 64
    assert torch.equal(pairs_of_rows(index, first)[0], whole + single)


def test_answer_rows_predict_the_planted_digits(folder):
    phrases = Phrases.load(folder / "phrases.json")
    text = np.fromfile(folder / "valid.bin", dtype=np.uint16)
    tokens = training_sequence(text, 512, 5, phrases, np.random.default_rng(1))
    rows = answer_rows(tokens, phrases).reshape(5, DIGITS)
    for answer in rows:
        key = tokens[answer[0] - 2 : answer[0]]  # before "is"
        value = tokens[answer + 1]
        stated = [i for i in range(rows.min()) if tokens[i] == 11 and (tokens[i + 1 : i + 3] == key).all()]
        assert len(stated) == 1 and (tokens[stated[0] + 4 : stated[0] + 4 + DIGITS] == value).all()
        assert (value < 10).all()


def test_zero_shot_measures_variants_and_layers(folder):
    """Segments with lines of their own keep as much as all rows do where every line is kept."""
    options = (
        f"--gguf {folder}/model.gguf --data {folder} --output {folder}/zero --length 256 --steps 1 --windows 2 --questions 2 "
        "--variants top-p-0.95-dense-19 own-lines-2-0.98 --by-layer top-p-0.95 --row-layers 1"
    )
    command = [sys.executable, "-m", "benchmarks.proof.zero_shot", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "zero" / "zero-shot-256.jsonl").read_text().splitlines()]
    whole = {line["variant"]: line for line in lines if "loss" in line and "variant" in line and "layer" not in line}
    assert list(whole) == ["dense", "top-p-0.95-dense-19", "own-lines-2-0.98"]
    assert all(abs(line["loss"] - whole["dense"]["loss"]) < 0.01 for line in whole.values())
    assert [line["layer"] for line in lines if line.get("variant") == "top-p-0.95" and "loss" in line] == [1, 2]
    assert [line["variant"] for line in lines if "recall" in line] == ["top-p-0.95-dense-19"]


@pytest.mark.parametrize("share", [0.5, 0.9, 0.98])
def test_the_joint_budget_holds_its_share_of_the_probes(share):
    q, k = random_layer()
    rows = spread_rows(512, 64, q.device)
    view = ProbeView.make(q, k, rows, 0.2)
    index = joint(view, share)
    attention = attention_rows(q, k, rows, 0.2)
    held = (attention * index.to_mask()[0][:, rows]).sum((1, 2)) / attention.sum((1, 2))
    assert (held >= share - 1e-4).all()
    assert (index.pairs() <= joint(view, 0.999).pairs()).all(), "a smaller share costs more"
    assert joint(view, 0.5).pairs().sum() < joint(view, 0.999).pairs().sum(), "the budget is no bound at all"


def test_summary_pairs_by_seed(results, folder):
    (folder / "one" / "training").mkdir(parents=True)
    for path in (folder / "out").glob("*-seed3-256.jsonl"):
        (folder / "one" / "training" / path.name).write_text(path.read_text())
    found = summarize(folder)
    ours, dense = (results[name] for name in ("top-p-0.95", "dense"))
    losses = [next(line["valid"]["loss"] for line in lines if line.get("attention") == how) for lines, how in
              ((ours, "top-p-0.95"), (dense, "dense"))]  # fmt: skip
    gap = found["256"]["gap_to_dense_held_out"]["top-p-0.95"]["own attention"]["values"]
    assert gap == [pytest.approx(losses[0] - losses[1], abs=1e-5)]
    assert {cell["count"] for cell in found["256"]["retrieval"]} == {2, 3}


def made_run(variant, seed, length, loss, **more):
    """A run with one held-out loss under its own and dense attention."""
    valid = {name: {"loss": loss} for name in {variant, "dense"}}
    steps = [{"step": n, "loss": loss, "seconds": 1.0, "density_by_layer": [0.5, 1.0]} for n in range(3)]
    return Run(more.pop("job", "job1"), variant, seed, length, steps, valid, [], [], more.pop("recall", {}))


def test_gaps_are_of_equal_lengths_and_seeds():
    runs = [made_run("dense", 0, 256, 2.0), made_run("dense", 1, 256, 2.5), made_run("moba", 1, 256, 2.75)]
    assert gaps(runs)["moba"]["own attention"]["values"] == [0.25]
    again = [made_run("dense", 0, 256, 2.125), made_run("dense", 0, 512, 3.0)]
    assert repeated(runs, again) == [{"seed": 0, "length": 256, "difference": 0.125}]
    times = step_times([*runs, made_run("moba", 1, 256, 2.0, job="job2")])
    assert {job: list(found) for job, found in times.items()} == {"job1": ["dense", "moba"], "job2": ["moba"]}


def test_recall_is_the_mean_of_the_layers_that_estimate():
    """Layer 8 of this variant is dense; where nothing was measured there is no mean."""
    by_layer = {"true": [0.5] * 6 + [0.8] + [1.0], "probe": [None] * 8}
    found = recall_table([made_run("top-p-0.95-dense-8-19", 0, 256, 2.0, recall={7: by_layer})])
    assert found == {"top-p-0.95-dense-8-19": {7: {"true": pytest.approx(0.5429, abs=1e-4), "probe": None}}}


def test_permutation_matches_both_rotations():
    """q . k under rotation of neighbours equals that of the permuted rows under rotation of halves."""
    torch.manual_seed(0)
    weight = torch.randn(HEADS * DIM, HIDDEN)
    half = half_rotation(weight, HEADS).view(HEADS, DIM, HIDDEN)
    neighbours = weight.view(HEADS, DIM // 2, 2, HIDDEN)
    assert torch.equal(half[:, : DIM // 2], neighbours[:, :, 0])
    assert torch.equal(half[:, DIM // 2 :], neighbours[:, :, 1])


def test_shape_is_read(folder):
    shape, weights = read_weights(folder / "model.gguf")
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (2, 3, 1, 16)
    assert weights["decoder.layers.1.self_attention.linear_qkv.weight"].shape == (5 * DIM, HIDDEN)


@pytest.mark.parametrize("task", TASKS)
def test_samples_hold_the_answer_where_it_belongs(folder, task):
    phrases, text = Phrases.load(folder / "phrases.json"), np.full(3000, 99, dtype=np.uint16)
    for sample in make_samples(task, 256, 4, text, phrases, seed=1):
        assert sample.tokens.shape == (256,)
        answer = sample.tokens[-DIGITS:].tolist()
        assert set(answer) <= set(phrases.digits)
        body = sample.tokens[:-DIGITS].tolist()
        assert any(body[i : i + DIGITS] == answer for i in range(len(body)))
    assert (
        next(make_samples(task, 256, 1, text, phrases, 1)).tokens.tolist()
        == next(make_samples(task, 256, 1, text, phrases, 1)).tokens.tolist()
    )


def test_unknown_task_is_named(folder):
    with pytest.raises(ValueError, match="task='nadel': must be one of needle"):
        make_sample("nadel", 64, np.zeros(99), Phrases.load(folder / "phrases.json"), np.random.default_rng(0))


def test_training_sequences_ask_after_they_tell(folder):
    phrases = Phrases.load(folder / "phrases.json")
    tokens = training_sequence(np.full(3000, 99), 513, 4, phrases, np.random.default_rng(0))
    assert tokens.shape == (513,)
    assert max(np.flatnonzero(tokens == 11)) < min(np.flatnonzero(tokens == 14))


def test_the_end_of_each_book_is_held_out():
    train, valid = split({"a": np.arange(100, dtype=np.uint16), "b": np.arange(50, dtype=np.uint16)})
    assert train.tolist() == [*range(96), 0, *range(48), 0]
    assert valid.tolist() == [*range(96, 100), 0, 48, 49, 0]
