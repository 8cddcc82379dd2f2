"""`examples/nemo/launch.py` with NeMo-Run: what it would start, on this machine and on Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("nemo_run", reason="needs NeMo-Run: the extra nemo")

from .conftest import example

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "nemo" / "launch.py"
RECIPE = ["qwen25_3b_pretrain_32gpu_512k_config", "checkpoint.pretrained_checkpoint=/data/checkpoint"]


@pytest.fixture
def launch() -> ModuleType:
    return example("launch")


def shown(home: Path, *words: str) -> str:
    """What a dry run prints, without the white space of the terminal's columns."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *words, "--dry-run", "--", *RECIPE],
        env={**os.environ, "NEMORUN_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return re.sub(r"\s+", "", run.stdout)


def test_slurm_gets_nodes_tasks_mounts_and_the_recipe(tmp_path: Path) -> None:
    words = ["--nodes", "4", "--slurm", "account", "partition", "--image", "nemo:25", "--mount", "/data"]
    text = shown(tmp_path, *words)
    for expected in (
        "#SBATCH--account=account",
        "#SBATCH--partition=partition",
        "#SBATCH--nodes=4",
        "#SBATCH--ntasks-per-node=8",
        "--container-imagenemo:25",
        "/data:/data",
        "".join(["python", str(SCRIPT.with_name("run_recipe.py")), *RECIPE]),
    ):
        assert expected in text, expected


def test_here_torchrun_starts_a_process_a_gpu(launch: ModuleType) -> None:
    args, words = launch.parse(["--gpus", "2", "--", *RECIPE])
    executor = launch.make_executor(args)
    assert (executor.ntasks_per_node, executor.get_launcher().__class__.__name__) == (2, "Torchrun")
    assert words == RECIPE


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "8"], "name the recipe after --"),
        (["--nodes", "2", "--", "recipe"], "needs --slurm"),
        (["--nodes", "0", "--", "recipe"], "argument --nodes: 0: must be a number from 1 up"),
        (["--gpus", "many", "--", "recipe"], "argument --gpus: many: must be a number from 1 up"),
        (["--image", "nemo:25", "--", "recipe"], "--image: a container needs --slurm"),
        (["--mount", "/data", "--", "recipe"], "--mount: a container needs --slurm"),
    ],
)
def test_mistakes_are_named(launch: ModuleType, words: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        launch.main(words)
    assert message in capsys.readouterr().err
