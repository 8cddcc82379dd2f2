"""The parts that one GPU runs, each in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from . import small
from .runs import (
    EVERY_LINE,
    ON_GPU,
    bridge_alone,
    recipe,
    saving,
    seq_length,
    short_words,
    sizes,
    small_words,
)
from .session import Session, begin_groups, kinds_of_attention, logits_of

STEPS = 10
RECOMMENDED = [
    "mtraining.top_p=0.95",
    "mtraining.probe_segments=8",
    "mtraining.max_compact_columns=32768",
    "mtraining.dense_layers=1",
]
"""The setting that docs/recipes.md names, with one dense layer of the small model's."""


def folders(session: Session, family: str) -> tuple[Path, Path, Path, Path]:
    """Folders of a family: the model, the extended one, the imported one, and the prefix of the data."""
    root = session.work / family
    return root / "hf", root / "hf_long", root / "imported", root / "data"


def tokens_of(session: Session) -> torch.Tensor:
    """The tokens that logits are compared for."""
    return small.fixed_tokens(seq_length(session) // 2, sizes(session))


def import_part(session: Session) -> None:
    """Import, and export of the imported model."""
    family = session.part
    session.attempt(make, family)
    session.attempt(extend_and_import, family)
    (session.work / f"{family}-imported.done").touch()
    session.attempt(export_unchanged, family)
    session.say(ended=True)


def logits_part(session: Session) -> None:
    """The imported model against transformers."""
    family = session.part.removesuffix("-logits")
    session.wait_for(session.work / f"{family}-imported.done")
    session.attempt(logits_before, family)
    session.say(ended=True)


def train_part(session: Session) -> None:
    """Training from the imported model, export of the trained one, and on from a checkpoint."""
    family = session.part.removesuffix("-train")
    session.wait_for(session.work / f"{family}-imported.done")
    session.attempt(train, family, "p1", EVERY_LINE)
    (session.work / f"{family}-p1.done").touch()
    session.attempt(train, family, "p0.9", [])
    session.attempt(export_trained, family, "p1")
    session.attempt(export_trained, family, "p0.9")
    session.attempt(train_on, family)
    session.say(ended=True)


def make(session: Session, family: str) -> None:
    """Steps 2 and 5 of the page, by random numbers."""
    source, _, _, data = folders(session, family)
    small.make_model(family, source, sizes(session))
    small.make_data(data, sizes(session))
    session.say(made=sorted(p.name for p in source.iterdir()))


def extend_and_import(session: Session, family: str) -> None:
    """Steps 3 and 4."""
    from megatron_mtraining.bridge import extend_hf_config, import_hf_checkpoint

    source, long, imported, _ = folders(session, family)
    begin_groups(session)
    extend_hf_config(source, long, seq_length=small.FAMILIES[family][1])
    import_hf_checkpoint(long, imported)
    session.say(
        imported=sorted(p.name for p in imported.iterdir()), left_initialized=torch.distributed.is_initialized()
    )


def export_unchanged(session: Session, family: str) -> None:
    """Step 7 with the imported model as it is: the same bits must come back."""
    from megatron_mtraining.bridge import export_hf_checkpoint

    source, long, imported, _ = folders(session, family)
    back = session.work / family / "back"
    export_hf_checkpoint(long, imported, back)
    session.say(compared="exported unchanged", **small.compare_weights(source, back))


def logits_before(session: Session, family: str) -> None:
    """The imported model, with Bridge's own attention and with ours, against transformers."""
    source, long, _, _ = folders(session, family)
    tokens = tokens_of(session)
    exact = small.transformers_logits(long, tokens, torch.float32, session.device)
    theirs = small.transformers_logits(long, tokens, torch.bfloat16, session.device)
    session.say(logits="transformers bf16", **small.distance(theirs, exact))
    short = small.transformers_logits(source, tokens, torch.float32, session.device)
    session.say(logits="transformers fp32, not extended", **small.distance(short, exact))
    for name, options in (("dense", None), ("p1", {"top_p": 1.0, "max_vertical": None}), ("p0.9", {"top_p": 0.9})):
        session.attempt(_logits_of_bridge, long, name, options, exact, tokens)


def _logits_of_bridge(
    session: Session, long: Path, name: str, options: dict[str, Any] | None, exact: torch.Tensor, tokens: torch.Tensor
) -> None:
    from megatron.bridge import AutoBridge

    from megatron_mtraining.bridge import enable
    from megatron_mtraining.bridge.conversion import drop_missing_fusion

    begin_groups(session)
    provider = AutoBridge.from_hf_pretrained(str(long)).to_megatron_provider(load_weights=True)
    drop_missing_fusion(provider)
    provider.seq_length = seq_length(session)
    if options is not None:
        enable(SimpleNamespace(model=provider), **options)
    provider.finalize()
    models = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=session.cpu)
    got = logits_of(models[0], tokens.to(session.device))
    session.say(logits=f"bridge {name}", attention=kinds_of_attention(models), **small.distance(got, exact))


