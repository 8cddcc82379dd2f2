"""The page about a run, from real profiled passes."""

import json
import sys
from pathlib import Path

import pytest
import torch

from megatron_mtraining import Layout, MTrainingConfig
from megatron_mtraining.metrics import imbalance_degrees
from megatron_mtraining.report import main, newest_calls, newest_passes, page, plot_ratio, read_lines
from megatron_mtraining.ring_profile import LaunchTimes, PassTimes, TransferTimes, profile_ring
from megatron_mtraining.testing import run_virtual

from .helpers import random_qkv


def test_times_add_up() -> None:
    launches = (LaunchTimes((0,), 0, 1, 5, 5, 5), LaunchTimes((1,), 5, 6, 10, 12, 13))
    times = PassTimes(
        "backward", 0, launches, (TransferTimes("inner", 0, 8, 0, 6), TransferTimes("inner", 1, 8, 4, 10))
    )
    assert (times.total_ms, times.compute_ms, times.exposed_ms) == (13, 9, 4)
    assert times.transfer_ms == 10 and times.hidden == pytest.approx(0.6) and times.tail_ms == 2
    assert times.comm_over_compute() == [1.5, 1.2]
    assert PassTimes.from_json(json.loads(json.dumps(times.to_json()))) == times


def test_imbalance_degrees_of_a_table() -> None:
    degrees = imbalance_degrees(torch.tensor([[1.0, 3.0], [3.0, 3.0]]))
    assert degrees == {"worker": 1.25, "critical": pytest.approx(1.2), "step": 1.0, "total": pytest.approx(1.2)}
    assert imbalance_degrees(torch.tensor([[1, 3], [3, 3]])) == degrees


def test_page_of_a_run(tmp_path: Path) -> None:
    q, k, v = random_qkv(512, dtype=torch.float32)
    with profile_ring() as profile:
        run_virtual(q, k, v, layout=Layout.striped(512, 4), config=MTrainingConfig(top_p=0.8)).sum().backward()
    passes = profile.read()
    assert sorted({p.phase for p in passes}) == ["backward", "forward"] and len(passes) == 8 and not profile.read()
    (tmp_path / "ring.jsonl").write_text("".join(json.dumps(p.to_json()) + "\n" for p in passes))
    line = {
        "step": 1,
        "loss": 2.0,
        "imbalance_worker": 1.0,
        "imbalance_step": 1.1,
        "density_by_layer": {"1": 0.5, "10": 0.2},
    }
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({**line, "step": step}) + "\n" for step in (1, 2)))
    assert [p.cp_rank for p in newest_passes(read_lines(tmp_path / "ring.jsonl"))["forward"]] == [0, 1, 2, 3]
    text = page(tmp_path)
    assert text.count("data:image/png;base64,") == 3 + 2 * 2 and "http" not in text
    profiled = [p.to_json() | {"step": 2, "call": call} for call in (0, 1) for p in passes]
    (tmp_path / "ring.jsonl").write_text("".join(json.dumps(pass_) + "\n" for pass_ in profiled))
    more = {"recall_by_layer": {"1": 0.9}, "useful_tflops": 3.25, "layout": "striped", "recall": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line | more | {"step": 3}) + "\n")
    text = page(tmp_path)
    assert text.count("data:image/png;base64,") == 3 + 2 + 2 * 3
    assert "Training, step 3" in text and "<td>3.25</td><td>striped</td>" in text


def test_calls_of_the_newest_step_by_rank() -> None:
    times = PassTimes("forward", 1, (LaunchTimes((0,), 0, 0, 1, 1, 1),), ())
    other = {**times.to_json(), "cp_rank": 0}
    lines = [
        line | {"step": step, "call": call} for step in (2, 9) for call in (1, 0) for line in (times.to_json(), other)
    ]
    [calls] = newest_calls(lines).values()
    assert [[p.cp_rank for p in ranks] for ranks in calls] == [[0, 1], [0, 1]]
    assert newest_calls([times.to_json()]) == {}


