"""Stand-ins for packages that Bridge imports at the top of its modules and that need a GPU to be installed or to be of use.

They hold no behaviour: names in upper case are empty classes, others are modules that can be called as decorators.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

NAMES = ("transformer_engine", "transformer_engine_torch", "modelopt", "nvidia_resiliency_ext", "megatron.energon")


class _StandIn(types.ModuleType):
    __path__ = ()
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].islower():
            made: Any = importlib.import_module(f"{self.__name__}.{name}")
        else:
            made = type(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: set[str]) -> None:
        self.roots = roots

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == root or name.startswith(root + ".") for root in self.roots):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> list[str]:
    """Puts a stand-in in the place of every package of `NAMES` that is not installed; returns their names.

    Megatron must have been imported before, so that it knows that there is no Transformer Engine.
    """
    missing = [name for name in NAMES if importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, _Finder(set(missing)))
    return missing
