"""Megatron's own training loop with the plugin, over 4 processes: every split of the work gives the same numbers.

The reference is Megatron's data parallelism alone (cp 1), with the same global batch. Bounds: docs/design.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron_mtraining.index_dump import load_index

WORKER = Path(__file__).with_name("training_worker.py")
RANKS = 4
BOUND = 1e-5  # relative, fp32, per parameter

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
    "--train-iters 1 --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 127 "
    "--make-vocab-size-divisible-by 64 --normalization RMSNorm --disable-bias-linear --mock-data --eval-iters 0 "
    "--eval-interval 100 --log-interval 10 --split 90,5,5 --untie-embeddings-and-output-weights "
    "--attention-backend mtraining"
)
ROPE = "--position-embedding-type rope"
ALL = "--mtraining-top-p 1 --mtraining-max-vertical none"
SPARSE = f"{ROPE} --mtraining-top-p 0.9 --train-iters 2"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CP4 = "--context-parallel-size 4"
CP2 = "--context-parallel-size 2"
HIERARCHICAL = f"{CP4} --hierarchical-context-parallel-sizes 2 2"
SAVE = "--ckpt-format torch_dist --lr-decay-iters 10 --save-interval 1 --save"
RESUME = "--ckpt-format torch_dist --lr-decay-iters 10 --train-iters 2 --override-opt-param-scheduler --load"
YARN = f"--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 256 {ALL}"
HYBRID = f"{ROPE} {ALL} --hybrid-layer-pattern *-*- --spec user_specs hybrid_stack_spec"
PER_TOKEN = f"{ROPE} {ALL} --calculate-per-token-loss"
PLAN = f"{SPARSE} --num-layers 4 --mtraining-layer-top-p 1-2:0.6 --mtraining-dense-layers 3"
GUARDED = f"{ROPE} --mtraining-top-p 0.5 --train-iters 2 --log-interval 1 --mtraining-guard-recall 0.72"
PACKED = f"{ROPE} --mtraining-top-p 0.8 --calculate-per-token-loss --sft --train-iters 2"

SCENARIOS = {
    "dp4": f"{ROPE} {ALL}",
    "cp4": f"{ROPE} {ALL} {CP4} --eval-iters 1",
    "cp4_hierarchical": f"{ROPE} {ALL} {HIERARCHICAL}",
    "cp4_dense": f"{ROPE} {CP4} --mtraining-dense",
    "cp4_convert": f"{ROPE} {ALL} {CP4} --mtraining-layout-mode convert",
    "dp2_cp2": f"{ROPE} {ALL} {CP2} --eval-iters 1",
    "tp2_cp2": f"{ROPE} {ALL} {CP2} --tensor-model-parallel-size 2",
    "pp2_cp2": f"{ROPE} {ALL} {CP2} --pipeline-model-parallel-size 2",
    "sparse_dp4": SPARSE,
    "sparse_cp4": f"{SPARSE} {CP4}",
    "sparse_hierarchical": f"{SPARSE} {HIERARCHICAL}",
    "sparse_full_recompute": f"{SPARSE} {CP4} {FULL_RECOMPUTE}",
    "sparse_selective_recompute": f"{SPARSE} {CP4} --recompute-granularity selective",
    "sparse_evaluated": f"{SPARSE} {CP4} --eval-interval 1 --eval-iters 1",
    "mtp_dp4": f"{ROPE} {ALL} --mtp-num-layers 1",
    "mtp_cp4": f"{ROPE} {ALL} {CP4} --mtp-num-layers 1",
    "mtp_zigzag": f"{ROPE} {ALL} {CP4} --mtp-num-layers 1 --mtraining-layout zigzag",
    "hybrid_dp4": HYBRID,
    "hybrid_cp4": f"{HYBRID} {CP4}",
    "masked_dp4": PER_TOKEN,
    "masked_cp4": f"{PER_TOKEN} {CP4} --mtraining-layout contiguous",
    "plan_dp4": PLAN,
    "plan_interleaved_cp2": f"{PLAN} {CP2} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "guarded_dp4": GUARDED,
    "guarded_cp4": f"{GUARDED} {CP4}",
    "guarded_full_recompute": f"{GUARDED} {CP4} {FULL_RECOMPUTE}",
    "dumped_cp4": f"{SPARSE} {CP4} --mtraining-dump-index FOLDER/dump --mtraining-dump-steps 2 --mtraining-dump-layers 1",
    "packed_dp4": PACKED,
    "packed_cp4": f"{PACKED} {CP4}",
    "packed_cp4_convert": f"{PACKED} {CP4} --mtraining-layout-mode convert",
    "packed_pp2_cp2": f"{PACKED} {CP2} --pipeline-model-parallel-size 2",
}
FULL_SCENARIOS = {
    "dp4": f"{ROPE} {ALL} --eval-iters 1",
    "cp4_zigzag": f"{ROPE} {ALL} {CP4} --mtraining-layout zigzag",
    "cp4_contiguous": f"{ROPE} {ALL} {CP4} --mtraining-layout contiguous --eval-iters 1",
    "cp4_stripes_of_128": f"{ROPE} {ALL} {CP4} --mtraining-stripe-size 128",
    "cp4_gathered_again": f"{ROPE} {ALL} {CP4} --mtraining-vertical-backward gather",
    "batch2": f"{ROPE} {ALL} {CP4} --micro-batch-size 2",
    "distributed_optimizer": f"{ROPE} {ALL} {CP2} --use-distributed-optimizer --overlap-grad-reduce",
    "yarn_dp4": YARN,
    "yarn_cp4": f"{YARN} {CP4}",
    "learned_dp4": ALL,
    "learned_cp4": f"{ALL} {CP4}",
    "experts_dp4": f"{ROPE} {ALL} --num-experts 2 --moe-router-topk 2",
    "experts_cp4": f"{ROPE} {ALL} {CP4} --num-experts 2 --moe-router-topk 2",
    "sparse_dp4": SPARSE,
    "sparse_convert": f"{SPARSE} {CP4} --mtraining-layout-mode convert",
    "masked_dp4": PER_TOKEN,
    "masked_dp2_cp2": f"{PER_TOKEN} {CP2}",
    "saved_sparse_cp4": f"{ROPE} {ALL} {CP4} {SAVE} FOLDER/sparse",
    "saved_dense_dp4": f"{ROPE} {ALL} {SAVE} FOLDER/dense --attention-backend auto",
    "sparse_from_sparse": f"{ROPE} {ALL} {CP2} {RESUME} FOLDER/sparse",
    "dense_from_sparse": f"{ROPE} {ALL} {RESUME} FOLDER/sparse --attention-backend auto",
    "sparse_from_dense": f"{ROPE} {ALL} {CP4} {RESUME} FOLDER/dense",
    "dense_from_dense": f"{ROPE} {ALL} {RESUME} FOLDER/dense --attention-backend auto",
}


class Runs:
    """What the worker dumped, by scenario and rank."""

    def __init__(self, folder):
        self.folder = folder

    def ranks(self, name):
        return [torch.load(self.folder / f"{name}.{rank}.pt", weights_only=False) for rank in range(RANKS)]

    def gradients(self, name, step=0):
        """Whole gradients by parameter: the shards of tensor parallelism joined, all pipeline stages together."""
        shards = {}
        for run in self.ranks(name):
            tp_rank, gradients = run["gradients"][step]
            for parameter, (gradient, dim) in gradients.items():
                shards.setdefault((parameter, dim), {}).setdefault(tp_rank if dim >= 0 else 0, gradient)
        return {
            parameter: torch.cat([parts[rank] for rank in sorted(parts)], dim) if dim >= 0 else parts[0]
            for (parameter, dim), parts in shards.items()
        }

    def losses(self, name):
        """The losses of each step, from a rank that knows them."""
        return next(run["losses"] for run in self.ranks(name) if run["losses"][0])


def run_scenarios(scenarios, folder, import_path=(), base=BASE):
    """Starts the worker; its output is shown if it fails. ``import_path``: folders that it imports from first."""
    file = folder / "scenarios.json"
    lines = {name: f"{base} {options}".replace("FOLDER", str(folder)) for name, options in scenarios.items()}
    file.write_text(json.dumps({name: line.split() for name, line in lines.items()}))
    root = str(Path(__file__).parents[2])
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*import_path, root, *sys.path[1:]]),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(WORKER)]
    done = subprocess.run(
        [*command, str(file), str(folder)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20000:]
    (folder / "log").write_text(done.stdout)
    return Runs(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_scenarios(SCENARIOS, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def full_runs(tmp_path_factory):
    return run_scenarios(FULL_SCENARIOS, tmp_path_factory.mktemp("full_runs"))


def assert_same_gradients(runs, name, reference, step=0, bound=BOUND):
    ours, theirs = runs.gradients(name, step), runs.gradients(reference, step)
    assert ours.keys() == theirs.keys()
    for parameter, gradient in theirs.items():
        assert gradient.norm() > 0, parameter
        error = float((ours[parameter] - gradient).norm() / gradient.norm())
        assert error <= bound, f"{name} against {reference}: {parameter} differs by {error:.1e}"


def assert_same_losses(runs, name, reference, bound=1e-6):
    for ours, theirs in zip(runs.losses(name), runs.losses(reference), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(ours[key] == pytest.approx(theirs[key], rel=bound) for key in theirs)


SPLITS = ["cp4", "cp4_hierarchical", "cp4_dense", "cp4_convert", "dp2_cp2", "tp2_cp2", "pp2_cp2"]


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_has_the_gradients_of_one_rank(runs, name):
    assert_same_gradients(runs, name, "dp4")
    assert_same_losses(runs, name, "dp4")


@pytest.mark.parametrize("name", ["sparse_cp4", "sparse_hierarchical"])
def test_sparse_gradients_do_not_depend_on_the_ranks(runs, name):
    for step in (0, 1):
        assert_same_gradients(runs, name, "sparse_dp4", step)
    assert_same_losses(runs, name, "sparse_dp4")


@pytest.mark.parametrize(
    ("name", "layers", "micro_batches"),
    [("dp4", 2, 1), ("cp4_hierarchical", 2, 4), ("tp2_cp2", 2, 4), ("pp2_cp2", 1, 4), ("mtp_cp4", 3, 4)],
)
def test_every_layer_and_micro_batch_goes_through_the_plugin(runs, name, layers, micro_batches):
    """Case K2: no layer silently keeps another backend."""
    assert [len(run["indices"]) for run in runs.ranks(name)] == [layers * micro_batches] * RANKS


def test_the_sparse_runs_are_sparse(runs):
    dense, sparse = runs.gradients("cp4"), runs.gradients("sparse_cp4")
    assert max(float((sparse[name] - dense[name]).norm() / dense[name].norm()) for name in dense) > 1e-2


@pytest.mark.parametrize("name", ["sparse_cp4", "sparse_hierarchical", "sparse_full_recompute"])
def test_every_rank_selects_the_same_lines(runs, name):
    first, *others = (run["indices"] for run in runs.ranks(name))
    assert first
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", ["sparse_full_recompute", "sparse_selective_recompute"])
def test_recompute_selects_the_same_lines_and_gives_the_same_bits(runs, name):
    """Case E1."""
    plain, recomputed = runs.ranks("sparse_cp4")[0], runs.ranks(name)[0]
    first_pass = Counter(index for index, has_grad in recomputed["indices"] if not has_grad)
    second_pass = Counter(index for index, has_grad in recomputed["indices"] if has_grad)
    assert first_pass == second_pass == Counter(index for index, _ in plain["indices"])
    for step in (0, 1):
        ours, theirs = runs.gradients(name, step), runs.gradients("sparse_cp4", step)
        assert all(torch.equal(ours[parameter], theirs[parameter]) for parameter in theirs)


def test_evaluation_between_steps_changes_nothing(runs):
    """Case A3."""
    plain, evaluated = runs.ranks("sparse_cp4")[0], runs.ranks("sparse_evaluated")[0]
    assert evaluated["validation"]
    assert plain["losses"] == evaluated["losses"]
    assert [index for index in evaluated["indices"] if index[1]] == plain["indices"]
    ours, theirs = runs.gradients("sparse_evaluated", 1), runs.gradients("sparse_cp4", 1)
    assert all(torch.equal(ours[parameter], theirs[parameter]) for parameter in theirs)


def test_evaluation_loss_does_not_depend_on_the_ranks(runs):
    """Case A3: not cp_size times the true one."""
    losses = [runs.ranks(name)[-1]["validation"] for name in ("cp4", "dp2_cp2")]
    assert losses[0] and losses[0][0]["lm loss"] > 1
    for ours, theirs in zip(*losses, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_multi_token_prediction_converts_exactly(runs):
    """Case G2: Megatron's roll needs its zigzag; conversion around attention leaves it that.

    Megatron divides the loss of the extra head by each rank's own number of tokens, so it differs a little from cp 1.
    """
    assert_same_gradients(runs, "mtp_cp4", "mtp_zigzag")
    assert_same_losses(runs, "mtp_cp4", "mtp_zigzag")
    assert_same_losses(runs, "mtp_cp4", "mtp_dp4", bound=1e-3)


def test_hybrid_models_from_a_users_spec(runs):
    assert len(runs.ranks("hybrid_cp4")[0]["indices"]) == 4 * 2  # micro-batches, attention layers
    assert_same_gradients(runs, "hybrid_cp4", "hybrid_dp4")
    assert_same_losses(runs, "hybrid_cp4", "hybrid_dp4")


def test_loss_per_token_over_ranks_with_unequal_numbers_of_tokens(runs):
    """Case A2: the last rank holds every valid token."""
    assert_same_gradients(runs, "masked_cp4", "masked_dp4")
    assert_same_losses(runs, "masked_cp4", "masked_dp4")


def test_layers_are_numbered_over_the_whole_model(runs):
    """Interleaved pipeline stages: the layer that is dense, and those with a top-p of their own, are the same ones."""
    assert_same_gradients(runs, "plan_interleaved_cp2", "plan_dp4")
    assert_same_losses(runs, "plan_interleaved_cp2", "plan_dp4")
    log = (runs.folder / "log").read_text()
    assert "> megatron_mtraining: layers 3 dense; top-p 0.6 in layer 1, 0.6 in layer 2" in log


@pytest.mark.parametrize("name", ["guarded_cp4", "guarded_full_recompute"])
def test_the_guard_decides_alike_on_every_rank_and_in_recompute(runs, name):
    assert_same_gradients(runs, name, "guarded_dp4")
    first, *others = (run["indices"] for run in runs.ranks(name))
    assert all(other == first for other in others)
    plain, own = runs.ranks("guarded_cp4")[0]["indices"], runs.ranks(name)[0]["indices"]
    assert {index for index, _ in own} == {index for index, _ in plain}
    assert "guard: layer 0 went dense in" in (runs.folder / "log").read_text()


def test_chosen_indices_are_written(runs):
    """One file for the chosen iteration and layer, with the very index of that step's first call."""
    [path] = (runs.folder / "dump").iterdir()
    assert path.name == "iteration0000002_layer001_tp0_dp0.pt"
    index, about = load_index(path)
    assert (about["iteration"], about["layer"]) == (2, 1)
    words = torch.cat([index.slash_words.flatten(), index.column_words.flatten()])
    layers, micro_batches = 2, 4
    recorded = runs.ranks("dumped_cp4")[0]["indices"][layers * micro_batches + 1][0]
    assert hashlib.sha256(words.numpy().tobytes()).hexdigest() == recorded


