"""Training on four ranks: what is started, where its ranks are, what is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import megatron_four, megatron_report, megatron_runs, megatron_single, preloaded, run_hosts
from benchmarks.run_pool import Run, outcome

ROOT = Path(__file__).parents[2]
LINE = "iteration 1/ 5 | elapsed time per iteration (ms): 1.0 | lm loss: 2.0E+00 | grad norm: 2.0 | density: 0.5140 (layers"
TWO_BY_TWO = "> megatron_mtraining: hierarchical ring, inner size 2 (asked for), 2 communicators made"
FLAT = "> megatron_mtraining: flat ring, inner size 4 (asked for), 1 communicators made"


@pytest.fixture
def four(tmp_path):
    options = megatron_runs.Options(tmp_path / "new", tmp_path / "old", "data", tmp_path, 65536, "")
    return megatron_single.Single(options, tmp_path, ranks=4, hosts=2)


def value(run, option, count=1):
    """What a run's command gives to an option at last."""
    words = list(run.command)
    at = len(words) - words[::-1].index(option)
    return words[at] if count == 1 else words[at : at + count]


def test_every_way_to_share_the_work_has_four_ranks_and_a_run_of_one_gpu_beside_it(four):
    runs = {run.name: run for run in megatron_four.splits(four)}
    assert list(runs)[:2] == ["cp4_2x2_capped", "cp4_flat_capped"]
    assert {f"{split}_{share}" for split in megatron_four.SPLITS for share in ("capped", "p95", "p1")} < set(runs)
    beside = {run.name for run in megatron_four.one(four)}
    for name, run in runs.items():
        words = run.command
        sizes = [int(value(run, option)) if option in words else 1 for option in (
            "--context-parallel-size", "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
        )]  # fmt: skip
        assert sizes[0] * sizes[1] * sizes[2] == (2 if name.startswith("dp2") else 4), name
        assert (sizes[0] == 4) == ("cp4" in name)
        assert ("--sequence-parallel" in words) == ("tp2" in name)
        assert megatron_four.reference_of(name) in beside
        assert value(run, "--attention-backend") == ("auto" if name.startswith("dense") else "mtraining")
        if "2x2" in name:
            assert value(run, "--hierarchical-context-parallel-sizes", 2) == ["2", "2"]
            assert "--mtraining-ring" not in words
    assert value(runs["cp4_flat_p1"], "--mtraining-ring") == "flat"
    assert megatron_four.reference_of("older_cp4_2x2_p95") == "one_p95"
    assert megatron_four.reference_of("mtp_cp4_2x2") is None  # another model
    assert (
        value(next(run for run in megatron_four.one(four) if run.name == "one_capped_local"), "--transformer-impl")
        == "local"
    )
    assert str(four.options.older / "pretrain_gpt.py") in runs["older_cp4_2x2_p95"].command


def test_ranks_that_draw_their_own_weights_load_those_of_one_gpu(four, tmp_path):
    for run in (*megatron_four.splits(four), *megatron_four.more(four)):
        if run.name in megatron_four.LONGER_RUNS:
            continue
        loads = run.name.startswith(("tp2", "pp2", "dense_tp2", "interleaved_pp2"))
        assert (run.after == "drawn_small") == loads == ("--load" in run.command)
        if loads:
            assert value(run, "--load") == f"{tmp_path}/drawn_small"
            assert value(run, "--make-vocab-size-divisible-by") == ("64" if "tp2" in run.name else "128")
    drawn = next(megatron_four.one(four))
    assert (drawn.name, value(drawn, "--save"), value(drawn, "--lr")) == ("drawn_small", f"{tmp_path}/drawn_small", "0")


def test_a_checkpoint_of_four_ranks_goes_on_in_another_split(four):
    runs = {run.name: run for run in megatron_four.more(four)}
    saved, resumed = runs["saved_cp4_2x2_p1"], runs["resumed_tp2_cp2_p1"]
    assert resumed.after == saved.name
    assert value(saved, "--save") == value(resumed, "--load")
    assert (value(saved, "--exit-interval"), value(resumed, "--exit-interval")) == ("5", "10")
    assert value(runs["one_longer"], "--exit-interval") == "10"
    assert {megatron_four.reference_of(run.name) for run in (saved, resumed)} == {"one_longer"}


