"""Run a torchrun command with its output in a file, take it down with this process, and say why it failed."""

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # of kill, and of a terminal that is closed
PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>
ERROR_LINES = 25
# How the launcher begins its one line about what cannot be run, and the script the one about an option it does not know.
REFUSED = re.compile(r"^(megatron_mtraining|\S+\.py): error: ")
# Where torchrun begins its own report of a failed worker; its log names its modules by path or with dots.
REPORT = re.compile(r"torch[./]distributed[./]elastic[./]multiprocessing[./]api|ChildFailedError")


def stop_on_signals() -> None:
    """Make a signal to stop an exception, so that `run_logged` stops the command, which has a session of its own."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP: that stays so
            signal.signal(number, stop)


def run_logged(command: list[str], variables: dict[str, str], log: Path, on_output: Callable[[], None]) -> None:
    """Run a command with its output added to `log`; call `on_output` after each line.

    An exception here, such as Ctrl-C, stops the command's process group; on Linux the death of this process does too.

    Raises:
        SystemExit: the command failed; says why.
    """
    with log.open("a") as file:
        start = file.tell()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **variables},
            start_new_session=True,
            preexec_fn=_stop_with_parent(),
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                on_output()
            status = process.wait()
        except BaseException:
            # One signal and no second: another would keep torchrun from stopping its workers.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *STOP_SIGNALS})
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise
    if status != 0:
        raise SystemExit(explain_failure(log, start))


def _stop_with_parent() -> Callable[[], None] | None:
    """What a child calls to get SIGTERM, on which torchrun stops its workers, when its parent dies (even of SIGKILL)."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:  # it died before the kernel was asked
            os._exit(1)

    return ask


def explain_failure(log: Path, start: int = 0) -> str:
    """What went wrong in a run whose output begins at byte `start` of `log`, and where the rest is.

    The one line of a refused option where there is one; otherwise the lines before torchrun's report of the failed worker.
    """
    text = log.read_bytes()[start:].decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    reasons = [line for line in lines if REFUSED.search(line)][:1]  # every worker says the same
    if not reasons:
        last = next((number for number, line in enumerate(lines) if REPORT.search(line)), len(lines))
        reasons = lines[max(0, last - ERROR_LINES) : last]
    return "\n".join([*reasons, f"Training failed; the whole output is in {log}"])
