"""The whole pipeline of the study on a small random model: loading, training, evaluation, tasks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.proof.corpus import split
from benchmarks.proof.smollm import half_rotation, read_weights
from benchmarks.proof.tasks import DIGITS, TASKS, Phrases, make_sample, make_samples, training_sequence

from .conftest import DIM, HEADS, HIDDEN

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results(folder):
    """Lines of two runs, by variant, of the command itself."""
    options = (
        f"--gguf {folder}/model.gguf --data {folder} --output {folder}/out --variants dense top-p-0.95 joint-0.95 --seeds 3 "
        "--length 256 --steps 3 --questions 4 --windows 2 --retrieval needle:128:3 multikey:192:2 --study-layers 2"
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
        found = [line["retrieval"] for line in lines if "retrieval" in line]
        assert [(f["task"], f["count"]) for f in found] == [("needle", 3)] * 2 + [("multikey", 2)] * 2


def test_index_study_covers_every_family(results, folder):
    """Recall at budgets that keep nearly everything is nearly 1, and no index keeps more than there is."""
    lines = [json.loads(line) for line in (folder / "out" / "index-256-seed3.jsonl").read_text().splitlines()]
    assert {line["layer"] for line in lines} == {2}
    assert {"paper", "token slash", "fixed", "moba", "xattention", "flexprefill", "spread + joint"} <= {
        line["family"] for line in lines
    }
    assert all(0 < line["recall"] <= 1.0001 and 0 < line["density"] <= 1.2501 for line in lines)
    assert all(line["recall"] > 0.9 for line in lines if line["family"] == "paper" and line["budget"] == 0.98)


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
