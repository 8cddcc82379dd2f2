"""The build: a pure wheel without CUDA, one readable message where CUDA cannot be built, and the set-up's finder."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import build_backend
import pytest

from .conftest import ROOT, stub

SETTING = "cmake.define.MTRAINING_CUDA"


@pytest.fixture
def no_cuda_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


def test_on_without_nvcc_names_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:  # M1
    monkeypatch.setattr(build_backend, "find_nvcc", lambda: None)
    with pytest.raises(SystemExit, match=r"nvcc not found \(CUDACXX, CUDA_HOME and CUDA_PATH unset or wrong"):
        build_backend.get_requires_for_build_wheel({SETTING: "ON"})


def test_auto_without_nvcc_needs_no_cmake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_backend, "find_nvcc", lambda: None)
    assert build_backend.get_requires_for_build_wheel(None) == []


def test_another_cuda_than_torch_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # M1
    """A CUDA of another major version than torch's: both versions in one message, before any compile."""
    import torch

    if torch.version.cuda is None:
        pytest.skip("torch without CUDA")
    nvcc = stub(tmp_path / "bin" / "nvcc", "echo 'Cuda compilation tools, release 9.2, V9.2.148'")
    monkeypatch.setenv("CUDACXX", str(nvcc))
    with pytest.raises(SystemExit, match=rf"is CUDA 9.2, torch .* is built with CUDA {torch.version.cuda}"):
        build_backend.get_requires_for_build_wheel({SETTING: "ON"})


