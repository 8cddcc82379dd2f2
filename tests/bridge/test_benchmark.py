"""`benchmarks.nemo`: its tables, and its parts on the CPU, which are the steps of docs/from_hf_to_512k.md in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.nemo.parts import import_by_bridge
from benchmarks.nemo.report import main, report
from benchmarks.nemo.session import Session
from benchmarks.nemo.small import distance

ROOT = Path(__file__).resolve().parents[2]


def run_line(run: str, losses: list[float], part: str = "qwen", first_step: int = 1) -> dict[str, Any]:
    return {
        "part": part,
        "run": run,
        "first_step": first_step,
        "losses": losses,
        "milliseconds": [9000, 10, 30, 20],
        "peak_gib": 1.25,
        "attention": {"package.module.Attention": 4},
    }


def test_gaps_are_to_the_dense_run_of_the_same_start() -> None:
    lines = [
        run_line("qwen-p1", [3.0, 2.0, 1.5, 1.0]),
        run_line("qwen-p1", [9.0, 9.0, 9.0, 9.0]),  # made again: the first counts
        run_line("qwen-dense", [3.0, 2.5, 1.5, 0.9], part="qwen-dense"),
        run_line("qwen-p1-on", [0.9, 0.8, 0.7, 0.6], first_step=5),
        run_line("qwen-3b-16k", [12.0, 5.0, 4.0, 3.0], part="big"),
        {"part": "qwen", "run": "qwen-p1", "logged": [{"density": 0.5, "recall": 0.9}]},
    ]
    text = "\n".join(report(lines))
    head = "| qwen-p1 | Attention x 4 | 1 to 4 | 3.0000 -> 1.0000 | 0.50000 / -0.10000 | 0.500 / 0.900 | 9.0 s / 20 ms | 1.2 |"
    assert head in text
    assert text.count("0.50000 / -0.10000") == 1
    assert "| qwen-p1-on | Attention x 4 | 5 to 8 | 0.9000 -> 0.6000 |  |  |" in text
    assert "| qwen-3b-16k | Attention x 4 | 1 to 4 | 12.0000 -> 3.0000 |  |  |" in text
    assert "Nothing failed." in text


def test_gap_of_a_resumed_run_is_to_the_dense_run_from_the_same_checkpoint() -> None:
    lines = [
        run_line("qwen-dense", [3.0, 2.5, 1.5, 0.9], part="qwen-dense"),
        run_line("qwen-p1-on", [0.9, 0.8, 0.7, 0.6], first_step=5),
        run_line("qwen-dense-from-ours", [0.9, 0.8, 0.5, 0.7], part="qwen-dense", first_step=5),
    ]
    text = "\n".join(report(lines))
    assert "| qwen-p1-on | Attention x 4 | 5 to 8 | 0.9000 -> 0.6000 | 0.20000 / +0.02500 |" in text
    assert "| qwen-dense-from-ours | Attention x 4 | 5 to 8 | 0.9000 -> 0.7000 |  |" in text


def test_tables_of_one_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [run_line("qwen-p1", [float(n)] * 4) | {"call": name} for n, name in ((3, "first"), (2, "second"))]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "results.jsonl"), "second"])
    main()
    text = capsys.readouterr().out
    assert "2.0000 -> 2.0000" in text
    assert "3.0000" not in text


@pytest.mark.bridge
@pytest.mark.parametrize("message", [None, "gradient_accumulation_fusion ... fused_weight_gradient_mlp_cuda", "other"])
def test_only_the_want_of_apex_is_an_answer_of_the_import_by_bridge(
    bridge: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str | None
) -> None:
    def import_ckpt(*_: Any) -> None:
        if message:
            raise RuntimeError(message)

    monkeypatch.setattr(bridge.AutoBridge, "import_ckpt", import_ckpt)
    session = Session("setting", tmp_path, tmp_path, cpu=True)
    if message == "other":
        with pytest.raises(RuntimeError, match="other"):
            import_by_bridge(session)
        return
    import_by_bridge(session)
    assert json.loads((tmp_path / "setting.jsonl").read_text())["imported_by_bridge"] is (message is None)


def test_failures_are_shown() -> None:
    text = "\n".join(report([{"part": "peft", "failed": "adapters lora", "error": "ValueError: a | b"}]))
    assert "| peft | adapters lora | ValueError: a   b |" in text
    assert "Nothing failed." not in text


def test_distance_of_logits() -> None:
    reference = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    assert distance(reference, reference)["kl_max"] == 0
    other = distance(torch.tensor([[2.0, 0.0], [1.0, 0.0]]), reference)
    p = torch.tensor([0.0, 1.0]).softmax(0)
    assert other["kl_max"] == pytest.approx(float((p * (p / p.flip(0)).log()).sum()), rel=1e-6)
    assert (other["logit_max"], other["same_first"]) == (1.0, 0.5)


@pytest.mark.bridge
@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_the_steps_of_the_page_on_the_cpu(family: str, tmp_path: Path) -> None:
    """What is imported comes back bit for bit; every line selected trains as dense does, also on from a checkpoint."""
    words = [family, f"{family}-logits", f"{family}-train", f"{family}-dense", "--out", str(tmp_path / "out")]
    environment = {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "localhost",
    }
    environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "29870"}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.nemo", *words, "--work", str(tmp_path / "work"), "--cpu"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    files = [path for path in (tmp_path / "out").glob("*.jsonl") if "metrics" not in path.name]
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert not [line for line in lines if "failed" in line], run.stderr[-2000:]
    assert sum("ended" in line for line in lines) == 4
    unchanged = next(line for line in lines if line.get("compared") == "exported unchanged")
    assert unchanged["tensors"] == unchanged["equal"] > 20
    logits = {line["logits"]: line for line in lines if "logits" in line and "run" not in line}
    assert all(logits[name]["kl_mean"] < 1e-6 for name in ("bridge dense", "bridge p1"))
    assert all(line["kl_mean"] < 1e-6 for line in lines if line.get("logits") == "bridge after training")
    losses = {line["run"]: line["losses"] for line in lines if "losses" in line}
    assert losses[f"{family}-p1"] == pytest.approx(losses[f"{family}-dense"], rel=1e-5)
    assert losses[f"{family}-p1-on"] == pytest.approx(losses[f"{family}-dense-from-ours"], rel=1e-5)
