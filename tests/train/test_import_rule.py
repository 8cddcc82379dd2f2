"""Imports go downward only, Megatron is imported by the integration alone, the package needs neither it nor CUDA."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import ROOT, Runner

PACKAGE = ROOT / "megatron_mtraining"

# The layers of docs/design.md, bottom to top. A module may import its own layer and those below.
LAYERS = (
    {"config", "bitmap", "layout", "documents", "schedule", "launches", "index", "block_lists", "budget", "index_dump"},
    {"ops"},
    {"comm", "metrics", "buffers", "ring_profile", "nvtx"},
    {"policies", "estimate", "ring", "ring_call", "simulator"},
    {"ring_op", "attention", "testing", "recall", "report", "simulate"},
    {"integration", "launch", "startup_hook", "opt_in", "plan", "cli", "bridge"},
)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
TOP = len(LAYERS) - 1


def module_files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def layer_of(path: Path) -> int:
    return LAYER[path.relative_to(PACKAGE).parts[0].removesuffix(".py")]


def imports(path: Path) -> Iterator[str]:
    """Absolute names of everything a file imports, wherever it does so."""
    inside = ("megatron_mtraining", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level + 1] if node.level else ()
            module = ".".join((*base, *(node.module.split(".") if node.module else ())))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_every_module_has_a_layer() -> None:
    unknown = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in module_files()} - set(LAYER)
    assert not unknown, f"give {unknown} a layer here and in docs/design.md"


@pytest.mark.parametrize("path", module_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downward(path: Path) -> None:
    own = layer_of(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "megatron":
            assert own == TOP, f"{name}: Megatron is imported by the integration alone"
        if parts[0] == "megatron_mtraining" and len(parts) > 1 and parts[1] in LAYER:
            assert LAYER[parts[1]] <= own, f"{name} is above layer {own}"


def test_package_needs_no_megatron_and_no_cuda(run_python: Runner) -> None:
    code = """
import sys

class NoMegatron:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('megatron', 'transformer_engine', 'flash_attn', 'triton_kernels'):
            raise ImportError(name)

sys.meta_path.insert(0, NoMegatron())
import torch
torch.cuda.init = torch._C._cuda_init = lambda *a: sys.exit('CUDA was initialised')
import megatron_mtraining
from megatron_mtraining import Layout, MTrainingConfig, VerticalSlashIndex, estimate_index, mtraining_attention
from megatron_mtraining.testing import run_virtual
q = torch.randn(1, 256, 2, 64)
k = torch.randn(1, 256, 1, 64)
out = mtraining_attention(q, k, k, config=MTrainingConfig())
print(tuple(out.shape), any(name.split('.')[0] == 'megatron' for name in sys.modules))
"""
    run = run_python("-c", code)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[-2] == "(1, 256, 2, 64) False"


def test_importing_the_launcher_imports_no_megatron(run_python: Runner) -> None:
    """`--help` and mistakes in the command line answer at once."""
    code = "import sys, megatron_mtraining.launch; print([n for n in sys.modules if n.split('.')[0] == 'megatron'])"
    run = run_python("-c", code)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
