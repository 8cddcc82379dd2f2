"""What ``megatron-mtraining enable`` puts into site-packages: the plugin for scripts that Python starts itself.

Python imports this file at start-up, through the ``.pth`` file beside it, if a word of the command line holds
``mtraining``; it is a copy, under a name of its own, because importing the package would import torch. It arms a finder
if the command line asks for the plugin, and the finder waits for ``megatron.training``: once that is loaded, and before
the script goes on, :func:`megatron_mtraining.launch.take_over` does what the launcher would have done. Every other
program is left alone. Standard library only.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing typing takes longer than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

TRIGGER = "megatron.training"
OPTION = "--attention-backend"
BACKEND = "mtraining"


def is_requested(words: Sequence[str]) -> bool:
    """Whether a command line asks for the plugin: by its backend, or by one of its own options."""
    return (
        f"{OPTION}={BACKEND}" in words
        or (OPTION, BACKEND) in zip(words, words[1:], strict=False)
        or any(word.startswith(f"--{BACKEND}-") for word in words)
    )


class Finder:
    """Finds nothing but ``megatron.training``: as Python would, with a call after it has run.

    It stays until the module is loaded, because looking for a module is not loading it: programs ask whether there is one.
    """

    def __init__(self) -> None:
        self.is_asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The module's own spec, whose loader calls the plugin at its end; None for every other module."""
        if name != TRIGGER or self.is_asking:
            return None
        from importlib.util import find_spec

        self.is_asking = True
        try:
            spec = find_spec(name)
        finally:
            self.is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _then_take_over(spec.loader.exec_module)  # type: ignore
        return spec


def _then_take_over(load: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        disarm()
        load(module)
        try:
            from megatron_mtraining.launch import take_over
        except ModuleNotFoundError as missing:
            raise SystemExit(
                f"megatron_mtraining: error: enabled by {__file__}, but it is not installed for {sys.executable} "
                f"({missing}): install it, or remove that file and the .pth file beside it"
            ) from None
        take_over()

    return exec_module


def arm() -> None:
    """Waits for Megatron's training package."""
    sys.meta_path.insert(0, Finder())


def disarm() -> None:
    """Waits no more: Megatron is being loaded, or the launcher does the work."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]


if __name__ == "_megatron_mtraining_startup" and is_requested(sys.orig_argv[1:]):
    arm()