def _words_of_page(session: Session, family: str) -> list[str]:
    """The overrides of step 6, and those that make it small."""
    _, long, imported, data = folders(session, family)
    return [
        *small_words(session, STEPS),
        f"checkpoint.pretrained_checkpoint={imported}",
        f"dataset.data_path={data}",
        "tokenizer.tokenizer_type=HuggingFaceTokenizer",
        f"tokenizer.tokenizer_model={long}",
        "tokenizer.vocab_size=null",
        "dataset.split='90,5,5'",
    ]


def train(session: Session, family: str, name: str, words: list[str]) -> None:
    """Step 6: the recipe with the family's extension, from the imported model, on the data."""
    run = f"{family}-{name}"
    all_words = [*_words_of_page(session, family), *saving(session, run, STEPS), *words]
    recipe(session, small.FAMILIES[family][2], run, all_words, tokens_of(session))


def train_on(session: Session, family: str) -> None:
    """The recipe on from its own checkpoint, for ten more steps; the optimizer's state is loaded, too."""
    checkpoints = session.work / f"{family}-p1" / "checkpoints"
    words = [w for w in _words_of_page(session, family) if not w.startswith(("train.train_iters", "checkpoint.load="))]
    words += [f"train.train_iters={2 * STEPS}", f"checkpoint.load={checkpoints}", *EVERY_LINE]
    words += ["scheduler.override_opt_param_scheduler=true", *(["checkpoint.load_optim=false"] if session.cpu else [])]
    recipe(session, small.FAMILIES[family][2], f"{family}-p1-on", words)


