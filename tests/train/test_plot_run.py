"""The pictures of a run, from files like those that training writes."""

import json
from pathlib import Path

import matplotlib.image
import numpy as np
import plot_run
import pytest


def write_run(folder: Path, steps: list[int], density: float) -> Path:
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "loss": 5.0 / step, "density": density, "density_by_layer": {"1": density, "2": density / 2}}
        for step in steps
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_is_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "sparse", [1, 10, 20], 0.5)
    blocks = np.tril(np.full((8, 8), 0.1))
    np.savez(
        run / "attention.npz",
        block_attention=blocks,
        block_kept=np.eye(8),
        layer=2,
        head=1,
        density=0.25,
        mass_kept=0.9,
    )
    plot_run.draw_run(run)
    for name in ("loss", "density", "attention"):
        picture = matplotlib.image.imread(run / f"{name}.png")
        assert picture.std() > 0.01, name


def test_lines_of_a_resumed_run_replace_those_before(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [1, 2, 3], 0.5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "loss": 9.0, "density": 0.5, "density_by_layer": {}}) + "\n")
    assert [(line["step"], line["loss"]) for line in plot_run.read_metrics(run)] == [(1, 5.0), (2, 9.0), (3, 5.0 / 3)]


def test_runs_side_by_side(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "mtraining", [1, 5], 0.3), write_run(tmp_path / "dense", [1, 5], 1.0)]
    plot_run.draw_comparison(runs, tmp_path / "compare.png")
    assert matplotlib.image.imread(tmp_path / "compare.png").std() > 0.01


def test_a_run_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics.jsonl: no metrics"):
        plot_run.draw_run(tmp_path)
