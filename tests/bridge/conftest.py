"""Bridge's own classes where it is installed; a model provider of the same shape elsewhere."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("megatron.training", reason="needs megatron-core 0.19 or newer")

from tests.megatron.conftest import no_plugin_left, on_cpu, one_rank  # noqa: F401 - fixtures

from . import on_cpu as bridge_on_cpu

HAVE_BRIDGE = importlib.util.find_spec("megatron.bridge") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of Bridge's own classes are skipped, with the reason, where it is not installed."""
    if HAVE_BRIDGE:
        return
    skip = pytest.mark.skip(reason="needs Megatron-Bridge: docs/from_hf_to_512k.md, 1")
    for item in items:
        if item.get_closest_marker("bridge") is not None:  # a folder's name is a keyword, too
            item.add_marker(skip)


@pytest.fixture(scope="session")
def bridge() -> Any:
    """`megatron.bridge`, with stand-ins for what a machine without a GPU lacks."""
    bridge_on_cpu.import_bridge()
    return importlib.import_module("megatron.bridge")


def example(name: str) -> ModuleType:
    """A script of `examples/nemo` as a module."""
    path = Path(__file__).resolve().parents[2] / "examples" / "nemo" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"nemo_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def no_nvte(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No variable that chooses another attention, and no hook left in Bridge."""
    from megatron_mtraining.bridge import uninstall

    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        monkeypatch.delenv(name)
    yield
    uninstall()


def settings(cfg: Any) -> Any:
    """What the pre-wrap hook of a config has been told."""
    from megatron_mtraining.bridge.hook import PreWrapHook, hooks_of

    (hook,) = (hook for hook in hooks_of(cfg.model) if isinstance(hook, PreWrapHook))
    return hook.settings
