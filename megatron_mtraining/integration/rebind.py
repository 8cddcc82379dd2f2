"""Replacing a function of Megatron wherever it has been imported by name."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass
class Rebinding:
    """One function that was replaced; :meth:`undo` puts the original back.

    Attributes:
        original: the function that was replaced.
        replacement: what stands in its place.
    """

    original: Any
    replacement: Any

    def undo(self) -> None:
        """Puts the original back in every module that still holds the replacement, also in those loaded meanwhile."""
        for module, name in _holders(self.replacement):
            setattr(module, name, self.original)


def rebind(module_name: str, function_name: str, replacement: Any) -> Rebinding:
    """Puts ``replacement`` in the place of ``module_name.function_name`` in every loaded module that holds it.

    Megatron and its scripts import functions by name, so the defining module alone is not enough; modules that are
    loaded later find the replacement in the defining module.

    Raises:
        AttributeError: if the module has no such function.
    """
    original = getattr(importlib.import_module(module_name), function_name)

    # A function of its own, so that undoing finds those who have it from Megatron, and no others.
    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    for module, name in _holders(original):
        setattr(module, name, stand_in)
    return Rebinding(original, stand_in)


def _holders(function: Any) -> list[tuple[ModuleType, str]]:
    """The loaded modules (the running script included) with a global that is ``function``."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if value is function
    ]


def replace_method(
    owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Puts ``wrap(method)`` in the place of a class's own method.

    Returns:
        A function that puts the original back.
    """
    original = vars(owner)[name]
    setattr(owner, name, wrap(original))
    return lambda: setattr(owner, name, original)
