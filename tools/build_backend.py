"""Build backend: scikit-build-core, with one decision made first, whether the CUDA library is built.

`-C cmake.define.MTRAINING_CUDA=ON|OFF|AUTO` (pip's --config-settings) says so; AUTO, the default, builds it where nvcc
is found. Without it no CMake and no compiler runs and the wheel is pure Python. With it, what would make the build
fail late or unreadably (no nvcc, no torch, CUDA versions that differ) is one message before any compile. The library
fits every torch from 2.11 on, so pip's isolated build environment, which sees none, gets one of its own.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from scikit_build_core import build as _backend

_SETTING = "cmake.define.MTRAINING_CUDA"
_CHOICES = ("AUTO", "ON", "OFF")
_TORCH = "torch>=2.11"  # as in pyproject.toml's dependencies
_PROBE = "import torch; print(torch.__version__, torch.version.cuda)"
_WITHOUT = f"or build without CUDA: pip install -C {_SETTING}=OFF ..."

Settings = dict[str, Any] | None


def find_nvcc() -> str | None:
    """The CUDA compiler: $CUDACXX, $CUDA_HOME/bin, $CUDA_PATH/bin, the PATH, /usr/local/cuda/bin, in this order."""
    if os.environ.get("CUDACXX"):
        return shutil.which(os.environ["CUDACXX"])
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [str(Path(home) / "bin") for home in homes]
    path = os.pathsep.join([*folders, os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    return shutil.which("nvcc", path=path)


def _stop(message: str) -> None:
    raise SystemExit(f"megatron_mtraining: {message}")


def _cuda_of_nvcc(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+\.\d+)", text)
    if release is None:
        _stop(f"{nvcc} --version names no CUDA release: set CUDACXX to a working nvcc, {_WITHOUT}")
        raise AssertionError
    return release.group(1)


def _torch_here() -> tuple[str, str] | None:
    """Version and CUDA version of the torch that this environment imports, or None."""
    run = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        return None
    version, cuda = run.stdout.split()
    return version, cuda


def check_cuda(nvcc: str | None, *, torch_follows: bool = False) -> None:
    """End the build with one message unless `nvcc` and the torch of this environment can build the CUDA library.

    With `torch_follows`, an environment without torch passes: pip installs the requirements of the build next.
    """
    if nvcc is None:
        _stop(
            f"nvcc not found (CUDACXX, CUDA_HOME and CUDA_PATH unset or wrong, not on PATH): set CUDA_HOME, {_WITHOUT}"
        )
        return
    nvcc_cuda, torch = _cuda_of_nvcc(nvcc), _torch_here()
    if torch is None:
        if torch_follows:
            return
        _stop(
            "the CUDA library is built against torch, and the build environment has none that imports: "
            f"install torch first, {_WITHOUT}"
        )
        raise AssertionError
    torch_version, torch_cuda = torch
    if torch_cuda != "None" and torch_cuda.split(".")[0] != nvcc_cuda.split(".")[0]:
        _stop(
            f"{nvcc} is CUDA {nvcc_cuda}, torch {torch_version} is built with CUDA {torch_cuda}: the major versions "
            f"must agree (set CUDA_HOME to a CUDA {torch_cuda.split('.')[0]} toolkit, or build against a torch of your "
            f"own with --no-build-isolation), {_WITHOUT}"
        )


def _choice(settings: Settings) -> str:
    choice = str((settings or {}).get(_SETTING, "AUTO")).upper()
    if choice not in _CHOICES:
        _stop(f"MTRAINING_CUDA={choice}: must be one of {', '.join(_CHOICES)}")
    return choice


def _pure(settings: Settings) -> dict[str, Any]:
    """The settings for scikit-build-core without CMake."""
    return {name: value for name, value in (settings or {}).items() if name != _SETTING} | {"wheel.cmake": "false"}


def _decide(settings: Settings, *, torch_follows: bool = False) -> dict[str, Any]:
    """The settings of a wheel: with MTRAINING_CUDA ON (checked), or without CMake."""
    choice, nvcc = _choice(settings), find_nvcc()
    if choice == "OFF" or (choice == "AUTO" and nvcc is None):
        return _pure(settings)
    check_cuda(nvcc, torch_follows=torch_follows)
    settings = dict(settings or {})
    settings[_SETTING] = "ON"
    settings["cmake.define.CMAKE_CUDA_COMPILER"] = str(nvcc)
    return settings


def _decide_editable(settings: Settings) -> dict[str, Any]:
    """The settings of an editable install: the CUDA library lies in the source tree, where `make cuda` builds it."""
    if _choice(settings) == "ON":
        _stop("an editable install does not build the CUDA library: leave MTRAINING_CUDA out, then run make cuda")
    return _pure(settings)


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """PEP 517: only if the CUDA library is built, CMake and Ninja where the system has none, torch where none imports."""
    settings = _decide(config_settings, torch_follows=True)
    requirements = list(_backend.get_requires_for_build_wheel(settings))
    if settings.get(_SETTING) == "ON" and _torch_here() is None:
        requirements.append(_TORCH)
    return requirements


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """PEP 660: nothing beyond scikit-build-core."""
    return list(_backend.get_requires_for_build_editable(_decide_editable(config_settings)))


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """PEP 517: nothing beyond scikit-build-core."""
    return list(_backend.get_requires_for_build_sdist(config_settings))


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """PEP 517: the wheel, with or without the CUDA library."""
    return _backend.build_wheel(wheel_directory, _decide(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """PEP 660: an editable install."""
    return _backend.build_editable(wheel_directory, _decide_editable(config_settings), metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """PEP 517: the source archive."""
    return _backend.build_sdist(sdist_directory, config_settings)
