"""How `make train` passes its options on: only those of the command line, word for word; and that `make` lists them."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import ROOT, stub

OPTIONS = ("NAME", "ATTENTION", "SEQ", "STEPS", "NPROC", "INNER", "TOP_P", "DATA", "RESUME", "EXTRA")
INSTALLED_AFTER = ("pyproject.toml", "constraints.txt", "tools/build_backend.py", "tools/setup_env.py")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the Makefile, set up as far as make can tell, whose Python prints its arguments, one a line."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in INSTALLED_AFTER:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    stub(tmp_path / ".venv" / "bin" / "python", """printf '%s\\n' "$@" """)
    (tmp_path / ".venv" / "installed").touch()
    return tmp_path


def run_make(project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")} | variables
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def make(project: Path, *arguments: str, **variables: str) -> list[str]:
    run = run_make(project, *arguments, **variables)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.parametrize(
    ("variable", "word"),
    [
        ("EXTRA=--some-flag", "--extra=--some-flag"),
        ('EXTRA=--foo "a b"', '--extra=--foo "a b"'),
        ("EXTRA=--foo 'a b' `id` ; $$HOME", "--extra=--foo 'a b' `id` ; $HOME"),
        ("DATA=/a folder/text", "--data=/a folder/text"),
        ("STEPS=-3", "--steps=-3"),
        ("RESUME=no", "--resume=no"),
        ("TOP_P=0.5", "--top-p=0.5"),
    ],
)
def test_a_value_arrives_as_it_was_given(project: Path, variable: str, word: str) -> None:
    assert make(project, "train", variable) == ["examples/train.py", word]


def test_every_option_is_passed_on(project: Path) -> None:
    given = make(project, "train", *(f"{name}=7" for name in OPTIONS))
    assert given[1:] == [f"--{name.lower().replace('_', '-')}=7" for name in OPTIONS]


def test_the_environment_sets_no_option(project: Path) -> None:
    """WSL, for one, has the machine's name in NAME."""
    assert make(project, "train", **dict.fromkeys(OPTIONS, "7")) == ["examples/train.py"]


def test_an_empty_variable_is_the_default(project: Path) -> None:
    assert make(project, "train", "SEQ=", "NAME=") == ["examples/train.py"]


def test_a_misspelt_option_is_refused(project: Path) -> None:
    """It would count for nothing; variables of the set-up and of the environment are no options of the training."""
    make(project, "train", "CUDA=OFF", "PYTHON=python3.12", TOPP="0.5")
    run = run_make(project, "train", "TOPP=0.5")
    assert run.returncode == 2 and run.stdout == ""
    assert f"make train: TOPP: no such option; valid: {' '.join(OPTIONS)}." in run.stderr
    assert run.stderr.count("\n") == 1


def test_make_lists_every_option_and_target(project: Path) -> None:
    text = "\n".join(make(project))
    makefile = (ROOT / "Makefile").read_text()
    targets = next(line for line in makefile.splitlines() if line.startswith(".PHONY:")).split()[1:]
    missing = [target for target in targets if target != "help" and not re.search(rf"make {target}[ :]", text)]
    missing += [name for name in (*OPTIONS, "PYTHON", "CUDA", "PYTEST_ARGS") if not re.search(rf"\b{name}=", text)]
    assert missing == []
