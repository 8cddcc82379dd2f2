"""Rings on real ranks and over numbers of ranks, as far as that runs without a GPU: slow links, bytes, predictions, tables."""

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import bench_ring, bench_scaling
from benchmarks.plot_scaling import bandwidth
from benchmarks.problems import Problem
from benchmarks.ring import hosts
from benchmarks.ring.cases import Case, case_index, pattern_index
from benchmarks.ring.prediction import CUDNN_RATES, planned_traffic, predicted, predicted_gathered, ring_rows
from benchmarks.ring.real import Conditions, RealRank, ring_groups
from benchmarks.ring.real_rows import checked_rows, slow_exchange_ms, timed_rows
from benchmarks.ring.run_ranks import real_cases, runs, throttled_cases
from benchmarks.ring.scaling import Start, starts, table
from benchmarks.ring.simulated import dense_rates
from benchmarks.ring.throttle import SlowLinks, Throttle
from megatron_mtraining.schedule import Channel, Transfer
from megatron_mtraining.simulator import H200_LINKS, Link
from megatron_mtraining.simulator.timeline import Ring

from .helpers import refusal

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def transfer(send_to: int, receive_from: int) -> Transfer:
    return Transfer(Channel.OUTER, send_to, receive_from, 0, 0)


def test_a_throttle_holds_back_what_crosses_a_nodes_border() -> None:
    throttle = Throttle(node_size=2, gbs=2.0, us=10.0)
    whole, half = torch.empty(4000, dtype=torch.uint8), torch.empty(2000, dtype=torch.uint8)
    assert throttle.seconds(0, [(transfer(1, 1), whole, whole)]) == 0
    assert throttle.seconds(0, [(transfer(2, 2), whole, whole)]) == pytest.approx(10e-6 + 4000 / 2e9)
    # A flat ring: rank 1 sends over the border and receives within the node; both directions pass at once.
    assert throttle.seconds(1, [(transfer(2, 0), half, whole)]) == pytest.approx(10e-6 + 2000 / 2e9)
    both = [(transfer(2, 0), half, half), (transfer(3, 2), half, half)]
    assert throttle.seconds(1, both) == pytest.approx(10e-6 + 4000 / 2e9)
    assert throttle.link(Link(1e-6, 2e9)) == Link(pytest.approx(11e-6), pytest.approx(1e9))
    assert throttle.label.startswith("artificial, 2 GB/s + 10 us")
    assert bandwidth({"links": throttle.label}) == 2.0 and bandwidth({"links": "as it is"}) is None
    for wrong in ({"gbs": 0.0}, {"gbs": 1.0, "us": -1.0}, {"gbs": float("nan")}, {"gbs": 1.0, "way": "hope"}):
        with pytest.raises(ValueError, match="must be (positive|one of copies, kernel)"):
            Throttle(2, **wrong)
    both = SlowLinks((2.0, 1.0), 10.0, ("copies", "kernel")).throttles(4)
    assert [(t.node_size, t.gbs, t.way) for t in both] == [
        (4, 2.0, "copies"), (4, 1.0, "copies"), (4, 2.0, "kernel"), (4, 1.0, "kernel"),
    ]  # fmt: skip
    assert both[2].label == "artificial, 2 GB/s + 10 us, by a kernel"


