"""The page and the picture of the training runs."""

from __future__ import annotations

import json

import pytest

from benchmarks import megatron_pair, megatron_report, megatron_runs, megatron_single


def curve(name, *loss, kind="single", status=0):
    steps = list(range(1, len(loss) + 1))
    return {"name": name, "kind": kind, "status": status, "seconds": 1.0, "steps": steps, "loss": list(loss),
            "grad_norm": [1.0] * len(loss), "ms": [100.0] * len(loss)}  # fmt: skip


RUNS = {
    run["name"]: run
    for run in (
        curve("dense", 6.0, 5.0, 4.0),
        curve("dense_again", 6.0, 5.1, 4.0),
        curve("dense_cp2", 6.0, 5.0, 4.3, kind="curve"),
        curve("p1", 6.0, 5.0, 4.1),
        curve("p1_cp2", 6.0, 5.05, kind="curve", status=124),
    )
}


def test_distances_from_every_dense_run_but_itself():
    gaps = megatron_report.from_dense("dense", RUNS)
    assert [round(gap["largest"], 9) for gap in gaps] == [0.1, 0.3]
    gaps = megatron_report.from_dense("p1_cp2", RUNS)
    assert [(gap["steps"], round(gap["largest"], 9)) for gap in gaps] == [(2, 0.05)] * 3


def test_the_noise_is_that_of_as_many_steps():
    """A curve that was cut off is not judged by distances that the dense runs only have later."""
    for steps, largest, mean in ((3, 0.3, 0.4 / 3), (2, 0.1, 0.05), (1, 0.0, 0.0)):
        found = megatron_report.noise(steps, RUNS)
        assert (found["largest"], found["mean"]) == pytest.approx((largest, mean))
    assert megatron_report.noise(4, RUNS) is None


def test_no_path_of_the_machine_is_kept():
    run = curve("p1", 6.0) | {"command": ["/tmp/a"], "variables": {"BENCHMARK_GATE": "/tmp/b.gate", "A": "1"}}
    kept = megatron_report.without_paths(run)
    assert kept == curve("p1", 6.0) | {"variables": {"A": "1"}} and run["command"]


def test_the_page_tells_the_noise_and_what_was_cut_off():
    page = megatron_report.report(RUNS)
    assert "| `dense` | 3 | 1.0e-01 to 3.0e-01 | 3.0e-01 | 3.3e-02 to 1.0e-01 | 1.3e-01 |" in page
    assert "| `p1_cp2` | 2 | 5.0e-02 to 5.0e-02 | 1.0e-01 | 2.5e-02 to 2.5e-02 | 5.0e-02 |" in page
    assert "| `p1_cp2` | timed out | 1 ... 2 | 6.00000 | 5.05000 |" in page
    assert "| `p1_cp2` - `p1` | 2 | 5.00e-02 | 2.50e-02 |" in page


def test_the_time_of_a_step_is_that_of_the_second_half():
    run = curve("speed_sparse", *[4.0] * 8) | {"ms": [9000, 4000, 600, 600, 200, 210, 190, 205]}
    assert megatron_report.step_ms(run) == 202.5


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    megatron_report.plot(RUNS, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_curves_with_tensor_parallelism_load_what_one_gpu_drew(tmp_path):
    options = megatron_runs.Options(tmp_path, tmp_path, "data", tmp_path, 65536, "")
    pair = megatron_single.Single(options, tmp_path, ranks=2)
    runs = {run.name: run for run in megatron_pair.curves(pair)}
    (drawn,) = megatron_pair.drawn(pair)
    assert [name for name, run in runs.items() if run.after == "drawn"] == ["p1_tp2", "p95_tp2", "dense_tp2"]
    for name, run in runs.items():
        assert (f"{tmp_path}/drawn" in run.command) == name.endswith("tp2")
    words = list(drawn.command)
    assert words[words.index("run") + 2] == "1"  # rank
    assert [words[-words[::-1].index("--lr") + at] for at in (-1, 0)] == ["--lr", "0"]  # the last one counts
    json.dumps(runs["p1_tp2"].command)


def test_functional_tests_are_recorded_twice_into_different_files(tmp_path):
    options = megatron_runs.Options(tmp_path, tmp_path, "data", tmp_path, 65536, "")
    runs = list(megatron_pair.golden(megatron_single.Single(options, tmp_path, ranks=2)))
    assert [run.name.rpartition("_")[2] for run in runs] == ["recorded", "again"] * 2
    assert all("--record" in run.command for run in runs)
    assert [("--values" in run.command) for run in runs] == [False, True] * 2