def test_curves_are_of_the_larger_model_and_reported_with_the_others(four):
    runs = {run.name: run for run in megatron_four.curves(four)}
    assert {(value(run, "--train-iters"), value(run, "--num-layers")) for run in runs.values()} == {("50", "14")}
    assert {run.variables["BENCHMARK_HOSTS"] for run in runs.values()} == {"2"}
    assert all(value(run, "--hierarchical-context-parallel-sizes", 2) == ["2", "2"] for run in runs.values())
    beside = {"p1": result("p1", "single", 6.0, 5.0), "p1_cp4_2x2": result("p1_cp4_2x2", "curve", 6.0, 5.5)}
    page = megatron_report.report(beside)
    assert "| `p1_cp4_2x2` - `p1` | 2 | 5.00e-01 | 2.50e-01 |" in page
    assert "## Four ranks" not in page
    assert megatron_report.style_of("p95_cp4_2x2")["dashes"] != megatron_report.style_of("p95_cp2")["dashes"]


def test_stored_curves_are_compared_with_and_not_kept(tmp_path, monkeypatch):
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    Path("runs.jsonl").write_text(json.dumps(result("p1_cp4_2x2", "curve", 6.0, 5.5)))
    Path("stored.json").write_text(
        json.dumps([result("p1", "single", 6.0, 5.0), result("speed_dense", "gated", 3.0, 3.0)])
    )
    monkeypatch.setattr(sys, "argv", "megatron_report runs.jsonl --name new --beside stored.json".split())
    megatron_report.main()
    page = Path("benchmarks/results/new.md").read_text()
    assert "| `p1_cp4_2x2` - `p1` | 2 | 5.00e-01 |" in page and "speed_dense" not in page
    assert [run["name"] for run in json.loads(Path("benchmarks/results/new.json").read_text())] == ["p1_cp4_2x2"]


def test_runs_of_one_gpu_are_on_no_pretended_host(four):
    runs = list(megatron_four.one(four))
    assert {run.variables["CUDA_VISIBLE_DEVICES"] for run in runs} == {"0", "1"}
    for run in runs:
        assert not {name for name in run.variables if name.startswith(("NCCL", "BENCHMARK"))}
        assert run.command[run.command.index("run") + 2] == "1"
    for run in megatron_four.splits(four):
        assert run.variables["BENCHMARK_HOSTS"] == "2"
        assert run.command[run.command.index(str((four.options.megatron if "older" not in run.name else
                           four.options.older) / "pretrain_gpt.py")) - 1] == "4"  # fmt: skip


def test_four_gpus_are_one_host_and_two_are_pretended_to_be_two(capsys, four):
    assert (megatron_four.hosts_for(8), megatron_four.hosts_for(4)) == (1, 1)
    assert (megatron_four.hosts_for(3), megatron_four.hosts_for(2)) == (2, 2)
    with pytest.raises(SystemExit, match="needs two GPUs at least, found 1"):
        megatron_four.hosts_for(1)
    assert list(megatron_four.speed(four)) == []
    assert "left out" in capsys.readouterr().out
    real = megatron_single.Single(four.options, four.sockets, ranks=4)
    runs = list(megatron_four.speed(real))
    assert [run.name for run in runs] == list(megatron_four.SPEED)
    assert {run.kind for run in runs} == {"gated"}
    assert all("BENCHMARK_HOSTS" not in run.variables for run in [*runs, *megatron_four.splits(real)])


def test_a_rank_is_told_its_place_on_its_host(monkeypatch):
    monkeypatch.setenv("BENCHMARK_HOSTS", "2")
    places = [run_hosts.place(rank, 4) for rank in range(4)]
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1", "0", "1"]
    assert {place["LOCAL_WORLD_SIZE"] for place in places} == {"2"}
    names = [place["NCCL_HOSTID"] for place in places]
    assert names[0] == names[1] != names[2] == names[3]
    assert {place["NCCL_NET"] for place in places} == {"Socket"}
    monkeypatch.delenv("BENCHMARK_HOSTS")
    assert [run_hosts.place(rank, 2) for rank in (0, 1)] == [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} for rank in (0, 1)
    ]


def ranks_by_agents(tmp_path, work):
    """Runs `work` on four ranks of two agents; returns the status and what the ranks noted."""
    (tmp_path / "rank_of_agent.py").write_text(f"import os, sys, time\nfrom pathlib import Path\n{work}\n")
    code = (
        "import sys\nfrom benchmarks import preloaded\n"
        f"preloaded.fresh = lambda arguments: ('rank_of_agent', {str(tmp_path)!r})\n"
        "sys.exit(preloaded.run_agents(4, []))"
    )
    environment = os.environ | {"BENCHMARK_HOSTS": "2", "PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"}
    status = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, timeout=120, check=False
    ).returncode
    return status, {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}


