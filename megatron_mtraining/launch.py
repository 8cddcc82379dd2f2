"""Runs an unmodified Megatron-LM script with MTraining attention available.

    torchrun --nproc-per-node 8 -m megatron_mtraining.launch pretrain_gpt.py --attention-backend mtraining ...

The script runs as ``__main__``, with its own folder on the import path, as if Python had started it. Processes that it
spawns (checkpoint workers, data loaders) import the script by its path, and never this launcher.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from .integration import RefusedError, cpu_compat, install
from .integration.dataset_helpers import accept_compiled_helpers

USAGE = "usage: python -m megatron_mtraining.launch [-m module | script.py] [arguments of the script ...]"


def main(argv: Sequence[str] | None = None) -> None:
    """Installs the hooks and runs the script; ``--help`` in its place prints the usage.

    Args:
        argv: the script (or ``-m`` and a module) and its arguments; the command line's if left out.

    Raises:
        SystemExit: with one line, for a script that is not named or not there, and for anything that the plugin
            refuses; else whatever the script raises.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_module = arguments[:1] == ["-m"]
    if as_module:
        del arguments[0]
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    if not arguments:
        raise SystemExit(USAGE)
    target = arguments[0]
    if not as_module and not os.path.isfile(target):
        raise SystemExit(f"megatron_mtraining.launch: no script {target!r}; {USAGE}")
    try:
        sys.argv = [target, *_without_gpu(arguments[1:])]
        install()
        accept_compiled_helpers()
        if as_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
            runpy.run_path(target, run_name="__main__")
    except RefusedError as refused:
        raise SystemExit(f"megatron_mtraining: error: {refused}") from None


def _without_gpu(arguments: list[str]) -> list[str]:
    """The arguments without ``--mtraining-cpu``, which makes Megatron run on the CPU (for a try-out, and for tests)."""
    try:
        return cpu_compat.consume_option(arguments)
    except (RuntimeError, ValueError) as error:
        raise RefusedError(str(error)) from error


if __name__ == "__main__":
    main()
