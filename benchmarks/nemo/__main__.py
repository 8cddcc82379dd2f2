"""One part of the run: `python -m benchmarks.nemo PART --out DIR --work DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import parts, two
from .session import Session, load

PARTS = parts.PARTS | two.PARTS


def main() -> None:
    """Runs a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of models and checkpoints, shared by the parts"
    )
    parser.add_argument("--cpu", action="store_true", help="a trial without a GPU")
    args = parser.parse_args()
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    session = Session(args.part, args.out.resolve(), args.work.resolve(), args.cpu)
    load(session)
    PARTS[args.part](session)


if __name__ == "__main__":
    main()
