"""The ``megatron-mtraining`` command: use the plugin without changing how training is started, and see what is installed.

- ``megatron-mtraining enable``: a plain ``torchrun pretrain_gpt.py --attention-backend mtraining`` works from now on;
- ``megatron-mtraining disable``: ... and no longer;
- ``megatron-mtraining status``: versions, whether it is enabled, the CUDA library and its architectures;
- ``megatron-mtraining plan ...``: communicators, buffers and memory of a launch's ranks, without launching it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from . import __version__, opt_in, plan
from .ops import native

PACKAGES = ("megatron-core", "transformer-engine", "flash-attn", "apex")


def enable() -> None:
    """Enables the plugin and says what that means."""
    done = opt_in.enable()
    print(f"enabled for {sys.executable}: {done.folder / opt_in.PTH}")
    print(
        "a script of Megatron-LM that is given --attention-backend mtraining now gets the plugin; nothing else changes"
    )
    if not done.removed_by_uninstall:
        print("note: the package is not installed in that folder, so pip uninstall leaves the file; disable removes it")


def disable() -> None:
    """Disables the plugin, and says so if it was not enabled."""
    folders = opt_in.disable()
    print("\n".join(f"disabled: removed {folder / opt_in.PTH}" for folder in folders) or "not enabled: nothing to do")


def status() -> None:
    """Prints one line per fact."""
    for name, text in _facts():
        print(f"{name + ':':20} {text}")


def _facts() -> Iterator[tuple[str, str]]:
    yield "megatron-mtraining", f"{__version__} ({Path(__file__).parent})"
    folders = opt_in.enabled_folders()
    yield "enabled", ", ".join(map(_enabled, folders)) or "no (megatron-mtraining enable)"
    yield "python", f"{sys.version.split()[0]} ({sys.executable})"
    yield "torch", f"{torch.__version__} (CUDA {torch.version.cuda})"
    for package in PACKAGES:
        yield package, _version(package)
    yield "CUDA library", _library()
    yield "GPUs", _gpus()


def _enabled(folder: Path) -> str:
    """Where the hook is, and whether something is wrong with it."""
    whole = opt_in.is_whole(folder)
    return str(folder / opt_in.PTH) + ("" if whole else " (not whole, or of another version: run enable again)")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _library() -> str:
    """The native library and what it holds, or why it cannot be used."""
    try:
        info = native.load()
    except RuntimeError as error:
        return str(error)
    built = ", ".join(f"sm{arch}" for arch in info.architectures)
    return f"{native.LIBRARY} ({info.version}, {built}, built with torch {info.torch} and CUDA {info.cuda})"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    capability = ".".join(map(str, torch.cuda.get_device_capability(0)))
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)} (compute capability {capability})"


COMMANDS: dict[str, tuple[Callable[[], None], str]] = {
    "enable": (enable, "let scripts of Megatron-LM that Python starts itself use the plugin"),
    "disable": (disable, "take that back"),
    "status": (status, "versions, whether it is enabled, the CUDA library and its architectures"),
}


PLAN = "what a launch would take of every rank: communicators, ring buffers, memory"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command.

    Args:
        argv: the command and its options; the command line's if left out.

    Raises:
        SystemExit: with one line, if the command fails.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-mtraining", description="Distributed dynamic sparse attention for Megatron-LM."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, description=summary)
    commands.add_parser("plan", help=PLAN, description=PLAN, add_help=False)
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["plan"]:  # its options are Megatron's
        plan.main(words[1:])
        return
    command = parser.parse_args(words).command
    try:
        COMMANDS[command][0]()
    except opt_in.OptInError as error:
        raise SystemExit(f"megatron-mtraining: error: {error}") from None


if __name__ == "__main__":
    main()