def export_trained(session: Session, family: str, name: str) -> None:
    """Step 7: transformers must compute what the trained model computed, with the same angles."""
    from megatron_mtraining.bridge import export_hf_checkpoint

    run = f"{family}-{name}"
    source, long, _, _ = folders(session, family)
    target = session.work / run / "hf"
    export_hf_checkpoint(long, session.work / run / "checkpoints", target)
    config = json.loads((target / "config.json").read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    moved = small.compare_weights(source, target)
    session.say(run=run, compared="trained and exported", rope=rope, length=config["max_position_embeddings"], **moved)
    tokens = tokens_of(session)
    exact = small.transformers_logits(target, tokens, torch.float32, session.device)
    theirs = small.transformers_logits(target, tokens, torch.bfloat16, session.device)
    session.say(run=run, logits="transformers bf16, trained", **small.distance(theirs, exact))
    session.say(run=run, logits="bridge after training", **small.distance(session.logits[run], exact))


def dense_part(session: Session) -> None:
    """Bridge without this package: two runs from the same start (noise), and on from the checkpoint of ours."""
    family = session.part.removesuffix("-dense")
    session.wait_for(session.work / f"{family}-p1.done")
    session.attempt(dense, family, "dense", load=False)
    session.attempt(dense, family, "dense-again", load=False)
    session.attempt(dense, family, "dense-from-ours", load=True)
    session.say(ended=True)


def dense(session: Session, family: str, name: str, *, load: bool) -> None:
    """From the imported model as `train`, or on from what it saved."""
    checkpoints = session.work / f"{family}-p1" / "checkpoints"
    changes: dict[str, Any] = {"checkpoint.save": None, "logger.save_config_filepath": None}
    changes |= {"checkpoint.load": str(checkpoints) if load else None}
    if load:
        changes |= {"train.train_iters": 2 * STEPS, "scheduler.override_opt_param_scheduler": True}
        changes |= {"checkpoint.pretrained_checkpoint": None}
        if session.cpu:
            changes["checkpoint.load_optim"] = False  # torch's optimizer has no state to load into yet
    bridge_alone(session, checkpoints.parent / "config.yaml", f"{family}-{name}", changes)


def peft_part(session: Session) -> None:
    """Adapters on the imported Qwen, export of the adapters; then the refusals and overrides of the command line."""
    session.wait_for(session.work / "qwen-imported.done")
    session.attempt(adapters, "lora")
    session.attempt(export_adapters, "lora")
    session.attempt(adapters, "dora")
    session.attempt(refused, "model.attention_dropout=0.1")
    session.attempt(refused, "model.attention_backend=flash")
    run_words = [*small_words(session, 3), *ON_GPU]
    session.attempt(recipe, "qwen25_3b_pretrain_1gpu_16k_config", "scratch", run_words)
    words = [*run_words, "model.attention_backend=mtraining", "mtraining.top_p=0.5", "mtraining.max_vertical=256"]
    session.attempt(recipe, "qwen25_3b_pretrain_1gpu_16k_config", "overrides", words)
    if not session.cpu:
        session.attempt(recipe, "qwen25_3b_pretrain_1gpu_16k_config", "offload", small_words(session, 3))
    session.say(ended=True)


def adapters(session: Session, scheme: str) -> None:
    """The peft recipe: only adapters change."""
    _, _, imported, _ = folders(session, "qwen")
    words = [*small_words(session, 5), *saving(session, scheme, 5), f"checkpoint.pretrained_checkpoint={imported}"]
    recipe(session, "qwen25_3b_peft_8gpu_128k_config", scheme, ["--peft-scheme", scheme, *words])


def export_adapters(session: Session, scheme: str) -> None:
    """Bridge's export of adapters, from the imported model's folder."""
    from megatron_mtraining.bridge import export_hf_adapter

    _, long, _, _ = folders(session, "qwen")
    target = session.work / scheme / "adapter"
    export_hf_adapter(long, session.work / scheme / "checkpoints", target)
    session.say(adapter=sorted(p.name for p in target.iterdir()))


def refused(session: Session, word: str) -> None:
    """Training must stop before the first step, with a message that names the setting."""
    try:
        recipe(session, "qwen25_3b_pretrain_1gpu_16k_config", "refused", [*small_words(session, 1), *ON_GPU, word])
    except SystemExit as stopped:
        session.say(refused=word, message=str(stopped))
        return
    raise AssertionError(f"{word} was accepted")


def setting_part(session: Session) -> None:
    """The setting that trained as well as dense (docs/proof.md), from the imported Qwen; Bridge's own import."""
    session.wait_for(session.work / "qwen-imported.done")
    session.attempt(train, "qwen", "recommended", RECOMMENDED)
    if not session.cpu:
        session.attempt(import_by_bridge)
    session.say(ended=True)


def import_by_bridge(session: Session) -> None:
    """Whether Bridge's own import, which has no argument for the fusion, still wants APEX where Transformer Engine is."""
    from megatron.bridge import AutoBridge

    from megatron_mtraining.bridge.conversion import EXTENSION, have_fused_gradients

    _, long, _, _ = folders(session, "qwen")
    try:
        AutoBridge.import_ckpt(str(long), str(session.work / "qwen" / "imported_by_bridge"))
    except RuntimeError as error:
        if have_fused_gradients() or EXTENSION not in str(error):
            raise
        session.say(imported_by_bridge=False, wants=EXTENSION)
        return
    session.say(imported_by_bridge=True, apex=have_fused_gradients())


def big_part(session: Session) -> None:
    """The recipe for one GPU at its size: 3B parameters, 16K tokens; state of the optimizer on the GPU, then on the CPU."""
    name = "qwen25_3b_pretrain_1gpu_16k_config"
    session.attempt(recipe, name, "qwen-3b-16k", [*short_words(5, batch=1), *ON_GPU])
    session.attempt(recipe, name, "qwen-3b-16k-offload", short_words(2, batch=1))
    session.say(ended=True)


PARTS = {
    "qwen": import_part,
    "llama": import_part,
    "qwen-logits": logits_part,
    "llama-logits": logits_part,
    "qwen-train": train_part,
    "llama-train": train_part,
    "qwen-dense": dense_part,
    "llama-dense": dense_part,
    "peft": peft_part,
    "setting": setting_part,
    "big": big_part,
}