def test_two_agents_of_torchrun_start_the_ranks_of_two_hosts(tmp_path):
    noted = "{name: os.environ[name] for name in ('LOCAL_RANK', 'WORLD_SIZE', 'MASTER_PORT', 'NCCL_HOSTID')}"
    status, ranks = ranks_by_agents(
        tmp_path, f"import json\nPath(sys.argv[1], os.environ['RANK'] + '.json').write_text(json.dumps({noted}))"
    )
    assert status == 0
    assert sorted(ranks) == ["0", "1", "2", "3"]
    assert [ranks[rank]["LOCAL_RANK"] for rank in "0123"] == ["0", "1", "0", "1"]
    assert [ranks[rank]["NCCL_HOSTID"] for rank in "0123"] == ["pretended-host-0"] * 2 + ["pretended-host-1"] * 2
    assert len({ranks[rank]["MASTER_PORT"] for rank in "0123"}) == 1
    assert {ranks[rank]["WORLD_SIZE"] for rank in "0123"} == {"4"}


def test_an_agent_that_fails_ends_the_other(tmp_path):
    status, _ = ranks_by_agents(tmp_path, "if os.environ['RANK'] == '3': sys.exit(5)\ntime.sleep(100)")
    assert status == 1  # torchrun's


def test_without_a_server_the_agents_start_the_ranks(monkeypatch):
    monkeypatch.setattr(preloaded, "PATIENCE", 0.0)
    monkeypatch.setattr(preloaded, "run_agents", lambda ranks, arguments: (ranks, arguments))
    assert preloaded.run("/no/socket", 4, ["script.py"]) == (4, ["script.py"])


@pytest.mark.parametrize(
    ("name", "log", "status"),
    [
        ("cp4_2x2_p1", TWO_BY_TWO, 0),
        ("older_cp4_2x2_p95", TWO_BY_TWO, 0),
        ("cp4_2x2_p1", FLAT, 1),
        ("cp4_flat_p1", FLAT, 0),
        ("cp4_flat_p1", "", 1),
        ("dp2_cp2_p95", "> megatron_mtraining: flat ring, inner size 2 (why), 1 communicators made", 0),
        ("dense_cp4", "", 0),
    ],
)
def test_a_run_with_other_rings_than_it_is_about_has_failed(name, log, status, tmp_path):
    path = tmp_path / f"{name}.log"
    path.write_text(f"{log}\n{LINE}\n")
    result = outcome(Run(name, "four", ("true",)), path, 0, 1.0)
    assert result["density"] == 0.514
    assert megatron_four.judge(result, tmp_path)["status"] == status


def result(name, kind, *loss, norms=(2.0, 2.0), **more):
    return {"name": name, "kind": kind, "status": 0, "seconds": 9.0, "steps": [1, 2], "ms": [9.0, 9.0],
            "loss": list(loss), "grad_norm": list(norms), "variables": {}} | more  # fmt: skip


def test_the_page_has_every_run_beside_that_of_one_gpu():
    pretended = {
        "variables": {"BENCHMARK_HOSTS": "2"},
        "ring": "hierarchical ring, inner size 2 (why), 2 communicators made",
        "density": 0.514,
    }
    runs = [
        result("one_dense", "small", 6.0, 5.0),
        result("one_p1", "small", 6.0, 5.0625),
        result("cp4_2x2_p1", "four", 6.0, 5.125, norms=(2.0, 2.5), **pretended),
        result("dense_cp4", "four", 6.25, 5.0),
        result("tp2_cp2_p95", "four", 6.0, 5.0),
        result("one_longer", "small", 6.0, 5.5, 5.0, 4.5, norms=[2.0] * 4, steps=[1, 2, 3, 4]),
        result("resumed_tp2_cp2_p1", "four", 5.25, 4.0, steps=[3, 4]),
    ]
    page = megatron_report.report({run["name"]: run for run in runs})
    assert "## Loss curves" not in page and "## Combinations" not in page and "## One long" not in page
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert rows["one_dense"].endswith("| one |  |  | 1 ... 2 | 6.00000 | 5.00000 |  |  |  |")
    assert rows["one_p1"].endswith("| `one_dense` | 6.2e-02 | 0.0e+00 |")
    where = "four on 2 pretended hosts | hierarchical ring, inner size 2 | 0.51"
    assert f"| ran | {where} | 1 ... 2 | 6.00000 | 5.12500 | `one_p1` | 6.2e-02 | 2.5e-01 |" in rows["cp4_2x2_p1"]
    assert "| four, a GPU each |" in rows["dense_cp4"] and rows["dense_cp4"].endswith(
        "| `one_dense` | 2.5e-01 | 0.0e+00 |"
    )
    assert rows["tp2_cp2_p95"].endswith("| 6.00000 | 5.00000 |  |  |  |")  # the run of one GPU is missing
    assert rows["resumed_tp2_cp2_p1"].endswith(
        "| `one_longer` | 2.5e-01 | 0.0e+00 |"
    )  # not over the mean of steps 3 and 4
