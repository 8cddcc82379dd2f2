"""Bridge's own training loop on the CPU, with a tiny recipe: in processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.bridge

ROOT = Path(__file__).resolve().parents[2]


def train(folder: Path, ranks: int = 1, **job: Any) -> tuple[list[dict[str, Any]], str]:
    """Runs the worker; returns the lines that it reports and the whole log."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port)]
    words = json.dumps({"folder": str(folder), "context_parallel": ranks, **job})
    run = subprocess.run(
        [sys.executable, *command, "-m", "tests.bridge.training_worker", words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    report = folder / "report.jsonl"
    lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    return lines, run.stdout + run.stderr


def numbers(lines: list[dict[str, Any]]) -> list[float]:
    return [value for line in lines for name, value in line.items() if name in ("loss", "grad_norm", "eval")]


def test_two_ranks_train_as_one_natively_converted_and_with_decentralized_groups(tmp_path: Path) -> None:
    """The same losses, gradient norms and evaluations; one log line says how the sequence is dealt.

    Without Megatron's global groups YaRN's embedding, of all parts, is handed none by its GPTModel.
    """
    one, log = train(tmp_path / "one", save=True)
    assert one[-1] == {"ended": True, "groups_gone": True}, log[-3000:]
    assert len(numbers(one)) == 3 * 2 + 2
    native, log = train(tmp_path / "native", 2)
    assert "swapped; layout striped, native: nothing else relies on Megatron's zigzag layout" in log
    words = ["mtraining.layout_mode=convert", "model.attention_backend=mtraining"]
    converted, log = train(tmp_path / "converted", 2, overrides=words, copied=True)
    assert "swapped; layout striped, convert: asked for" in log
    assert numbers(native) == pytest.approx(numbers(one), rel=1e-5)
    assert numbers(converted) == pytest.approx(numbers(one), rel=1e-5)
    own_groups = ["dist.use_decentralized_pg=true", "dist.use_gloo_process_groups=false"]
    for mode in ("native", "convert"):
        words = [*own_groups, f"mtraining.layout_mode={mode}"]
        free, log = train(tmp_path / f"decentralized-{mode}", 2, overrides=words)
        assert free[-1] == {"ended": True, "groups_gone": True}, log[-3000:]
        assert numbers(free) == pytest.approx(numbers(one), rel=1e-5)
    metrics = [json.loads(line) for line in (tmp_path / "native" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(0 < line["density"] <= 1 + 64 / 512 and set(line["density_by_layer"]) == {"0", "1"} for line in metrics)
    saved = list((tmp_path / "one").rglob("*.yaml"))
    assert any(path.name == "run_config.yaml" for path in saved), "the checkpoint has no config"
    assert not [path for path in saved if "megatron_mtraining" in path.read_text()]


def test_what_is_refused_stops_training_before_the_first_step(tmp_path: Path) -> None:
    lines, log = train(tmp_path / "run", overrides=["model.attention_dropout=0.1"])
    assert "--attention-dropout 0.1: not supported" in log
    assert lines == []
