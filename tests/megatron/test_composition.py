"""What the plugin is combined with in Megatron's training loop, over 4 processes; the smaller set is in test_training.py.

Each scenario must have the gradients (or, where the optimizer holds shards of them, the losses) of its reference, which is
Megatron's data parallelism alone.
"""

from __future__ import annotations

import pytest
import torch

from .test_training import (
    ALL,
    BASE,
    CP2,
    CP4,
    FULL_RECOMPUTE,
    GUARDED,
    PACKED,
    ROPE,
    SPARSE,
    assert_same_gradients,
    assert_same_losses,
    run_scenarios,
)

pytestmark = pytest.mark.full

TWO_STEPS = f"{ROPE} {ALL} --train-iters 2"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce"
MTP = f"{ROPE} {ALL} --mtp-num-layers 1"
# Weights are set by name, and experts are named by their place on a rank: so the same ranks hold the same experts in both.
EXPERTS = (
    f"{ROPE} {ALL} --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type allgather"
)
NORMED = f"{ROPE} {ALL} --qk-layernorm"
DEEP = f"{ROPE} --num-layers 8"
DROPOUT = f"{SPARSE} {CP2} --tensor-model-parallel-size 2 --hidden-dropout 0.1"
SCHEDULE = f"{ROPE} --mtraining-top-p-schedule 1:0.5:2 --train-iters 3"
CHECKPOINT = "--ckpt-format torch_dist"
STOPPED = f"--mtraining-guard-action stop --lr-decay-iters 10 --save-interval 100 --save FOLDER/stopped {CHECKPOINT}"

TP2 = "--tensor-model-parallel-size 2"
# One key head for two or four tensor-parallel ranks: each has a copy.
ONE_GROUP = f"{ROPE} {ALL} --num-query-groups 1 --make-vocab-size-divisible-by 32"
AROUND = f"{ROPE} {ALL} --attention-output-gate --no-rope-freq 2 --use-mup --mup-base-hidden-size 32"
HYBRID_MTP = (
    f"{ROPE} --mtraining-top-p 0.5 --hybrid-layer-pattern *-*-/-* --mtraining-dense-layers 5 "
    f"--spec user_specs predicting_stack_spec {CP4}"
)

SCENARIOS = {
    "dp4": TWO_STEPS,
    "no_accumulation": f"{TWO_STEPS} {CP4} --micro-batch-size 4",
    "overlapped_gradients": f"{TWO_STEPS} {CP2} --overlap-grad-reduce",
    "overlapped_gather": f"{TWO_STEPS} {CP2} {ZERO} --overlap-param-gather",
    "hierarchical_optimizer": f"{TWO_STEPS} {CP4} --hierarchical-context-parallel-sizes 2 2 {ZERO}",
    "deterministic": f"{TWO_STEPS} {CP4} --deterministic-mode",
    "experts_dp4": EXPERTS,
    "experts_cp2": f"{EXPERTS} {CP2}",
    "normed_dp4": NORMED,
    "normed_cp4": f"{NORMED} {CP4}",
    "mtp_dp4": MTP,
    "mtpmean_cp4": f"{MTP} {CP4}",
    "mtpmean_zigzag": f"{MTP} {CP4} --mtraining-layout zigzag",
    "guarded_dp4": GUARDED,
    "guarded_tp2_cp2": f"{GUARDED} {CP2} --tensor-model-parallel-size 2",
    "stopped_cp4": f"{GUARDED} {CP4} {STOPPED}",
    "packed_dp4": PACKED,
    "packed_tp2_cp2": f"{PACKED} {CP2} --tensor-model-parallel-size 2",
    "packed_full_recompute": f"{PACKED} {CP4} {FULL_RECOMPUTE}",
    "packed_samples2": f"{PACKED} {CP2} --micro-batch-size 2",
    "packed_hierarchical": f"{PACKED} {CP4} --hierarchical-context-parallel-sizes 2 2",
    "scheduled": f"{SCHEDULE} {CP4} --save-interval 1 --save FOLDER/scheduled {CHECKPOINT}",
    "resumed": f"{SCHEDULE} {CP2} --load FOLDER/scheduled --ckpt-step 2 {CHECKPOINT}",
    "sparse_selective": f"{SPARSE} {CP4} --recompute-granularity selective --recompute-modules core_attn mlp",
    "sparse_dp4": SPARSE,
    "deep_dp4": f"{DEEP} {ALL}",
    "deep_cp2": f"{DEEP} {ALL} {CP2}",
    "groups_dp4": ONE_GROUP,
    "groups_tp2_cp2": f"{ONE_GROUP} {CP2} --tensor-model-parallel-size 2",
    "groups_tp4": f"{ONE_GROUP.replace('-by 32', '-by 8')} --tensor-model-parallel-size 4",
    "around_dp4": AROUND,
    "around_cp4": f"{AROUND} {CP4}",
    "around_tp2_cp2": f"{AROUND} {CP2} --tensor-model-parallel-size 2",
    "hybrid_mtp_cp4": HYBRID_MTP,
    "hybrid_mtp_zigzag": f"{HYBRID_MTP} --mtraining-layout zigzag",
    "dropout_tp2_cp2": DROPOUT,
    "dropout_recomputed": f"{DROPOUT} {FULL_RECOMPUTE}",
}