@pytest.mark.parametrize("name", ["packed_cp4", "packed_cp4_convert", "packed_pp2_cp2"])
def test_packed_conversations(runs, name):
    """Megatron's fine-tuning data, several conversations a sample, each with its own index."""
    for step, bound in ((0, BOUND), (1, 3 * BOUND)):  # the second step starts from weights that differ in the last bits
        assert_same_gradients(runs, name, "packed_dp4", step, bound)
    assert_same_losses(runs, name, "packed_dp4")


def test_attention_leaves_the_random_state_alone(runs):
    """Case K3."""
    for name in ("cp4", "tp2_cp2", "sparse_selective_recompute"):
        assert [run["random_state_moved"] for run in runs.ranks(name)] == [0] * RANKS


def test_what_was_chosen_is_in_the_log(runs):
    log = (runs.folder / "log").read_text()
    assert "> megatron_mtraining: layout striped, native: nothing else relies on Megatron's zigzag layout" in log
    assert "> megatron_mtraining: layout striped, convert: --mtp-num-layers" in log
    assert "hierarchical ring, inner size 2 (--hierarchical-context-parallel-sizes 2 2), 2 communicators made" in log


FULL_PAIRS = [
    ("cp4_zigzag", "dp4"),
    ("cp4_contiguous", "dp4"),
    ("cp4_stripes_of_128", "dp4"),
    ("cp4_gathered_again", "dp4"),
    ("batch2", "dp4"),
    ("yarn_cp4", "yarn_dp4"),
    ("learned_cp4", "learned_dp4"),
    ("experts_cp4", "experts_dp4"),
    ("sparse_convert", "sparse_dp4"),
    ("masked_dp2_cp2", "masked_dp4"),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "reference"), FULL_PAIRS)
def test_more_splits(full_runs, name, reference):
    assert_same_gradients(full_runs, name, reference)
    assert_same_losses(full_runs, name, reference)


@pytest.mark.full
@pytest.mark.parametrize("saved", ["sparse", "dense"])
def test_checkpoints_pass_between_backends_and_splits(full_runs, saved):
    """Case L1: both backends resume from either's checkpoint, at another context-parallel size, and go on alike."""
    assert_same_gradients(full_runs, f"sparse_from_{saved}", f"dense_from_{saved}")
    assert_same_losses(full_runs, f"sparse_from_{saved}", f"dense_from_{saved}")


@pytest.mark.full
def test_distributed_optimizer(full_runs):
    assert_same_losses(full_runs, "distributed_optimizer", "dp4")


@pytest.mark.full
def test_evaluation_loss_equals_one_rank(full_runs):
    losses = [full_runs.ranks(name)[-1]["validation"] for name in ("dp4", "cp4_contiguous")]
    assert losses[0] and losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