def test_no_work_is_counted_twice_of_ranks_played_in_one_process() -> None:
    """The ranks share one device: their busy times are disjoint, so that the sums are no more than the passes took."""
    q, k, v = random_qkv(2048, dtype=torch.float32)
    with profile_ring() as profile:
        out = run_virtual(
            q, k, v, layout=Layout.striped(2048, 8), config=MTrainingConfig(top_p=0.8, chunks_per_launch=2)
        )
        out.sum().backward()
    passes = profile.read()
    for phase in ("forward", "backward"):
        mine = [p for p in passes if p.phase == phase]
        assert len(mine) == 8
        # All ranks' clocks start at their own first mark, within the time of posting: a small part of a pass.
        longest = max(p.total_ms for p in mine)
        assert sum(p.compute_ms for p in mine) <= 1.02 * longest, phase
        assert all(0 < launch.compute_ms for p in mine for launch in p.launches)


def test_a_run_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither metrics.jsonl nor ring.jsonl"):
        page(tmp_path)
    (tmp_path / "ring.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match=r"ring.jsonl:1"):
        page(tmp_path)


def test_transfers_over_compute_are_drawn_where_there_are_transfers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = (LaunchTimes((0,), 0.0, 1.0, 5.0, 5.0, 5.0), LaunchTimes((1,), 5.0, 6.0, 10.0, 10.0, 10.0))
    transfers = (TransferTimes("inner", 0, 8, 0.0, 6.0), TransferTimes("outer", 1, 8, 6.0, 8.0))
    drawn = []
    monkeypatch.setattr("megatron_mtraining.report.plot_ratio", lambda passes: drawn.append(passes) or "the ratio")
    for moved, found in ((transfers, 1), ((), 0)):
        drawn.clear()
        (tmp_path / "ring.jsonl").write_text(json.dumps(PassTimes("forward", 0, launches, moved).to_json()) + "\n")
        assert page(tmp_path).count("the ratio") == found == len(drawn)
    monkeypatch.undo()
    assert PassTimes("forward", 0, launches, transfers).comm_over_compute() == [1.5, 0.5]
    assert plot_ratio([PassTimes("forward", 0, launches, transfers)]).startswith("<img")


LAUNCH = '{"chunks": [0], "begin": 0, "arrived": 0, "computed": 1, "summed": 1, "end": 1}'
RING = '{"phase": "%s", "cp_rank": 0, "transfers": [], "launches": [%s]}'


def test_pages_of_little(tmp_path: Path) -> None:
    """Lines that hold no more than they must: no layers, no loss; a pass without transfers."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    (tmp_path / "ring.jsonl").write_text(RING % ("forward", LAUNCH) + "\n")
    text = page(tmp_path)
    assert "Training, step 7" in text and text.count("data:image/png;base64,") == 2


def test_what_cannot_be_read_or_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), "--output", str(tmp_path / "none" / "page.html")])
    with pytest.raises(SystemExit, match=r"report: error: .*No such file or directory: .*page.html"):
        main()
    (tmp_path / "metrics.jsonl").write_bytes(b"\xd1\xff\n")
    with pytest.raises(SystemExit, match=r"report: error: .*metrics.jsonl:1: 'utf-8' codec"):
        main()


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("metrics.jsonl", "{}", "metrics.jsonl:1: must be an object with step"),
        ("metrics.jsonl", "[1]", "metrics.jsonl:1: must be an object with step"),
        ("metrics.jsonl", '{"step": 1', "metrics.jsonl:1: Expecting"),
        ("metrics.jsonl", '{"step": "one"}', "metrics.jsonl:1: values of another kind .*'one' is no number"),
        ("metrics.jsonl", '{"step": 1, "loss": "x"}', "metrics.jsonl:1: values of another kind .*'x' is no number"),
        ("metrics.jsonl", '{"step": 1, "density_by_layer": [1]}', "metrics.jsonl:1: values of another kind"),
        ("metrics.jsonl", '{"step": 1, "density_by_layer": {"a": 1}}', "metrics.jsonl:1: values of another kind"),
        ("ring.jsonl", RING % ("forward", ""), "ring.jsonl:1: values of another kind .*IndexError"),
        ("ring.jsonl", RING % ("forward", "3"), "ring.jsonl:1: values of another kind"),
        ("ring.jsonl", RING % ("sideways", LAUNCH), "ring.jsonl:1: values of another kind .*phase='sideways'"),
        ("ring.jsonl", '{"step": 1}', "ring.jsonl:1: must be an object with cp_rank, launches, phase, transfers"),
    ],
)
def test_a_line_of_something_else_is_named(tmp_path: Path, name: str, line: str, message: str) -> None:
    (tmp_path / name).write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        page(tmp_path)
