"""Runs Megatron's training loop through the launcher, once per scenario, one process per rank, and dumps what it did.

Started by torchrun with a file of scenarios and an output folder. A scenario is a list of command-line options; all of
them run in the same processes, because importing Megatron takes most of the time. Weights are set from the parameters'
global names, so that every split of the model over ranks starts from the same numbers.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
import sys
import zlib
from pathlib import Path

import torch

from megatron_mtraining import launch
from megatron_mtraining.integration import cpu_compat

SCRIPTS = {
    "gpt": Path(__file__).parents[2] / "examples" / "pretrain_gpt.py",
    "hybrid": Path(__file__).with_name("pretrain_hybrid.py"),
    "packed": Path(__file__).with_name("pretrain_packed.py"),
}
"""The script of a scenario by the first word of its name; ``gpt`` for any other."""


class Record:
    """What one scenario did on this rank."""

    def __init__(self):
        self.gradients = []
        self.losses = []
        self.validation = []
        self.indices = []
        self.random_state_moved = 0
        self.exit_code = None


record = Record()


def global_names(models):
    """(name, parameter) with layers numbered over the whole model, whatever pipeline stage holds them."""
    for model in models:
        numbers = {
            name: module.layer_number - 1 for name, module in model.named_modules() if re.search(r"layers\.\d+$", name)
        }
        for name, parameter in model.named_parameters():
            layer = re.match(r"(?P<stack>.*layers\.)\d+", name)
            if layer and layer.group() in numbers:
                name = f"{layer['stack']}{numbers[layer.group()]}{name[layer.end() :]}"
            yield name.removeprefix("module."), parameter


def set_weights(models):
    """Every parameter from its global name: the same full tensor whatever the split."""
    from megatron.core import parallel_state

    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in global_names(models):
        shape, dim = list(parameter.shape), getattr(parameter, "partition_dim", -1)
        split = getattr(parameter, "tensor_model_parallel", False) and tp > 1
        if split:
            shape[dim] *= tp
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        full = torch.randn(shape, generator=generator) * (0.3 if parameter.dim() > 1 else 0.1)
        if "norm" in name and name.endswith("weight"):
            full += 1.0
        with torch.no_grad():
            parameter.copy_(full.chunk(tp, dim)[rank] if split else full)


def dump_gradients(models):
    """The gradients that the optimizer is about to use, with the dimension that tensor parallelism splits (or -1)."""
    from megatron.core import parallel_state

    gradients = {}
    for name, parameter in global_names(models):
        split = getattr(parameter, "tensor_model_parallel", False)
        gradients[name] = (parameter.main_grad.clone(), parameter.partition_dim if split else -1)
    record.gradients.append((parallel_state.get_tensor_model_parallel_rank(), gradients))


def watch():
    """Puts the recorder in Megatron's training loop and in core attention."""
    from megatron.training import training

    from megatron_mtraining.integration import core_attention

    make_optimizer, evaluate, train_step = training.get_megatron_optimizer, training.evaluate, training.train_step
    attend = core_attention.attention_on_groups

    def get_megatron_optimizer(config, models, *args, **kwargs):
        set_weights(models)
        optimizer = make_optimizer(config, models, *args, **kwargs)
        step = optimizer.step

        def dumping_step(*a, **k):
            dump_gradients(models)
            return step(*a, **k)

        optimizer.step = dumping_step
        optimizer.reload_model_params()
        return optimizer

    def watched_evaluate(*args, **kwargs):
        result = evaluate(*args, **kwargs)
        record.validation.append({key: float(value) for key, value in (result[0] or {}).items()})
        return result

    def watched_train_step(*args, **kwargs):
        result = train_step(*args, **kwargs)
        record.losses.append({key: float(value) for key, value in result[0].items()})
        return result

    def watched_attention(*args, **kwargs):
        before = torch.get_rng_state()
        out, aux = attend(*args, **kwargs)
        record.random_state_moved += not torch.equal(before, torch.get_rng_state())
        words = torch.cat([aux.index.slash_words.flatten(), aux.index.column_words.flatten()])
        record.indices.append((hashlib.sha256(words.numpy().tobytes()).hexdigest(), torch.is_grad_enabled()))
        return out, aux

    training.get_megatron_optimizer = get_megatron_optimizer
    training.evaluate = watched_evaluate
    training.train_step = watched_train_step
    core_attention.attention_on_groups = watched_attention


def mask_losses(is_masked):
    """Lets only the last quarter of each sample count, so that ranks hold different numbers of valid tokens."""
    from megatron.core.datasets.gpt_dataset import MockGPTDataset

    get = MockGPTDataset.__getitem__

    def masked(self, index):
        sample = get(self, index)
        if is_masked():
            sample["loss_mask"] = sample["loss_mask"].clone()
            sample["loss_mask"][: sample["loss_mask"].numel() * 3 // 4] = 0
        return sample

    MockGPTDataset.__getitem__ = masked


def count_predicted_tokens_over_ranks(is_counted):
    """Lets multi-token prediction divide by the ranks' mean number of tokens; Megatron takes each rank's own."""
    from megatron.core.transformer import multi_token_prediction

    roll = multi_token_prediction.roll_tensor

    def counted(tensor, *args, cp_group=None, **kwargs):
        rolled, number = roll(tensor, *args, cp_group=cp_group, **kwargs)
        if is_counted() and cp_group is not None and cp_group.size() > 1:
            number = number.double()
            torch.distributed.all_reduce(number, group=cp_group)
            number = number / cp_group.size()
        return rolled, number

    multi_token_prediction.roll_tensor = counted


def forget_megatron():
    """Ends Megatron's state of a run, so that the next can start in the same process."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training.global_vars import destroy_global_vars

    parallel_state.destroy_model_parallel()
    destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()
    destroy_global_vars()
    gc.collect()


def main(scenario_file, folder):
    global record
    cpu_compat.activate()
    watch()
    name = ""
    mask_losses(lambda: name.startswith("masked"))
    count_predicted_tokens_over_ranks(lambda: name.startswith("mtpmean"))
    for name, options in json.loads(Path(scenario_file).read_text()).items():
        record = Record()
        script = SCRIPTS.get(name.split("_")[0], SCRIPTS["gpt"])
        try:
            launch.main([str(script), "--mtraining-cpu", *options])
        except SystemExit as end:  # Megatron's early exit; anything refused has a message instead of a code
            if end.code not in (None, 0):
                raise
            record.exit_code = end.code or 0
        torch.save(vars(record), Path(folder) / f"{name}.{torch.distributed.get_rank()}.pt")
        forget_megatron()


if __name__ == "__main__":
    main(*sys.argv[1:])