def _ranks_worker(rank: int, folder: str) -> None:
    """Four gloo ranks, 2 x 2: a slow link changes times of outer exchanges alone; bytes and bits are those of the plan."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    problem = Problem(1024, 4, 2, 64, device="cpu")
    index = pattern_index(problem, "bands")
    throttle = Throttle(node_size=2, gbs=1.0, us=150_000.0)
    for case in (Case("striped, hierarchical", hierarchical=True), Case("zigzag, flat", "zigzag")):
        ring = case.ring(4, 2)
        plain = RealRank(problem, case, ring, ring_groups(ring.inner_size), index)
        slow = RealRank(problem, case, ring, plain.groups, index, Conditions(throttle))
        with slow.conditions.links():
            found = slow.results()
        assert all(torch.equal(a, b) for a, b in zip(plain.results(), found, strict=True))
        for times in slow.profiled():
            assert slow_exchange_ms(times) >= 150 and times.exposed_ms > 50
            inner = [t.end - t.begin for t in times.transfers if not t.channel.startswith("outer")]
            # A flat ring's exchanges all cross the border somewhere, and each waits for its whole batch.
            assert case.hierarchical == (min(inner) < 150), inner
        rows = checked_rows(RealRank(problem, case, ring, plain.groups, index, Conditions(pretended_hosts=2)))
        assert [row["pass"] for row in rows] == ["forward", "backward"]
        for row in rows:
            assert row["bits_equal_one_process"] is True and row["hosts"] == hosts.label(2)
            assert row["every_rank_as_planned"] is True
            assert not [name for name in row if name.endswith("ms") or name == "tflops"], row
            assert row["inner_mib"] == row["planned_inner_mib"] > 0
            assert row["outer_mib"] == row["planned_outer_mib"] and (row["outer_mib"] > 0) == case.hierarchical
        timed = timed_rows(slow, 1)
        assert [row["pass"] for row in timed] == ["index", "forward", "backward", "call"]
        assert all(row["links"] == throttle.label and row["ms"] > 0 for row in timed)
        assert not any("predicted_ms" in row for row in timed), "the simulator knows no CPU"
    dist.barrier()
    dist.destroy_process_group()


def test_rows_of_real_ranks(tmp_path: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(_ranks_worker, (str(tmp_path),), nprocs=4)


def test_planned_bytes_are_hops_times_chunks() -> None:
    for chunks in (1, 4):
        flat, nodes = Ring(4, 4, 4), Ring(4, 2, 2)
        forward = planned_traffic(nodes.plan(False, chunks), 1.0, 100.0)
        assert (forward.inner, forward.outer) == (2, 1)
        assert planned_traffic(flat.plan(False, chunks), 1.0, 100.0).inner == 3
        backward = planned_traffic(flat.plan(True, chunks), 1.0, 100.0)
        # The chunk held last is at hand; W - 1 gradients travel, and W - 2 chunks of keys: the last one is the rank's own.
        assert (backward.inner, backward.outer) == (302, 0)


def test_predictions_know_the_slow_link() -> None:
    problem = Problem(65536, 4, 2, 64, device="cpu")
    index = pattern_index(problem, "bands")
    flat, nodes = Case("flat"), Case("nodes", hierarchical=True)
    slow = Throttle(2, gbs=2.0, us=50.0)

    def ms(case: Case, throttle: Throttle | None) -> float:
        return predicted(problem, case, case.ring(4, 2), index, throttle)["call"]["predicted_ms"]

    assert ms(flat, slow) > ms(flat, None) and ms(flat, slow) > ms(nodes, slow) >= ms(nodes, None)
    found = predicted(problem, nodes, nodes.ring(4, 2), index, slow)
    parts = [found[name]["predicted_ms"] for name in ("index", "forward", "backward")]
    assert found["call"]["predicted_ms"] == pytest.approx(sum(parts), abs=2e-3)
    dense = Case("dense", dense=True)
    everything = case_index(problem, dense, index)
    assert "index" not in predicted(problem, dense, dense.ring(4, 4), everything)
    rows = ring_rows(problem, dense, dense.ring(4, 4), index, None)
    assert [row["pass"] for row in rows] == ["forward", "backward", "call"] and rows[0]["density"] > 1 - 1e-3
    assert not any("ms" in row for row in rows)


def test_gathered_is_predicted_from_one_gpus_rates() -> None:
    rows = json.loads((RESULTS / "ring-2026-11-30-1-gpu.json").read_text())["rows"]
    measured = dense_rates(rows, "cuDNN dense, one rank", 262144)
    assert CUDNN_RATES.forward == pytest.approx(measured.forward, rel=1e-3)
    assert CUDNN_RATES.backward == pytest.approx(measured.backward, rel=1e-3)
    one, four = (predicted_gathered(Problem(262144, 16, 2, 128, device="cpu"), size, size) for size in (1, 4))
    chunk = 2 * 65536 * 2 * 128 * 2
    traffic = 3 * (H200_LINKS.intra.latency + chunk / H200_LINKS.intra.bandwidth) * 1e3
    assert four["forward"]["predicted_ms"] == pytest.approx(one["forward"]["predicted_ms"] / 4 + traffic, abs=1e-3)


def test_pretended_hosts() -> None:
    assert hosts.local_size(4, 2, 2) == 2
    names = [hosts.environment(rank, 2)["NCCL_HOSTID"] for rank in range(4)]
    assert names[0] == names[1] != names[2] == names[3]
    assert hosts.environment(0, 2)["NCCL_SOCKET_IFNAME"] == "lo" and "no times" in hosts.label(2)
    for world, count, gpus in ((4, 3, 2), (4, 1, 4), (4, 2, 1)):
        with pytest.raises(ValueError, match="pretended hosts"):
            hosts.local_size(world, count, gpus)


def test_what_is_run_on_so_many_ranks() -> None:
    assert [case.name for case, _ in real_cases(1, 1, True)] == ["ours, one rank", "dense, one rank"]
    assert [(case.name, ring.inner_size) for case, ring in real_cases(2, 1, True)] == [
        ("striped, hierarchical", 1), ("zigzag, hierarchical", 1),
    ]  # fmt: skip
    names = {case.name: ring for case, ring in real_cases(4, 2, True)}
    assert names["striped, flat"] == Ring(4, 4, 2) and names["striped, hierarchical"] == Ring(4, 2, 2)
    assert {"striped, rotated, hierarchical", "zigzag, hierarchical", "dense, striped", "dense, zigzag"} < set(names)
    assert throttled_cases(4, 4) == []
    found = [(case.name, throttle) for case, _, throttle in runs(4, [4, 2], SlowLinks((40.0,), 5.0), False) if throttle]
    assert {name for name, _ in found} == {
        "striped, hierarchical",
        "striped, flat",
        "zigzag, hierarchical",
        "zigzag, flat",
    }
    assert {throttle for _, throttle in found} == {Throttle(2, 40.0, 5.0)}


def test_starts_of_a_scaling_run() -> None:
    slow = SlowLinks((10.0,), 50.0, ("copies", "kernel"))
    found = starts([1, 2, 4], [512], [256], [1, 32, 8], slow)
    assert found[:3] == [Start(1, (256, 512), (1,)), Start(2, (512,), (2,)), Start(4, (512, 1024), (4, 2))]
    assert [(start.connections, start.slow, start.inner) for start in found[3:]] == [
        (32, slow, (2,)), (8, SlowLinks(), (2,)), (1, SlowLinks(), (2,)),
    ]  # fmt: skip
    words = found[3].words()
    assert " --outer-gbs 10.0 --outer-us 50.0 --outer-by copies kernel " in " ".join(words)
    assert "--no-peer" in words and "--dense" not in words
    assert starts([1], [512], [], [1], slow) == [Start(1, (512,), (1,))]
    assert len({start.name for start in found}) == len(found)


def row(case: str, size: int, seq_len: int, name: str, **more: object) -> dict[str, object]:
    return {
        "case": case, "cp_size": size, "inner_size": size, "seq_len": seq_len, "density": 0.05, "links": "as it is",
        "connections": "default", "pass": name, **more,
    }  # fmt: skip


def test_the_scaling_table() -> None:
    """Four ranks at a quarter of the time: efficiency 1; at the same local length the work a rank grows with the ranks."""
    rows = []
    for size, seq_len, ms in ((1, 1000, 80.0), (4, 1000, 25.0), (4, 4000, 400.0), (2, 1000, 40.0)):
        name = "ours, one rank" if size == 1 else "striped"
        rows.append(row(name, size, seq_len, "call", ms=ms, predicted_ms=80.0 / size))
        waits = {"ms": 1.0, "exposed_ms": 0.25, "predicted_exposed_ms": 0.0}
        rows += [row(name, size, seq_len, phase, **waits) for phase in ("forward", "backward")]
    # None of these is a point of the series: another number of connections, a slow link, a ring in nodes.
    rows.append(row("striped", 2, 1000, "call", ms=1.0) | {"connections": "32"})
    rows.append(row("striped", 2, 1000, "call", ms=1.0) | {"links": Throttle(1, 1.0).label})
    rows.append(row("striped", 4, 1000, "call", ms=1.0) | {"inner_size": 2})
    found = table(rows, [1000], [1000])
    assert [(r["constant"], r["ranks"], r["efficiency"]) for r in found] == [
        ("global 1000", 1, 1.0), ("global 1000", 2, 1.0), ("global 1000", 4, 0.8),
        ("local 1000", 1, 1.0), ("local 1000", 4, 0.8),
    ]  # fmt: skip
    assert found[2]["exposed_ms"] == 0.5 and found[2]["predicted_efficiency"] == 1.0
    assert {r["series"] for r in found} == {"ours, striped"}
    unmeasured = [{k: v for k, v in r.items() if k != "ms"} for r in rows]
    assert all("efficiency" not in r and "predicted_efficiency" in r for r in table(unmeasured, [1000], []))


def start(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.bench_scaling", "--out", str(tmp_path), "--heads", "4/2/64", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)


def test_a_scaling_run_on_the_cpu(tmp_path: Path) -> None:
    """One and two gloo ranks, and two over a slow link: all starts, one table, one picture."""
    words = "--device cpu --sizes 1 2 --global 1024 --local 512 --repeats 1 --connections 32 --outer-gbs 0.05 --outer-by copies"
    done = start(tmp_path, *words.split())
    assert done.returncode == 0, done.stdout + done.stderr
    [results], [picture] = tmp_path.glob("scaling-*-2-cpus.json"), tmp_path.glob("scaling-*-2-cpus.png")
    rows = json.loads(results.read_text())["rows"]
    scaling = [r for r in rows if "series" in r]
    assert {r["constant"] for r in scaling} == {"global 1024", "local 512"} and {r["ranks"] for r in scaling} == {1, 2}
    assert {"ours, striped", "ours, dense, zigzag", "cuDNN dense, gathered keys"} <= {r["series"] for r in scaling}
    slow = [r for r in rows if r.get("links") == "artificial, 0.05 GB/s + 50 us" and r["pass"] == "forward"]
    assert [r["case"] for r in slow] == ["striped, hierarchical", "zigzag, hierarchical"]
    chunk = 2 * 512 * 2 * 64 * 2  # keys and values, bf16
    assert all(r["slow_exchange_ms"] >= 0.05 + chunk / 0.05e9 * 1e3 and r["connections"] == "32" for r in slow)
    assert all(r["inner_mib"] == 0 and r["outer_mib"] == pytest.approx(chunk / 2**20, abs=1e-3) for r in slow)
    assert picture.stat().st_size > 10_000
    again = start(tmp_path, *words.split(), "--resume")  # takes what has ended
    assert again.returncode == 0 and json.loads(results.read_text())["rows"] == rows
    other = start(tmp_path, *words.replace("--repeats 1", "--repeats 2").split(), "--resume")
    [told] = other.stderr.splitlines()
    assert other.returncode == 1 and told.startswith("--resume: ") and "--repeats 1" in told and "--repeats 2" in told


def test_a_predicted_scaling_run(tmp_path: Path) -> None:
    done = start(tmp_path, *"--predict --sizes 1 2 4 --global 65536 --local 16384 --outer-gbs 1".split())
    assert done.returncode == 0, done.stdout + done.stderr
    [results] = tmp_path.glob("scaling-*-predicted-4-gpus.json")
    data = json.loads(results.read_text())
    assert "predicted, nothing was run" in data["device"]
    assert not any("ms" in r or "efficiency" in r for r in data["rows"])
    slow = {
        r["case"]: r["predicted_ms"]
        for r in data["rows"]
        if "artificial" in str(r.get("links")) and r["pass"] == "call"
    }
    assert slow["striped, flat"] > slow["striped, hierarchical"]


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        (bench_ring, "--seq-lens 4096 --inner 3", "--inner 3: must divide the 4 ranks"),
        (bench_ring, "--seq-lens 4096 --outer-gbs 0", "argument --outer-gbs: 0: must be a positive number"),
        (bench_ring, "--seq-lens 4096 --outer-gbs 10", "--outer-gbs: needs an --inner below the 4 ranks"),
        (bench_ring, "--seq-lens 4096 --outer-gbs ten", "argument --outer-gbs: ten: must be a positive number"),
        (bench_ring, "--seq-lens 4096 --outer-us nan", "argument --outer-us: nan: must be a number of at least 0"),
        (bench_ring, "--seq-lens 4096 --inner 2 --outer-us 5", "--outer-us: needs --outer-gbs"),
        (bench_ring, "--seq-lens 4096 --inner 2 --outer-by kernel", "--outer-by: needs --outer-gbs"),
        (bench_ring, "--seq-lens 4096 --inner 2 2", "--inner 2 2: must be different"),
        (bench_ring, f"--seq-lens 4096 --out {__file__}", f"--out {__file__}: must be a folder, is a file"),
        (bench_ring, "--seq-lens 4096 --pretend-hosts 2 --device cpu", "--pretend-hosts: for GPUs"),
        (bench_ring, "--virtual 2x2 --seq-lens 4096 --inner 2", "--inner: of real ranks, not of --virtual"),
        (bench_scaling, "--sizes 2 2 --predict", "--sizes 2 2: must be different"),
        (bench_scaling, "--sizes 1 3 --predict", "--global 262144: must be a multiple of 384, two chunks"),
        (bench_scaling, "--sizes 2 --predict --local -128", "--local -128: must be a multiple of 128, two chunks"),
        (bench_scaling, "--sizes 2 --predict --outer-us -5", "argument --outer-us: -5: must be a number of at least 0"),
        (bench_scaling, "--sizes 2 --predict --connections 8 8", "--connections 8 8: must be different, 1 to 32"),
        (bench_scaling, "--sizes 2 --predict --connections 64", "--connections 64: must be different, 1 to 32"),
        (bench_scaling, "--sizes 2 --predict --repeats 0", "--repeats 0: must be at least 1"),
        (bench_scaling, "--sizes 2 --predict --timeout 0", "argument --timeout: 0: must be a positive number"),
        (bench_scaling, f"--sizes 2 --predict --out {__file__}", f"--out {__file__}: must be a folder, is a file"),
        (bench_scaling, "--sizes 64", "--sizes 64: there are"),
        (bench_scaling, "--sizes 2 --predict --connections", "--outer-gbs: needs --connections"),
    ],
)
def test_wrong_options_end_in_one_line(
    module: types.ModuleType,
    words: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert message in refusal(module.main, ["--out", "x", *words.split()], monkeypatch, capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--nproc-per-node 4: there are 2 GPUs; --pretend-hosts lets ranks share them"),
        ("--pretend-hosts 3", "--pretend-hosts 3: 3 pretended hosts: must be at least 2 and divide the 4 ranks"),
        ("--pretend-hosts -1", "--pretend-hosts -1: -1 pretended hosts: must be at least 2"),
    ],
)
def test_more_ranks_than_gpus_end_in_one_line(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    options = ["--seq-lens", "4096", "--out", "x", *words.split()]
    assert message in refusal(bench_ring.main, options, monkeypatch, capsys)


STAND_IN = """#!/bin/sh
case "$*" in
    *device_count*) echo "$GPUS" ;;
    *) echo "$*" >>"$OUT/calls"; case "$*" in *"$FAILS"*) exit 1 ;; esac ;;
