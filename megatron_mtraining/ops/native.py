"""The native library of CUDA kernels: found and loaded on first use, with clear errors. Never a silent fallback.

The library is built on torch's stable ABI, so one file serves every torch from the version on that it was built for.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

LIBRARY = Path(__file__).resolve().parent.parent / "lib" / "libmegatron_mtraining_ops.so"
OLDEST_TORCH = (2, 11)
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)

_REMEDY = (
    "build the package with CUDA kernels (pip install . --no-build-isolation with CUDA_HOME set and "
    "-C cmake.define.MTRAINING_CUDA=ON), or use kernel='reference'"
)


@dataclass(frozen=True)
class BuildInfo:
    """What the native library was built from.

    Attributes:
        version: version of this package.
        torch: version of torch whose headers were used.
        cuda: version of the CUDA compiler.
        architectures: the kernels in it, of 80 (general) and 90 (Hopper).
    """

    version: str
    torch: str
    cuda: str
    architectures: tuple[int, ...]


def _torch_release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2])


@lru_cache(maxsize=1)
def load() -> BuildInfo:
    """Loads the native library into torch, once.

    Raises:
        RuntimeError: if it is not there, or if this torch cannot load it; the message says what to do.
    """
    if not LIBRARY.is_file():
        raise RuntimeError(f"the CUDA kernels of megatron_mtraining are not built (no {LIBRARY.name}): {_REMEDY}")
    found = torch.__version__
    if _torch_release(found) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise RuntimeError(f"the CUDA kernels of megatron_mtraining need torch >= {oldest}, found {found}: {_REMEDY}")
    try:
        torch.ops.load_library(str(LIBRARY))
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise RuntimeError(f"{_mismatch(found)} [{error}]") from error
    library.mtraining_build_info.restype = ctypes.c_char_p
    info = json.loads(library.mtraining_build_info())
    architectures = tuple(int(arch) for arch in info.pop("architectures").split(","))
    return BuildInfo(architectures=architectures, **info)


def _mismatch(found: str) -> str:
    """The library does not load: names the torch it was built for, which is written in it as plain text."""
    text = LIBRARY.read_bytes()
    start = text.find(b'{"version": "')
    built = "another version"
    if start >= 0:
        built = json.loads(text[start : text.index(b"}", start) + 1])["torch"]
    return f"{LIBRARY.name} was built for torch {built}, found {found}: rebuild it ({_REMEDY})"


def require(device: torch.device, dtype: torch.dtype, head_dim: int, arch: int) -> BuildInfo:
    """Loads the library and checks that it serves such inputs.

    Args:
        device: a CUDA device.
        dtype: of q, k and v.
        head_dim: of q, k and v.
        arch: 0 for the best kernels of the device; 80, 90: those.

    Raises:
        RuntimeError: naming what is not served and what is.
    """
    info = load()
    if dtype not in DTYPES:
        raise RuntimeError(f"the CUDA kernels take bfloat16 and float16, not {dtype}; use kernel='reference'")
    if head_dim not in HEAD_DIMS:
        raise RuntimeError(f"the CUDA kernels take head_dim 64 and 128, not {head_dim}; use kernel='reference'")
    capability = torch.cuda.get_device_capability(device)
    runs = {arch for arch in info.architectures if _runs(arch, capability)}
    if not runs or (arch and arch not in runs):
        asked = f"kernel='sm{arch}'" if arch else "kernel='auto'"
        built = ", ".join(f"sm{built}" for built in info.architectures)
        raise RuntimeError(
            f"{asked} does not run here: built for {built}, found a device of compute capability "
            f'{capability[0]}.{capability[1]}; rebuild with -DMTRAINING_CUDA_ARCHITECTURES="80;90" or use '
            f"kernel='reference'"
        )
    return info


def _runs(arch: int, capability: tuple[int, int]) -> bool:
    """The general kernels run on 8.0 and everything newer, the Hopper kernels on 9.x alone."""
    return capability[0] >= 8 if arch == 80 else capability[0] == 9
