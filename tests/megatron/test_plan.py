"""``megatron-mtraining plan``: a launch's ring, communicators and memory, from the options of the launch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mtraining import cli, plan
from megatron_mtraining.simulator.memory import MODELS, Parallel, Training, memory_plan, ring_plans

from .conftest import MODEL_OPTIONS

QWEN = ["--model", "qwen2.5-3b", "--seq-length", "524288"]
CP32 = ["--context-parallel-size", "32"]


def planned(capsys, *words):
    """The plan of a launch, as values."""
    capsys.readouterr()
    cli.main(["plan", *words, "--json"])
    return json.loads(capsys.readouterr().out)


def test_a_preset_on_four_hosts(capsys):
    found = planned(capsys, *QWEN, *CP32)
    assert (found["gpus"], found["hosts"], found["inner_size"], found["local_seq_len"]) == (32, 4, 8, 16384)
    assert found["communicators"]["made"] == ["inner", "outer", "inner_grad", "outer_grad"]
    assert found["communicator_mib"] == 4 * plan.COMMUNICATOR_MIB
    [stage] = found["stages"]
    assert stage["gib"] == pytest.approx(memory_plan(MODELS["qwen2.5-3b"], 524288, Parallel(1, 32)))
    # K and V of a chunk in bf16, the same in fp32: slots of the product's launches.
    forward, backward = ring_plans(16384, Parallel(1, 32))
    chunk = 2 * 16384 * 2 * 128 * 2
    keys = {forward.key_slots + 1, backward.key_slots}
    assert stage["gib"]["ring buffers"] * 2**30 == sum(keys) * chunk + backward.grad_slots * 2 * chunk
    best, this = found["recommended"]["choice"], found["recommended"]["this"]
    assert (best["layout"], best["ring"]) == ("striped", "hierarchical") and best["ms"] <= this["ms"]


def test_the_options_of_a_launch(capsys):
    """Not a preset: Megatron's own options, with tensor and pipeline parallelism and Megatron's hierarchical groups."""
    words = [
        *MODEL_OPTIONS,
        "--seq-length",
        "8192",
        "--context-parallel-size",
        "4",
        "--tensor-model-parallel-size",
        "2",
    ]
    words += ["--pipeline-model-parallel-size", "2", "--hierarchical-context-parallel-sizes", "2", "2", "--gpus", "32"]
    words += [
        "--gpus-per-node",
        "4",
        "--swiglu",
        "--ffn-hidden-size",
        "192",
        "--mtraining-max-vertical",
        "128",
        "--bf16",
    ]
    found = planned(capsys, *words, "--communicator-mib", "10")
    assert (found["tp"], found["cp"], found["pp"], found["dp"]) == (2, 4, 2, 2)
    assert (found["hosts"], found["inner_size"]) == (2, 2)
    assert found["communicators"] == {"made": ["inner_grad", "outer_grad"], "megatron": ["cp", "inner", "outer"]}
    assert found["communicator_mib"] == 20
    assert [stage["ranks"] for stage in found["stages"]] == [[0, 15], [16, 31]]
    shape = plan.Model(2, 64, 192, 4, 4, 16, 256, tied=True)
    training = Training(1, recompute=False, sharded_optimizer=False, max_vertical=128)
    for number, stage in enumerate(found["stages"]):
        assert stage["gib"] == pytest.approx(memory_plan(shape, 8192, Parallel(2, 4, 2, 2, 2, 2), training, number))


@pytest.mark.parametrize(
    ("words", "inner", "made"),
    [
        (["--context-parallel-size", "8"], 8, ["inner_grad"]),
        (["--context-parallel-size", "1"], 1, []),
        ([*CP32, "--mtraining-ring", "flat"], 32, ["inner_grad"]),
        (
            [*CP32, "--gpus-per-node", "4", "--mtraining-layout", "zigzag"],
            4,
            ["inner", "outer", "inner_grad", "outer_grad"],
        ),
        ([*CP32, "--tensor-model-parallel-size", "2"], 4, ["inner", "outer", "inner_grad", "outer_grad"]),
    ],
)
def test_rings(capsys, words, inner, made):
    found = planned(capsys, *QWEN, *words)
    assert (found["inner_size"], found["communicators"]["made"]) == (inner, made)
    assert (found["recommended"] is None) == (found["cp"] == 1)


def test_a_flat_ring_over_hosts_works_chunk_by_chunk(capsys):
    assert planned(capsys, *QWEN, *CP32, "--mtraining-ring", "flat")["launches"] == {"forward": 32, "backward": 32}
    assert planned(capsys, *QWEN, *CP32)["launches"]["forward"] < 32


def test_hosts_with_unequal_parts_are_not_simulated(capsys):
    found = planned(capsys, *QWEN, *CP32, "--gpus-per-node", "12")
    assert (found["inner_size"], found["hosts"], found["recommended"]) == (32, 3, None)


def test_what_is_not_modelled_is_said(capsys):
    found = planned(capsys, *QWEN, *CP32, "--num-experts", "8")
    assert found["stages"] == [] and found["unknown"] == "memory of the model is not estimated with experts"
    assert len(found["communicators"]["made"]) == 4
    capsys.readouterr()
    cli.main(["plan", *QWEN, *CP32])
    text = capsys.readouterr().out
    assert (
        "communicators of a rank: 4 made (inner, outer, inner_grad, outer_grad; about 1536 MiB), 1 of Megatron's"
        in text
    )
    assert "hierarchical ring, inner size 8 (4 hosts with 8 ranks each)" in text
    assert "GiB of each of the ranks 0-31 (pipeline stage 0): weights 5.75" in text


def test_the_launch_of_the_guide(capsys):
    """docs/megatron.md gives the rows of the embedding by --padded-vocab-size, and sends its reader here."""
    text = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text()
    words = text.split("pretrain_gpt.py \\", 1)[1].split("```", 1)[0].replace("\\\n", " ").split()
    found = planned(capsys, *words)
    assert found["unknown"] == "" and found["ring_reason"] == "4 hosts with 8 ranks each"
    assert found["stages"][0]["gib"] == pytest.approx(memory_plan(MODELS["qwen2.5-3b"], 524288, Parallel(1, 32)))
    without = [word for word in words if word not in ("--padded-vocab-size", "151936")]
    assert planned(capsys, *without)["unknown"].startswith(
        "no --vocab-size or --padded-vocab-size: embeddings and logits"
    )


def test_one_rank_may_hold_any_length(capsys):
    """As in a launch; memory is that of whole blocks."""
    found = planned(capsys, "--model", "qwen2.5-3b", "--seq-length", "1000")
    assert found["local_seq_len"] == 1000
    assert found["stages"] == planned(capsys, "--model", "qwen2.5-3b", "--seq-length", "1024")["stages"]


def test_more_tensor_parallel_ranks_than_key_heads(capsys):
    """Megatron gives each of them a copy of one: the buffers of a ring hold one head, as with two ranks."""
    two, eight = (planned(capsys, *QWEN, *CP32, "--tensor-model-parallel-size", tp) for tp in ("2", "8"))
    assert eight["recommended"] is not None
    # Inner rings differ (4 and 1 ranks of a host): compare what does not depend on them.
    weights = [found["stages"][0]["gib"]["weights"] for found in (two, eight)]
    assert weights[1] == pytest.approx(weights[0] / 4, rel=0.001)  # the vocabulary is padded by the ranks


@pytest.mark.parametrize(
    "words",
    [
        ["--decoder-first-pipeline-num-layers", "6"],
        ["--num-virtual-stages-per-pipeline-rank", "3"],
        ["--pipeline-model-parallel-layout", "Et*9|t*9|t*9|t*9L"],
    ],
)
def test_stages_of_another_kind_are_said_not_to_be_estimated(capsys, words):
    """Unequal numbers of layers, or several chunks: figures of equal stages would be wrong."""
    found = planned(capsys, *QWEN, *CP32, "--pipeline-model-parallel-size", "4", *words)
    assert found["stages"] == [] and found["unknown"] == f"memory of pipeline stages is not estimated with {words[0]}"
    assert found["recommended"] is not None


def test_ranks_of_stages_that_are_no_neighbours_are_not_named(capsys):
    words = [*QWEN, *CP32, "--pipeline-model-parallel-size", "2", "--use-tp-pp-dp-mapping"]
    assert [stage["ranks"] for stage in planned(capsys, *words)["stages"]] == [None, None]
    cli.main(["plan", *words])
    assert "GiB of each of the ranks (pipeline stage 1): weights" in capsys.readouterr().out


def test_a_hybrid_models_pattern_says_its_layers(capsys):
    """As Megatron's validation does: the number of layers, and prediction, which needs Megatron's layout."""
    options = "--hidden-size 64 --num-attention-heads 4 --seq-length 8192 --attention-dropout 0"
    words = [*options.split(), "--context-parallel-size", "2", "--hybrid-layer-pattern"]
    assert planned(capsys, *words, "*-*-")["layout_mode"] == "native"
    found = planned(capsys, *words, "*-*-/*-", "--mtraining-dense-layers", "4")
    assert found["layout_mode"] == "convert"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*QWEN, "--context-parallel-size", "0"], "--context-parallel-size 0: must be at least 1"),
        ([*QWEN, *CP32, "--gpus", "48"], "--gpus 48: must be a multiple of .* ranks, 32"),
        ([*QWEN, *CP32, "--gpus-per-node", "0"], "--gpus-per-node 0: must be at least 1"),
        ([*QWEN, *CP32, "--gpu-per-node", "8"], "unrecognized arguments: --gpu-per-node 8"),
        ([*QWEN, *CP32, "--mtraining-top-p", "2"], r"--mtraining-top-p=2.0: must be a number in \(0, 1\]"),
        ([*QWEN, *CP32, "--mtraining-ring", "square"], "argument --mtraining-ring: invalid choice: 'square'"),
        ([*QWEN, *CP32, "--window-size", "128,0"], r"--window-size .*: not supported"),
        ([*QWEN, *CP32, "--hierarchical-context-parallel-sizes", "8", "2"], "sizes 8 2: .* whose product is 32"),
        (
            [*QWEN, *CP32, "--hierarchical-context-parallel-sizes", "16", "2"],
            "sizes 16 2: an inner ring of 16 ranks would cross hosts",
        ),
        ([*QWEN[:2], "--seq-length", "524289", *CP32], "--seq-length 524289: .* nearest: 524288 or 526336"),
        ([*QWEN[:2], *CP32], "--seq-length: must be given"),
        (
            [
                *QWEN,
                *CP32,
                "--num-query-groups",
                "4",
                "--num-attention-heads",
                "12",
                "--tensor-model-parallel-size",
                "6",
            ],
            "--num-query-groups 4: must be a multiple or divisor of --tensor-model-parallel-size 6",
        ),
        ([*QWEN, *CP32, "--mtraining-dump-layers", "3"], "--mtraining-dump-layers .*need a folder"),
        ([*QWEN, *CP32, "--mtraining-dump-index", ""], "--mtraining-dump-index '': must name a folder"),
        ([*QWEN, *CP32, "--mtraining-profile-steps", "3"], "--mtraining-profile-steps 3: writes ring.jsonl"),
        ([*QWEN, *CP32, "--mtraining-stripe-rotation", "3"], "--mtraining-stripe-rotation 3: must divide"),
        ([*QWEN, *CP32, "--hierarchical-context-parallel-sizes", "-8", "-4"], "sizes -8 -4: .*two sizes from 1 up"),
        ([*QWEN, *CP32, "--hybrid-layer-pattern", "*X"], r"--hybrid-layer-pattern \*X: .*X"),
        (
            [*QWEN, *CP32, "--hybrid-layer-pattern", "*-/*-", "--mtraining-layout-mode", "native"],
            "--mtraining-layout-mode native: --mtp-num-layers",
        ),
        ([*QWEN, *CP32, "--pipeline-model-parallel-size", "5"], "--num-layers 36: must be a multiple of"),
        (["--model", "gpt-5"], "argument --model: invalid choice: 'gpt-5'"),
        (
            [*QWEN, "--context-parallel-size", "8", "--gpus-per-node", "12", "--gpus", "24"],
            "context-parallel groups lie differently on the hosts",
        ),
        ([*QWEN, *CP32, "--communicator-mib", "-1"], "--communicator-mib -1: must be a number from 0 up"),
        ([*QWEN, *CP32, "--communicator-mib", "nan"], "--communicator-mib nan: must be a number from 0 up"),
        ([*QWEN, *CP32, "--attention-backend", "flash"], "argument --attention-backend: invalid choice: 'flash'"),
        ([*QWEN, *CP32, "--mtraining-dense-layers", "36"], "--mtraining-dense-layers 36: must be .* from 0 to 35"),
        ([*QWEN, *CP32, "--mtraining-guard-recall", "2"], "--mtraining-guard-recall.*2"),
        ([*QWEN, *CP32, "--micro-batch-size", "-1"], "--micro-batch-size -1: must be at least 1"),
        ([*QWEN, *CP32, "--ffn-hidden-size", "-5"], "--ffn-hidden-size -5: must be at least 1"),
        ([*QWEN, *CP32, "--kv-channels", "0"], "--kv-channels 0: must be at least 1"),
        ([*QWEN, *CP32, "--num-query-groups", "0"], "--num-query-groups 0: must be at least 1"),
        ([*QWEN, *CP32, "--num-query-groups", "3"], "--num-query-groups 3: must divide --num-attention-heads 16"),
        ([*QWEN, *CP32, "--vocab-size", "-1"], "--vocab-size -1: must be at least 1"),
        ([*QWEN, *CP32, "--make-vocab-size-divisible-by", "0"], "--make-vocab-size-divisible-by 0: must be at least 1"),
        ([*QWEN[:2], "--seq-length", "0", *CP32], "--seq-length 0: must be at least 1"),
    ],
)
def test_bad_input_is_refused_in_one_line(words, message):
    with pytest.raises(SystemExit, match=f"^megatron-mtraining plan: error: .*{message}") as refused:
        cli.main(["plan", *words])
    assert "\n" not in str(refused.value)


def test_the_command_prints_nothing_else():
    """Not even Megatron's warnings about packages that only training needs."""
    command = [sys.executable, "-m", "megatron_mtraining.cli", "plan", *QWEN, *CP32]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[0][:8]) == (0, "32 GPUs:"), done.stderr
    assert done.stderr == ""
