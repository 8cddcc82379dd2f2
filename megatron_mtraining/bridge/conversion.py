"""From Hugging Face to a Megatron checkpoint, where Bridge's own call needs APEX, and back."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from megatron_mtraining.integration import RefusedError

EXTENSION = "fused_weight_gradient_mlp_cuda"
"""The compiled module of APEX that adds weight gradients up in place."""


def have_fused_gradients() -> bool:
    """Whether APEX's extension is installed. Bridge 0.6 takes Transformer Engine for enough, Megatron's output layer not."""
    return importlib.util.find_spec(EXTENSION) is not None


def drop_missing_fusion(provider: Any) -> None:
    """Turns ``gradient_accumulation_fusion`` of a provider off where the model could not be built with it."""
    if not have_fused_gradients():
        provider.gradient_accumulation_fusion = False


def import_hf_checkpoint(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Writes the Hugging Face model of a folder as a Megatron checkpoint: ``AutoBridge.import_ckpt`` without APEX.

    Needs a GPU, and a process of its own: Bridge starts NCCL in it, and leaves it on. In a script, call it below
    ``if __name__ == "__main__":``, because Megatron's writer starts processes that import the script.

    Args:
        source: folder of the model, such as :func:`.extend_hf_config` makes.
        target: folder of the checkpoint, for ``checkpoint.pretrained_checkpoint``; to be made, or empty.

    Raises:
        RefusedError: if ``source`` is not the folder of a model that Bridge knows, or ``target`` holds files.
    """
    bridge = _bridge_of(source)
    _refuse_used(target)
    provider = bridge.to_megatron_provider(load_weights=True)
    drop_missing_fusion(provider)
    provider.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    bridge.save_megatron_model(model, os.fspath(target), hf_tokenizer_path=os.fspath(source), low_memory_save=True)


def export_hf_checkpoint(
    model: str | os.PathLike[str], source: str | os.PathLike[str], target: str | os.PathLike[str]
) -> None:
    """Writes the newest Megatron checkpoint of a folder as a Hugging Face model, by Bridge's ``export_ckpt``.

    Needs a GPU.

    Args:
        model: folder of the Hugging Face model that was imported: the extended one, whose config is copied. With the
            original one, the trained weights would be used with the wrong angles.
        source: folder of checkpoints (``checkpoint.save``).
        target: folder to make, or an empty one.

    Raises:
        RefusedError: if ``model`` is not the folder of a model that Bridge knows, ``source`` holds no checkpoint, or
            ``target`` holds files: those of :func:`.extend_hf_config` are links to the original weights.
    """
    bridge = _bridge_of(model)
    newest = _newest(source)
    _refuse_used(target)
    bridge.export_ckpt(os.fspath(newest), os.fspath(target))


def export_hf_adapter(
    model: str | os.PathLike[str], source: str | os.PathLike[str], target: str | os.PathLike[str]
) -> None:
    """Writes the newest adapters of a peft run for Hugging Face's ``peft``: ``AutoBridge.export_adapter_ckpt`` without APEX.

    Needs a GPU. Bridge exports LoRA, not DoRA.

    Args:
        model: folder of the Hugging Face model that was imported: the extended one.
        source: folder of checkpoints (``checkpoint.save``).
        target: folder to make, or an empty one.

    Raises:
        RefusedError: as for :func:`export_hf_checkpoint`.
    """
    bridge = _bridge_of(model)
    newest = _newest(source)
    _refuse_used(target)
    original = bridge.to_megatron_provider

    def to_megatron_provider(*args: Any, **named: Any) -> Any:
        provider = original(*args, **named)
        drop_missing_fusion(provider)
        return provider

    bridge.to_megatron_provider = to_megatron_provider
    bridge.export_adapter_ckpt(os.fspath(newest), os.fspath(target))


def _newest(folder: str | os.PathLike[str]) -> Path:
    """The newest checkpoint of a folder that was written to its end: Megatron notes it when a save is complete."""
    found = sorted(Path(folder).glob("iter_*"))
    if not found:
        raise RefusedError(f"{os.fspath(folder)}: no checkpoint there; give the folder that holds iter_...")
    tracker = Path(folder) / "latest_checkpointed_iteration.txt"
    number = tracker.read_text().strip() if tracker.is_file() else ""
    complete = Path(folder) / f"iter_{int(number):07d}" if number.isdigit() else found[-1]
    if not complete.is_dir():
        raise RefusedError(
            f"{tracker} names {complete.name}, which is not there; there are {found[0].name} to {found[-1].name}"
        )
    return complete


def _bridge_of(folder: str | os.PathLike[str]) -> Any:
    """Bridge's converter for the Hugging Face model of a folder."""
    from megatron.bridge import AutoBridge

    if not (Path(folder) / "config.json").is_file():
        raise RefusedError(f"{os.fspath(folder)}: no config.json there; give the folder of a Hugging Face model")
    try:
        return AutoBridge.from_hf_pretrained(os.fspath(folder))
    except ValueError as error:  # Bridge's message for an architecture that it does not know is a page
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise RefusedError(f"{os.fspath(folder)}: Megatron-Bridge refuses the model: {first}") from error


def _refuse_used(folder: str | os.PathLike[str]) -> None:
    """Nothing is overwritten."""
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RefusedError(f"{os.fspath(folder)}: exists; give a folder to make")
