"""The parts that two GPUs run under `torchrun`: context, tensor and pipeline parallelism, and a recipe at its size."""

from __future__ import annotations

from pathlib import Path

from .runs import EVERY_LINE, ON_GPU, bridge_alone, recipe, saving, seq_length, short_words, small_words
from .session import Session

STEPS = 8
LONG = "qwen25_3b_pretrain_8gpu_128k_config"
TENSOR = "llama31_8b_pretrain_2gpu_16k_config"
CONTEXT = ["model.context_parallel_size=2"]
ONE_BY_ONE = ["model.context_parallel_size=1"]


def _words(session: Session, run: str, *more: str) -> list[str]:
    """A small model from random weights, saved config; a rank that waits for one that failed gives up after a minute."""
    twice = f"model.seq_length={2 * seq_length(session)}"
    config = f"logger.save_config_filepath={session.work / run / 'config.yaml'}"
    return [*small_words(session, STEPS), twice, config, "dist.distributed_timeout_minutes=1", *more]


def context_part(session: Session) -> None:
    """Context parallelism: native, converted, decentralized groups; data parallelism beside it."""
    native = _words(session, "cp2-p1", *CONTEXT, *saving(session, "cp2-p1", STEPS), *EVERY_LINE)
    session.attempt(recipe, LONG, "cp2-p1", native)
    _mark(session, "cp2")
    groups = ["dist.use_decentralized_pg=true", "dist.use_gloo_process_groups=false"]
    free = _words(session, "cp2-decentralized", *CONTEXT, *EVERY_LINE, *groups)
    session.attempt(recipe, LONG, "cp2-decentralized", free)
    session.attempt(recipe, LONG, "dp2-p1", _words(session, "dp2-p1", *ONE_BY_ONE, *EVERY_LINE))
    session.attempt(recipe, LONG, "cp2-p0.9", _words(session, "cp2-p0.9", *CONTEXT))
    converted = _words(session, "cp2-convert", *CONTEXT, *EVERY_LINE, "mtraining.layout_mode=convert")
    session.attempt(recipe, LONG, "cp2-convert", converted)
    session.say(ended=True)


def tensor_part(session: Session) -> None:
    """Tensor parallelism with sequence parallelism, the optimizer on the CPU as in the recipe, then pipeline stages."""
    session.attempt(recipe, TENSOR, "tp2-p1", _words(session, "tp2-p1", *EVERY_LINE, *([] if session.cpu else ON_GPU)))
    _mark(session, "tp2")
    stages = ["model.pipeline_model_parallel_size=2", "model.pipeline_dtype=torch.bfloat16", *ONE_BY_ONE]
    session.attempt(recipe, LONG, "pp2-p1", _words(session, "pp2-p1", *stages, *EVERY_LINE))
    session.attempt(recipe, TENSOR, "tp2-p0.9", _words(session, "tp2-p0.9", *([] if session.cpu else ON_GPU)))
    if not session.cpu:
        session.attempt(recipe, TENSOR, "tp2-offload", _words(session, "tp2-offload", *EVERY_LINE))
    session.say(ended=True)


def dense_part(session: Session) -> None:
    """Bridge without this package, from the configs that the other parts saved."""
    unsaved = {"checkpoint.save": None, "logger.save_config_filepath": None}
    for name in ("cp2", "tp2"):
        session.wait_for(session.work / f"{name}.done")
        session.attempt(_dense, session.work / f"{name}-p1" / "config.yaml", f"{name}-dense", unsaved)
    whole = {**unsaved, "model.context_parallel_size": 1}
    session.attempt(_dense, session.work / "cp2-p1" / "config.yaml", "dp2-dense", whole)
    session.say(ended=True)


def _dense(session: Session, file: Path, run: str, changes: dict[str, object]) -> None:
    bridge_alone(session, file, run, changes)


def _mark(session: Session, name: str) -> None:
    if session.rank == 0:
        (session.work / f"{name}.done").touch()


def big_part(session: Session) -> None:
    """The recipe for two GPUs at its size: Qwen2.5-3B, 32K tokens."""
    words = [*short_words(4), "dist.distributed_timeout_minutes=2"]
    session.attempt(recipe, "qwen25_3b_pretrain_2gpu_32k_config", "qwen-3b-32k", words)
    longer = [*words, "model.seq_length=131072", "train.global_batch_size=1"]
    session.attempt(recipe, "qwen25_3b_pretrain_2gpu_32k_config", "qwen-3b-128k", longer)
    session.say(ended=True)


PARTS = {
    "two-context": context_part,
    "two-tensor": tensor_part,
    "two-dense": dense_part,
    "two-big": big_part,
}
