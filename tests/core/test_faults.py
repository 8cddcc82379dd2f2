"""A rank that dies or sleeps ends the others within the time-out, and two thousand ring passes leave nothing behind."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
LIMIT = 4.0
SLACK = 20.0  # seconds a busy machine may add
DUMP_MILLISECONDS = 1000  # four times this torch's watchdog waits for its dump before it ends the process
NCCL_SLACK = 40.0 + 4 * DUMP_MILLISECONDS / 1000  # start-up of both ranks on GPUs, and the dump
needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")


def start(tmp_path, fault, seconds, backend="gloo"):
    """Two ranks."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": str(DUMP_MILLISECONDS),
    }
    more = [str(tmp_path / "store"), fault, str(seconds), backend]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.core.fault_worker", str(rank), "2", *more],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip


def what_rank_0_says(ranks):
    """Its output, once it has ended; the other is ended then."""
    try:
        output, _ = ranks[0].communicate(timeout=150)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()
    return output


@pytest.mark.parametrize(
    ("fault", "message"), [("sleeps", r"[Tt]imed out|[Tt]imeout"), ("is_killed", r"[Cc]onnection (closed|reset)")]
)
def test_the_other_rank_stops_within_the_time_out(tmp_path, fault, message):
    ranks = start(tmp_path, fault, LIMIT)
    output = what_rank_0_says(ranks)
    assert ranks[0].returncode == 3, output
    seen = re.search(r"SEEN after ([\d.]+) s: (.*)", output)
    assert seen, output
    assert float(seen[1]) < LIMIT + SLACK
    assert re.search(message, seen[2])


@pytest.mark.gpu
@needs_gpus
@pytest.mark.parametrize("fault", ["sleeps", "is_killed"])
def test_on_nccl_the_other_rank_ends_within_the_time_out(tmp_path, fault):
    began, ranks = time.monotonic(), start(tmp_path, fault, LIMIT, "nccl")
    output = what_rank_0_says(ranks)
    seconds = time.monotonic() - began
    print(f"{seconds:.0f} s, status {ranks[0].returncode}: {output[:400]}")
    assert ranks[0].returncode not in (0, 3), output
    assert seconds < LIMIT + NCCL_SLACK
    assert re.search(r"[Ww]atchdog caught collective operation timeout.*ran for [4-9]\d{3} milliseconds", output)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=[pytest.mark.gpu, needs_gpus])])
def test_two_thousand_ring_passes(tmp_path, backend):
    began = time.monotonic()
    ranks = start(tmp_path, "none", 60, backend)
    outputs = [rank.communicate(timeout=900)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert all("SEEN 2000 passes" in output for output in outputs)
    print(f"{time.monotonic() - began:.0f} s")