PAIRS = [
    ("no_accumulation", "dp4"),
    ("overlapped_gradients", "dp4"),
    ("deterministic", "dp4"),
    ("experts_cp2", "experts_dp4"),
    ("normed_cp4", "normed_dp4"),
    ("guarded_tp2_cp2", "guarded_dp4"),
    ("packed_tp2_cp2", "packed_dp4"),
    ("packed_full_recompute", "packed_dp4"),
    ("packed_samples2", "packed_dp4"),
    ("packed_hierarchical", "packed_dp4"),
    ("sparse_selective", "sparse_dp4"),
    ("groups_tp2_cp2", "groups_dp4"),
    ("groups_tp4", "groups_dp4"),
    ("around_cp4", "around_dp4"),
    ("around_tp2_cp2", "around_dp4"),
    ("hybrid_mtp_cp4", "hybrid_mtp_zigzag"),  # not one rank: Megatron divides by each rank's own tokens, see below
    ("deep_cp2", "deep_dp4"),  # case C3: nothing piles up over the layers
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_scenarios(SCENARIOS, tmp_path_factory.mktemp("composition"))


@pytest.mark.parametrize(("name", "reference"), PAIRS)
def test_gradients_are_those_of_data_parallelism_alone(runs, name, reference):
    assert_same_gradients(runs, name, reference)
    assert_same_losses(runs, name, reference)


def test_latent_attention(tmp_path):
    """With equal head dimensions; plain rotary embedding and YaRN, dealt natively.

    Tensor parallelism alone is the reference of what has it: without sequence parallelism Megatron's latent attention
    gives gradients of its own then, in the embedding say, whatever the core attention.
    """
    options = (
        f"--position-embedding-type rope {ALL} --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 "
        "--qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 16"
    )
    scenarios = {
        f"{kind}_{split}": f"{options} --rope-type {kind} {words}"
        for kind in ("rope", "yarn")
        for split, words in {"dp4": "", "cp4": CP4, "tp2": TP2, "tp2_cp2": f"{CP2} {TP2}"}.items()
    }
    base = BASE.replace("--group-query-attention --num-query-groups 2 ", "")
    runs = run_scenarios(scenarios, tmp_path, base=base)
    for kind in ("rope", "yarn"):
        for split, reference in (("cp4", "dp4"), ("tp2_cp2", "tp2")):
            assert_same_gradients(runs, f"{kind}_{split}", f"{kind}_{reference}")


def test_dropout_around_attention_draws_the_same_numbers_in_recompute(runs):
    """Case K3: attention moves no random state, so the second pass of a layer has the masks of the first."""
    plain, recomputed = runs.ranks("dropout_tp2_cp2"), runs.ranks("dropout_recomputed")
    assert [run["random_state_moved"] for run in plain + recomputed] == [0] * 2 * len(plain)
    for step in (0, 1):
        ours, theirs = runs.gradients("dropout_recomputed", step), runs.gradients("dropout_tp2_cp2", step)
        assert all(torch.equal(ours[parameter], theirs[parameter]) for parameter in theirs)
    undropped = runs.gradients("sparse_dp4")
    assert not all(
        torch.allclose(theirs, undropped[name]) for name, theirs in runs.gradients("dropout_tp2_cp2").items()
    )


@pytest.mark.parametrize("name", ["overlapped_gather", "hierarchical_optimizer"])
def test_losses_with_a_sharded_optimizer(runs, name):
    """The second step's loss shows what the first one did to the weights."""
    assert_same_losses(runs, name, "dp4")


@pytest.mark.parametrize("name", ["mtpmean_cp4", "mtpmean_zigzag"])
def test_the_loss_of_multi_token_prediction_differs_by_megatrons_own_count(runs, name):
    """Megatron divides it by each rank's own number of tokens, and the rank with the end of the sequence has one less.

    With the mean over the ranks in its place, gradients equal those of one rank, in Megatron's own layout as in ours.
    """
    assert_same_gradients(runs, name, "mtp_dp4")


def test_a_schedule_goes_on_after_a_resume(runs):
    """The third step of a run that was resumed after the second, on another number of ranks."""
    assert_same_gradients_of_steps(runs, ("resumed", 0), ("scheduled", 2))


def assert_same_gradients_of_steps(runs, ours, theirs):
    first, second = runs.gradients(*ours), runs.gradients(*theirs)
    for parameter, gradient in second.items():
        error = float((first[parameter] - gradient).norm() / gradient.norm())
        assert error <= 1e-4, f"{ours} against {theirs}: {parameter} differs by {error:.1e}"


def test_the_guard_stops_the_run_with_a_checkpoint(runs):
    """After the first step, on all ranks, in Megatron's own orderly way."""
    for run in runs.ranks("stopped_cp4"):
        assert len(run["losses"]) == 1
        assert run["exit_code"] == 0
    assert (runs.folder / "stopped" / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert "> megatron_mtraining: guard: stopping after iteration 1" in (runs.folder / "log").read_text()
