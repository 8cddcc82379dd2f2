"""Lengths that change within a run, and process groups that are made anew in the same process."""

from __future__ import annotations

import torch
from megatron.core import parallel_state, utils

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.integration import runtime
from megatron_mtraining.integration.groups import count_made

from .ranks import run_ranks
from .test_packing import VOCAB, assert_same, build, losses_and_gradients, megatron, without_cuda

CONFIG = MTrainingConfig(top_p=0.8)
TRAINING, EVALUATION = 1024, 256


def plain_batch(length):
    tokens = torch.randint(0, VOCAB, (1, length + 1), generator=torch.Generator().manual_seed(length))
    position = torch.arange(length)[None]
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(1, length),
        "position_ids": position,
    }


def step_and_evaluation(cp_size):
    """Loss and gradients of a training step, and the loss of an evaluation at a quarter of the length after it."""
    group = parallel_state.get_context_parallel_group()
    model = build(cp_size)

    def dealt(length):
        return utils.get_batch_on_this_cp_rank(plain_batch(length), is_hybrid_cp=False, cp_group=group)

    found = losses_and_gradients(model, [(dealt(TRAINING), None)])
    batch = dealt(EVALUATION)
    with torch.no_grad():
        model.eval()
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        loss = losses.float().sum()
    torch.distributed.all_reduce(loss, group=group)
    return found | {"evaluation": loss}


def _groups_made_anew(_):
    """Twice on two ranks, with Megatron's groups destroyed and made again in between: the numbers of one rank."""
    without_cuda()
    with megatron(1, CONFIG):
        alone = step_and_evaluation(1)
    for attempt in (1, 2):
        with megatron(2, CONFIG):
            assert_same(step_and_evaluation(2), alone, f"attempt {attempt}")
            assert count_made() == 1
        assert count_made() == 0  # destroyed with Megatron's
        assert not runtime.is_set_up()


def test_groups_made_anew_and_another_length_in_evaluation(tmp_path):
    """Cases A3 and D4: an evaluation at another length; no communicator is left behind by a restart in the process."""
    run_ranks([_groups_made_anew], 2, tmp_path)
