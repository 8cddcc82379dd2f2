"""Training runs: recipes through examples/nemo/run_recipe.py, and Bridge alone from the config that they saved."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from .session import Session, watch
from .small import ON_CPU, Sizes

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "nemo" / "run_recipe.py"
EVERY_LINE = ["mtraining.top_p=1", "mtraining.max_vertical=none"]
ON_GPU = [
    "optimizer.optimizer_cpu_offload=false",
    "optimizer.optimizer_offload_fraction=0.0",
    "optimizer.use_precision_aware_optimizer=false",
    "optimizer.overlap_cpu_optimizer_d2h_h2d=false",
]
"""The optimizer's state on the GPU, where a recipe has it on the CPU."""


def sizes(session: Session) -> Sizes:
    """Sizes of the small models."""
    return ON_CPU if session.cpu else Sizes()


def seq_length(session: Session) -> int:
    """Tokens of a sequence in the small runs."""
    return 512 if session.cpu else 8192


def small_words(session: Session, steps: int) -> list[str]:
    """Overrides that make a recipe's model small and its run short, on one rank."""
    own = sizes(session)
    return [
        f"model.num_layers={own.layers}",
        f"model.hidden_size={own.hidden}",
        f"model.ffn_hidden_size={own.feed_forward}",
        f"model.num_attention_heads={own.heads}",
        f"model.num_query_groups={own.groups}",
        "model.kv_channels=128",
        f"model.vocab_size={own.vocabulary}",
        f"tokenizer.vocab_size={own.vocabulary - 1}",
        f"model.seq_length={seq_length(session)}",
        "model.context_parallel_size=1",
        "model.cross_entropy_loss_fusion=false",  # its first step is long: Inductor tries kernels with logits on the host
        *short_words(steps),
    ]


def short_words(steps: int, batch: int = 2) -> list[str]:
    """Overrides for a run of a few steps that saves and loads nothing."""
    return [
        f"train.train_iters={steps}",
        f"train.global_batch_size={batch}",
        "validation.eval_iters=0",
        "scheduler.lr_warmup_iters=1",
        "checkpoint.load=null",
        "checkpoint.save=null",
        "logger.tensorboard_dir=null",
        "dataset.num_workers=1",
    ]


def saving(session: Session, run: str, steps: int) -> list[str]:
    """Overrides with which a run saves after its last step."""
    folder = session.work / run / "checkpoints"
    return [
        f"checkpoint.save={folder}",
        f"checkpoint.save_interval={steps}",
        "checkpoint.async_save=false",
        f"logger.save_config_filepath={session.work / run / 'config.yaml'}",
    ]


def recipe(session: Session, name: str, run: str, words: list[str], tokens: torch.Tensor | None = None) -> Path:
    """Trains a recipe as the page starts it; returns the folder of its checkpoints."""
    watch(session, run, tokens)
    (session.work / run).mkdir(parents=True, exist_ok=True)  # Bridge makes none for the config that it saves
    metrics = session.out / f"{session.part}-{run}-metrics.jsonl"
    metrics.unlink(missing_ok=True)
    kept = sys.argv
    sys.argv = ["run_recipe.py", name, "--metrics", str(metrics), *words]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.argv = kept
    if session.rank == 0:
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        shown = ("step", "density", "recall", "imbalance_ranks", "tokens_per_second", "estimation_share", "layout")
        session.say(run=run, logged=[{k: line[k] for k in shown if k in line} for line in (lines[0], lines[-1])])
    return session.work / run / "checkpoints"


def bridge_alone(
    session: Session, file: Path, run: str, changes: dict[str, Any], tokens: torch.Tensor | None = None
) -> None:
    """Bridge's own training from a saved config, with changes to its fields (`checkpoint.load` ...); nothing of ours.

    Raises:
        ValueError: if the saved config names this package.
    """
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.gpt_step import forward_step

    for saved in (file, *sorted((file.parent / "checkpoints").rglob("run_config.yaml"))):
        if "megatron_mtraining" in saved.read_text():
            raise ValueError(f"{saved} names megatron_mtraining")
    cfg = ConfigContainer.from_yaml(str(file))
    for path, value in changes.items():
        section, name = path.split(".")
        setattr(getattr(cfg, section), name, value)
    watch(session, run, tokens)
    import megatron.bridge.training.pretrain as loop

    loop.pretrain(cfg, forward_step)
    loaded = [name for name, module in sys.modules.items() if name.startswith("megatron_mtraining") and module]
    session.say(run=run, modules_of_ours=len(loaded))
