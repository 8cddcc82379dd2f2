"""The job behind `make train`, small: four processes as two nodes of two, metrics, checkpoint, resumption, pictures."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT, Runner

SEQ, STEPS = 512, 4
FIELDS = {
    "step",
    "loss",
    "tokens_per_s",
    "density",
    "imbalance_worker",
    "imbalance_step",
    "index_share",
    "density_by_layer",
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Text enough for short sequences, in one document."""
    path = tmp_path / "text.py"
    path.write_bytes((ROOT / "examples" / "train_options.py").read_bytes() * 8)
    return path


def read(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_job_trains_draws_and_resumes(run_python: Runner, tmp_path: Path, text: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run = tmp_path / "runs" / "small"

    def job(*arguments: str) -> str:
        common = ["--seq", str(SEQ), "--steps", str(STEPS), "--data", str(text), "--name", "small"]
        result = run_python("examples/train.py", *common, *arguments, timeout=900)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    output = job("--extra", "--save-interval 2")
    assert "--attention-backend mtraining" in output
    whole = read(run)
    assert [line["step"] for line in whole] == [1, 2, 3, 4]
    for line in whole:
        assert set(line) >= FIELDS
        assert 0 < line["density"] <= 1 + 64 / SEQ
        assert set(line["density_by_layer"]) == {"0", "1"}
        assert line["imbalance_worker"] >= 1
        assert line["imbalance_step"] >= 1
        assert 0 < line["index_share"] < 1
        assert line["tokens_per_s"] > 0
    assert whole[-1]["loss"] < whole[0]["loss"]
    files = {path.relative_to(run).parts[0] for path in run.rglob("*")}
    assert files >= {
        "checkpoint",
        "tensorboard",
        "loss.png",
        "density.png",
        "attention.png",
        "log.txt",
        "metrics.jsonl",
    }

    # As if it had been stopped after step 2: the steps after that are trained again, to the same losses.
    (run / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("2")
    shutil.rmtree(run / "checkpoint" / "iter_0000004")
    job("--resume")
    again = read(run)[len(whole) :]
    assert [line["step"] for line in again] == [3, 4]
    assert [line["loss"] for line in again] == pytest.approx([line["loss"] for line in whole[2:]], rel=1e-6)
