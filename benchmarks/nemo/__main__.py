"""Parts of the run: `python -m benchmarks.nemo PART... --out DIR --work DIR`. Several parts run beside each other."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

import torch

from . import parts, two
from .session import Session, block_ours, load

PARTS = parts.PARTS | two.PARTS


def main() -> None:
    """Runs one part in this process, or imports once and runs each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS), metavar="part", help=", ".join(sorted(PARTS)))
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of models and checkpoints, shared by the parts"
    )
    parser.add_argument("--cpu", action="store_true", help="a trial without a GPU")
    args = parser.parse_args()
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    sessions = [Session(part, args.out.resolve(), args.work.resolve(), args.cpu) for part in args.parts]
    if len(sessions) == 1:
        load(sessions[0])
        run(sessions[0])
        return
    load(sessions[0])
    children = [fork(session, number) for number, session in enumerate(sessions)]
    for child in children:
        os.waitpid(child, 0)


def run(session: Session) -> None:
    """Runs a part in a process that has loaded Bridge."""
    if session.part.endswith("dense") and not session.cpu:
        block_ours()
    PARTS[session.part](session)


def fork(session: Session, number: int) -> int:
    """Runs a part in a copy of this process, or anew where CUDA does not bear the copy; returns the process's number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        log = os.open(session.out / f"{session.part}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["MASTER_PORT"] = str(int(os.environ.get("MASTER_PORT", "29500")) + 40 * number)
        try:
            torch.zeros(1, device=session.device)
        except RuntimeError:
            words = ["-m", "benchmarks.nemo", session.part, "--out", str(session.out), "--work", str(session.work)]
            os.execv(sys.executable, [sys.executable, *words])
        run(session)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
