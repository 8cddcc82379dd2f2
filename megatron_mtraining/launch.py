"""Runs an unmodified Megatron-LM script with MTraining attention available.

    torchrun --nproc-per-node 8 -m megatron_mtraining.launch pretrain_gpt.py --attention-backend mtraining ...

The script runs as ``__main__``, with its own folder on the import path, as if Python had started it. Processes that it
spawns (checkpoint workers, data loaders) import the script by its path, and never this launcher. After
``megatron-mtraining enable`` the script may be started without it: see ``startup_hook``.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import TracebackType

from .integration import RefusedError, cpu_compat, install
from .integration.dataset_helpers import accept_compiled_helpers

USAGE = "usage: python -m megatron_mtraining.launch [-m module | script.py] [arguments of the script ...]"
STARTUP_MODULE = "_megatron_mtraining_startup"
"""The name under which ``startup_hook`` is installed."""


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
    if STARTUP_MODULE in sys.modules:
        sys.modules[STARTUP_MODULE].disarm()
    try:
        # First of all: Megatron may lie beside the script.
        sys.path.insert(0, os.getcwd() if as_module else os.path.dirname(os.path.abspath(target)))
        if as_module:
            check_module(target)
        sys.argv = [target, *prepare(arguments[1:])]
        if as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except RefusedError as refused:
        raise SystemExit(one_line(refused)) from None


def check_module(name: str) -> None:
    """Refuses a module that Python could not run.

    Raises:
        RefusedError: if there is none of that name; what a package above it raises is raised as it is.
    """
    try:
        spec = find_spec(name) if name.strip(".") == name != "" else None
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as missing:
        if missing.name is not None and not name.startswith(missing.name):
            raise
        spec = None
    if spec is None:
        raise RefusedError(f"-m {name}: no such module to run; {USAGE}")


def prepare(arguments: list[str]) -> list[str]:
    """Makes the plugin available in this process.

    Args:
        arguments: of the script.

    Returns:
        The arguments to run it with: without ``--mtraining-cpu``, which makes Megatron run on the CPU (for a try-out,
        and for tests).

    Raises:
        RefusedError: if megatron-core is missing or too old, or for options that cannot work on the CPU.
    """
    try:
        arguments = cpu_compat.consume_option(arguments)
    except (RuntimeError, ValueError) as error:
        raise RefusedError(str(error)) from error
    install()
    accept_compiled_helpers()
    return arguments


def take_over() -> None:
    """Makes the plugin available to the script that is running: the start-up hook's call, once Megatron is loaded.

    What the plugin refuses from now on ends the script with one line, as under the launcher.

    Raises:
        SystemExit: with one line, for what :func:`prepare` refuses.
    """
    sys.excepthook = _refusals_in_one_line(sys.excepthook)
    try:
        sys.argv[1:] = prepare(sys.argv[1:])
    except RefusedError as refused:
        raise SystemExit(one_line(refused)) from None


def one_line(refused: RefusedError) -> str:
    """How a refusal is told."""
    return f"megatron_mtraining: error: {refused}"


ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _refusals_in_one_line(before: ExceptHook) -> ExceptHook:
    """An ``excepthook`` that prints a refusal without its traceback; Python then exits with status 1."""

    def excepthook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if isinstance(error, RefusedError):
            print(one_line(error), file=sys.stderr, flush=True)
        else:
            before(kind, error, where)

    return excepthook


if __name__ == "__main__":
    main()
