"""Trains a tiny recipe with Bridge's own loop, as one rank of `torchrun`. Writes a line of JSON per step to report.jsonl.

torchrun --nproc-per-node 2 -m tests.bridge.training_worker '{"context_parallel": 2, "options": {"top_p": 1.0}}'
"""

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

from . import on_cpu

SEQ_LENGTH = 512
STEPS = 3
REPORT = "report.jsonl"


def tiny_qwen(seq_length: int, folder: Path, context_parallel: int = 1) -> Any:
    """The Qwen2.5 recipe, with a model of two small layers and few tokens; YaRN as in the large one."""
    from megatron_mtraining.bridge.recipes import long_context, qwen25

    small = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": seq_length // 4,
    }
    long_context.RUNS = folder
    spread = long_context.Spread(seq_length, context_parallel, global_batch=2, full_recompute=False)
    cfg = long_context.pretrain_recipe(qwen25.QWEN25_3B | small, spread, "tiny")
    cfg.train.train_iters = STEPS
    cfg.validation.eval_interval = 2
    cfg.scheduler.lr_warmup_iters = 1
    cfg.optimizer.lr = cfg.optimizer.min_lr = 1e-3
    cfg.checkpoint.save = cfg.checkpoint.load = None
    cfg.logger.tensorboard_dir = None
    return on_cpu.prepare(cfg)


def report(folder: Path, **values: Any) -> None:
    """A line of JSON from rank 0, all ranks having the same; standard output is shared with others."""
    if os.environ["RANK"] == "0":
        with (folder / REPORT).open("a") as file:
            file.write(json.dumps(values) + "\n")


def main() -> None:
    """Trains as the JSON of the command line says."""
    from megatron.core import parallel_state

    on_cpu.activate()
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from megatron_mtraining.bridge import MTrainingCallback, apply_overrides
    from megatron_mtraining.integration import runtime

    job = json.loads(sys.argv[1])
    folder = Path(job["folder"])
    cfg = tiny_qwen(SEQ_LENGTH, folder, job.get("context_parallel", 1))
    if job.get("save"):
        cfg.checkpoint.save = str(folder / "checkpoints")
        cfg.checkpoint.save_interval = STEPS
        cfg.checkpoint.async_save = False
        cfg.logger.save_config_filepath = str(folder / "config.yaml")
    apply_overrides(cfg, job.get("overrides", []))
    if job.get("copied"):
        cfg = copy.deepcopy(cfg)
    pretrain(cfg, forward_step, callbacks=[MTrainingCallback(folder / "metrics.jsonl"), report_losses(folder)])
    report(folder, ended=not runtime.is_set_up(), groups_gone=not parallel_state.is_initialized())


def report_losses(folder: Path) -> Any:
    """A callback that reports what Bridge itself measured; its class can only be made once Bridge is imported."""
    from megatron.bridge.training.callbacks import Callback, CallbackContext

    class Losses(Callback):
        def on_train_step_end(self, context: CallbackContext) -> None:
            loss = float((context.loss_dict or {})["lm loss"])
            report(folder, loss=loss, grad_norm=float(context.grad_norm or 0))

        def on_eval_end(self, context: CallbackContext) -> None:
            report(folder, eval=float((context.total_loss_dict or {})["lm loss"]))

    return Losses()


if __name__ == "__main__":
    main()