def test_an_nvcc_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDACXX", str(stub(tmp_path / "nvcc", "exit 1")))
    with pytest.raises(SystemExit, match="names no CUDA release"):
        build_backend.get_requires_for_build_wheel({SETTING: "ON"})


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A build environment as pip makes it: an nvcc, and no torch."""
    monkeypatch.setenv("CUDACXX", str(stub(tmp_path / "nvcc", "echo release 13.0")))
    python = stub(tmp_path / "python", f'exec "{sys.executable}" -S -I "$@"')  # no site-packages: no torch
    monkeypatch.setattr(build_backend.sys, "executable", str(python))


@pytest.mark.usefixtures("isolated")
def test_an_isolated_build_asks_for_the_torch_of_the_package() -> None:  # M1
    (torch,) = (name for name in build_backend.get_requires_for_build_wheel(None) if name.startswith("torch"))
    assert torch in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


@pytest.mark.usefixtures("isolated")
def test_a_pure_isolated_build_asks_for_no_torch() -> None:
    assert build_backend.get_requires_for_build_wheel({SETTING: "OFF"}) == []


@pytest.mark.usefixtures("isolated")
def test_a_build_without_torch_says_what_to_do(tmp_path: Path) -> None:  # M1
    with pytest.raises(SystemExit, match="the build environment has none that imports: install torch first") as raised:
        build_backend.build_wheel(str(tmp_path), {SETTING: "ON"})
    assert "\n" not in str(raised.value)


def test_an_editable_install_has_no_cmake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_backend, "find_nvcc", lambda: "/usr/local/cuda/bin/nvcc")
    assert build_backend.get_requires_for_build_editable(None) == []
    with pytest.raises(SystemExit, match="then run make cuda"):
        build_backend.get_requires_for_build_editable({SETTING: "ON"})


def test_a_wrong_choice_names_the_valid_ones() -> None:
    with pytest.raises(SystemExit, match="MTRAINING_CUDA=MAYBE: must be one of AUTO, ON, OFF"):
        build_backend.get_requires_for_build_wheel({SETTING: "maybe"})


@pytest.mark.usefixtures("no_cuda_variables")
def test_nvcc_is_found_in_cuda_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = stub(tmp_path / "cuda" / "bin" / "nvcc", "true")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert build_backend.find_nvcc() == str(nvcc)


def test_wheel_without_cuda_is_pure_python(tmp_path: Path) -> None:
    """It needs neither a compiler nor CMake: both are hidden from the build."""
    empty = tmp_path / "bin"
    empty.mkdir()
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    environment = {**os.environ, "PATH": str(empty), "CC": "/bin/false", "CXX": "/bin/false"}
    run = subprocess.run(
        [*command, "-C", f"{SETTING}=OFF", "-w", str(tmp_path), str(ROOT)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"megatron_mtraining/__init__.py", "megatron_mtraining/py.typed", "megatron_mtraining/launch.py"} <= names
    assert all(name.startswith(("megatron_mtraining/", "megatron_mtraining-")) for name in names)


@pytest.mark.parametrize(
    ("jobs", "expected"), [("2", "2"), ("17", "17"), ("0", None), ("many", None), (None, r"[1-9]\d*")]
)
def test_the_number_of_compilers_at_once(root: Path, jobs: str | None, expected: str | None) -> None:  # M3
    """MAX_JOBS is obeyed; without it, no more compilers than cores, or than the free memory has room for."""
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    environment = {name: value for name, value in os.environ.items() if name != "MAX_JOBS"}
    run = subprocess.run(
        ["cmake", "-P", root / "csrc" / "cmake" / "JobPool.cmake"], env=environment | ({"MAX_JOBS": jobs} if jobs else {}),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.search(r"CUDA compilers at once: (\d+)", run.stdout + run.stderr)
    if expected is None:
        assert run.returncode != 0 and f'MAX_JOBS="{jobs}" is not a positive number' in run.stderr
    else:
        assert (
            found is not None and re.fullmatch(expected, found[1]) and (jobs or int(found[1]) <= (os.cpu_count() or 1))
        )


@pytest.mark.usefixtures("no_cuda_variables")
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "no CUDA compiler: {nvcc} does not exist"),
        ("echo 'Cuda compilation tools, release 12.0, V12.0.1'", "{nvcc} is CUDA 12.0: CUDA >= 12.4 is needed"),
        ("exit 1", "{nvcc} --version does not answer like a CUDA compiler"),
    ],
)
def test_cmake_names_the_compiler_that_will_not_do(
    root: Path, tmp_path: Path, script: str | None, message: str
) -> None:
    """No nvcc in CUDA_HOME, one that is too old, one that does not work: one message each, before any compile."""
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    nvcc = tmp_path / "bin" / "nvcc"
    if script is not None:
        stub(nvcc, script)
    run = subprocess.run(
        ["cmake", "-P", root / "csrc" / "cmake" / "CudaCompiler.cmake"], env={**os.environ, "CUDA_HOME": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode != 0
    assert "".join(message.format(nvcc=nvcc).split()) in "".join(run.stderr.split())  # CMake breaks lines


@pytest.mark.parametrize(
    ("report", "status", "expected"),
    [
        ("    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", 0, 0),
        ("    16 bytes stack frame, 20 bytes spill stores, 20 bytes spill loads", 0, 1),
        ("    8 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads", 0, 1),
        ("ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized", 0, 1),
        ("ptxas info    : (C7508) setmaxnreg ignored to maintain minimum register requirements.", 0, 1),
        ("x.cu(3): error: expected a declaration", 2, 2),
    ],
)
def test_the_build_refuses_what_the_compiler_only_reports(
    root: Path, tmp_path: Path, report: str, status: int, expected: int
) -> None:
    """Spills and ignored instructions fail a compile, with what was said; other failures keep their status."""
    compiler = stub(tmp_path / "compiler", f"echo '{report}' >&2; exit {status}")
    run = subprocess.run(
        ["sh", root / "csrc" / "cmake" / "checked_nvcc.sh", compiler], capture_output=True, text=True, check=False
    )
    assert run.returncode == expected
    assert (report in run.stdout) == (expected != 0)
    assert ("the build refuses them" in run.stderr) == (expected == 1)


def find_python(folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """The finder with nothing but stubs of `folder` and the shell's own tools on its PATH, and an empty home."""
    environment = {"PATH": str(folder), "HOME": str(folder / "home"), **variables}
    script = str(ROOT / "tools" / "find_python.sh")
    return subprocess.run(["/bin/sh", script], env=environment, capture_output=True, text=True, check=False)


def test_finder_runs_candidates_and_passes_over_stubs(tmp_path: Path) -> None:
    """A version manager's `python3.12` that only prints an error is on the PATH before the one that works."""
    stub(tmp_path / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    stub(tmp_path / "python3", f'exec "{sys.executable}" "$@"')
    run = find_python(tmp_path)
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()).exists()
    assert run.stderr == ""


def test_finder_looks_into_pyenv(tmp_path: Path) -> None:
    stub(tmp_path / "python3.12", "exit 127")
    stub(tmp_path / "pyenv" / "versions" / "3.12.9" / "bin" / "python3.12", f'exec "{sys.executable}" "$@"')
    run = find_python(tmp_path, PYENV_ROOT=str(tmp_path / "pyenv"))
    assert run.returncode == 0, run.stderr


def test_a_python_that_is_told_must_work(tmp_path: Path) -> None:
    stub(tmp_path / "old", "exit 1")
    run = find_python(tmp_path, PYTHON=str(tmp_path / "old"))
    assert run.returncode == 1
    assert run.stderr.splitlines() == [
        f"PYTHON={tmp_path}/old: must be a Python 3.12 or newer with the venv and ensurepip modules"
    ]
