"""A library built for one architecture alone: its kernels run, the others are missing by name."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mtraining.ops import native

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
CALL = """
import sys, pathlib, torch
from megatron_mtraining import MTrainingConfig, mtraining_attention
from megatron_mtraining.ops import native
native.LIBRARY = pathlib.Path(sys.argv[1])
q = torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16)
for kernel in ("sm80", "sm90", "auto"):
    try:
        mtraining_attention(q, q, q, config=MTrainingConfig(kernel=kernel, dense=True))
        print(kernel, "ran")
    except RuntimeError as error:
        print(kernel, "refused:", error)
words, table = torch.ones(1, 2, 1, dtype=torch.int64, device="cuda"), torch.arange(2, dtype=torch.int32, device="cuda")
lse = torch.empty(1, 2, 128, device="cuda")
for arch in (80, 90):
    try:
        torch.ops.megatron_mtraining.attention_forward_(
            q, q[None], q[None], words, table * 0, table, table[None], None, None, None, 0.1, False, arch, None,
            torch.empty_like(q), lse)
        print(arch, "ran")
    except RuntimeError as error:
        print(arch, "refused:", error)
"""


def library(arch: int) -> Path:
    """The library with the kernels of ``arch`` alone, built on first use."""
    folder = ROOT / "build" / f"only-sm{arch}"
    path = folder / native.LIBRARY.name
    if not path.exists():
        if not (shutil.which("nvcc") and shutil.which("cmake") and shutil.which("ninja")):
            pytest.skip("needs nvcc, cmake and ninja, or a library built before")
        options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DMTRAINING_CUDA_ARCHITECTURES={arch}"]
        subprocess.run(["cmake", "-S", ROOT / "csrc", "-B", folder, "-G", "Ninja", *options], check=True)
        subprocess.run(["ninja", "-C", folder], check=True)
    return path


@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_that_were_not_built_are_named(arch: int) -> None:
    import torch

    major = torch.cuda.get_device_capability()[0]
    command = [sys.executable, "-c", CALL, str(library(arch))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    other = 170 - arch
    runs = major >= 8 if arch == 80 else major == 9
    assert (said[f"sm{arch}"] == "ran") == (said["auto"] == "ran") == (said[str(arch)] == "ran") == runs
    assert f"kernel='sm{other}' does not run here: built for sm{arch}, found a device of" in said[f"sm{other}"]
    assert (
        f"the sm{other} kernels (arch={other}) do not run here; built for architectures {arch}, found"
        in said[str(other)]
    )