esac
"""
"""A Python that notes what it is asked to run."""


@pytest.mark.parametrize(
    ("gpus", "fails", "told"), [(1, "none", ""), (2, "none", ""), (4, "none", ""), (2, "pytest", "failed: suite")]
)
def test_the_ring_task_of_the_gpu_script(tmp_path: Path, gpus: int, fails: str, told: str) -> None:
    """The suite, the benchmark and, on two GPUs, pretended hosts; a failure stops nothing and is told."""
    for folder in ("tools", "megatron_mtraining/lib", "out"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "gpu.sh", tmp_path / "tools")
    (tmp_path / "megatron_mtraining/lib/libmegatron_mtraining_ops.so").touch()
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    out = str(tmp_path / "out")
    more = {"PYTHON": str(python), "OUT": out, "GPUS": str(gpus), "FAILS": fails, "RING": "--repeats 3"}
    done = subprocess.run(
        ["sh", "tools/gpu.sh", "ring"], cwd=tmp_path, env=os.environ | more, capture_output=True, text=True
    )
    assert done.returncode == bool(told) and told in done.stderr
    calls = (tmp_path / "out" / "calls").read_text().splitlines()
    assert "-m gpu" in calls[0] and calls[0].endswith("tests/core/test_distributed.py")
    assert calls[1] == f"-m benchmarks.bench_scaling --out {out} --repeats 3"
    assert ["--pretend-hosts 2" in call for call in calls[2:]] == [True] * (gpus == 2)
