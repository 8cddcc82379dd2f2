"""Paths and a runner that the tests of the training job share."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "examples", ROOT / "tools"):
    sys.path.insert(0, str(folder))

Runner = Callable[..., "subprocess.CompletedProcess[str]"]


def stub(path: Path, script: str) -> Path:
    """An executable shell script in place of a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def root() -> Path:
    return ROOT


@pytest.fixture
def run_python(tmp_path: Path) -> Runner:
    """Runs Python in a process of its own with the package on its path: `run_python("-c", code)`."""

    def run(*arguments: str, timeout: float = 300, **variables: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
