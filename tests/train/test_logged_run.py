"""A training command that dies with the job that started it, and the reason that is shown when it fails by itself."""

import fcntl
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from logged_run import ERROR_LINES, explain_failure, run_logged, stop_on_signals

from .conftest import ROOT

DEADLINE_S = 120.0
# Stands for torchrun: holds a lock while it lives, and ends by itself in the end should it be left over.
CHILD = """
import fcntl, time
lock = open("child.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("ready", flush=True)
time.sleep(150)
"""
JOB = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import train, train_options
train.prepare_data = lambda options: "data/text"
train_options.training_command = lambda options, prefix: [sys.executable, "-c", {CHILD!r}]
train.main()
"""


def wait_until(condition: Callable[[], bool], seconds: float = DEADLINE_S) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def hear_signals() -> None:
    """In a child: the default answer to signals that a suite started by nohup or in a shell's background has switched off."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def is_free(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGHUP, 128 + signal.SIGHUP),
        (signal.SIGINT, 1),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=LINUX_ONLY),
    ],
)
def test_training_ends_with_the_job(number: signal.Signals, status: int, tmp_path: Path) -> None:
    log, lock = tmp_path / "runs" / "mtraining" / "log.txt", tmp_path / "child.lock"
    job = subprocess.Popen(
        [sys.executable, "-c", JOB],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=hear_signals,
    )
    try:
        assert wait_until(lambda: log.exists() and "ready" in log.read_text())
        assert not is_free(lock)
        job.send_signal(number)
        _, errors = job.communicate(timeout=DEADLINE_S)
        assert job.returncode == status, errors
        assert wait_until(lambda: is_free(lock), seconds=20)
        assert (b"stopped before the first checkpoint" in errors) == (number is signal.SIGINT)
    finally:
        job.kill()
        job.wait()


def test_a_second_signal_does_not_cut_the_stopping_short(tmp_path: Path) -> None:
    """torchrun takes a while to stop its workers, and would leave them if it were signalled again meanwhile."""
    child = (
        "import signal, time, pathlib; signals = []; signal.signal(signal.SIGTERM, lambda *_: signals.append(1))\n"
        "print('ready', flush=True); signal.pause(); time.sleep(2); pathlib.Path('signals').write_text(str(len(signals)))"
    )
    job = (
        f"import pathlib, sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); import logged_run\n"
        "logged_run.stop_on_signals()\n"
        f"logged_run.run_logged([sys.executable, '-c', {child!r}], {{}}, pathlib.Path('log.txt'), lambda: None)"
    )
    process = subprocess.Popen([sys.executable, "-c", job], cwd=tmp_path, preexec_fn=hear_signals)
    try:
        assert wait_until(lambda: (tmp_path / "log.txt").exists() and "ready" in (tmp_path / "log.txt").read_text())
        for number in (signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
            time.sleep(0.5)
        process.wait(timeout=DEADLINE_S)
        assert (tmp_path / "signals").read_text() == "1"
    finally:
        process.kill()
        process.wait()


def test_nohup_stays() -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop_on_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not handlers[signal.SIGTERM]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def failure(command: list[str], log: Path) -> list[str]:
    """The lines that explain why the command failed."""
    with pytest.raises(SystemExit) as failed:
        run_logged([sys.executable, *command], {"OMP_NUM_THREADS": "1"}, log, lambda: None)
    return str(failed.value).splitlines()


@pytest.mark.parametrize(
    "refusal",
    [
        "megatron_mtraining: error: --window-size: not with this attention",
        "pretrain_gpt.py: error: unrecognized arguments: --some-flag",
    ],
)
def test_a_refusal_is_the_whole_explanation(refusal: str, tmp_path: Path) -> None:
    """Of this run, not of an earlier one in the same log; once, though every worker says it; wherever it is."""
    log = tmp_path / "log.txt"
    log.write_text("megatron_mtraining: error: --tensor-model-parallel-size: of an earlier run\n")
    worker = f"print('before\\n' * 40, {refusal!r}, {refusal!r}, 'after\\n' * 40, sep='\\n'); raise SystemExit(1)"
    assert failure(["-c", worker], log) == [refusal, f"Training failed; the whole output is in {log}"]


def test_a_traceback_is_not_buried_by_the_report_of_torchrun(tmp_path: Path) -> None:
    log, worker = tmp_path / "log.txt", tmp_path / "worker.py"
    worker.write_text("raise ValueError('the reason')")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    *shown, end = failure([*launch, str(worker)], log)
    assert shown[-1] == "ValueError: the reason"
    assert end == f"Training failed; the whole output is in {log}"


@pytest.mark.parametrize(
    "module", ["torch/distributed/elastic/multiprocessing/api.py:986", "torch.distributed.elastic.multiprocessing.api"]
)
def test_the_report_is_found_in_logs_of_any_version(module: str, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    report = f"E1130 03:00:01.500000 4242 {module}] failed (exitcode: 1) local_rank: 0 (pid: 4243) of binary: python"
    log.write_text("\n".join(["ValueError: the reason", report, *["after"] * 60]))
    assert explain_failure(log).splitlines()[:-1] == ["ValueError: the reason"]


def test_without_a_report_the_last_lines_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("\n".join(f"line {number}" for number in range(60)))
    shown = explain_failure(log).splitlines()
    assert (shown[0], shown[-2]) == (f"line {60 - ERROR_LINES}", "line 59")
