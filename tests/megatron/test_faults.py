"""A rank of a training run is killed: the run ends, says so, and its last checkpoint is whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from .test_training import ALL, BASE, CP2, ROPE

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds for the others to end; torchrun stops them, no time-out is waited for
SAVE = "--mtraining-cpu --ckpt-format torch_dist --save-interval 2 --eval-iters 0 --log-interval 1 --lr-decay-iters 40"


def command(folder, steps):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = ["-m", "megatron_mtraining.launch", str(ROOT / "examples" / "pretrain_gpt.py")]
    places = ["--save", str(folder), "--load", str(folder), "--data-cache-path", str(folder / "cache")]
    words = [*BASE.split(), *ROPE.split(), *ALL.split(), *CP2.split(), *SAVE.split(), *places]
    return [*start, *script, *words, "--train-iters", "40", "--exit-interval", str(steps)]


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}


def steps_in(text):
    return [int(step) for step in re.findall(r"iteration\s+(\d+)/", text)]


@pytest.mark.full
def test_a_killed_rank_ends_the_run_and_leaves_a_whole_checkpoint(tmp_path):
    folder, log = tmp_path / "checkpoints", tmp_path / "log"
    with log.open("w") as file:
        run = subprocess.Popen(command(folder, 40), env=environment(), stdout=file, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 300
    while not any(step >= 3 for step in steps_in(log.read_text())):
        assert run.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)
    victim = next(
        process for process in psutil.Process(run.pid).children() if process.environ().get("LOCAL_RANK") == "1"
    )
    victim.kill()
    assert run.wait(PATIENCE) != 0
    assert "(exitcode: -9) local_rank: 1" in log.read_text()
    saved = int((folder / "latest_checkpointed_iteration.txt").read_text())
    resumed = subprocess.run(
        [*command(folder, saved + 1), "--exit-on-missing-checkpoint"], env=environment(), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr[-3000:]
    assert steps_in(resumed.stdout) == [saved + 1]
