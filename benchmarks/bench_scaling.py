"""The ring over numbers of GPUs of one host: starts torchrun for each number, and makes one table and one picture.

    python -m benchmarks.bench_scaling --out DIR                                # 1, 2, 4 ... GPUs, as many as there are
    python -m benchmarks.bench_scaling --sizes 1 2 --global 131072 262144 --local 65536 131072 --out DIR
    python -m benchmarks.bench_scaling --predict --sizes 1 2 4 --out DIR        # the simulator alone, no GPU

Each start is ``benchmarks.bench_ring`` on real ranks: striped and zigzag, flat and (from four GPUs on) hierarchical rings in
nodes of half of the GPUs, 5% of the pairs and all of them, cuDNN's dense attention over gathered keys. The largest number runs
once more for each ``CUDA_DEVICE_MAX_CONNECTIONS``, with the most of these also over artificial slow links between its two
halves. Every measured time has the simulator's prediction beside it (stock rates of H200; links inside a host, and the
artificial delay where there is one). Results: ``scaling-DATE-N-gpus`` (JSON, Markdown, PNG); logs and results of the starts in
``starts/``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.bench_ring import check_folder, heads_of, microseconds, positive
from benchmarks.plot_scaling import draw
from benchmarks.ring.cases import PATTERNS, Row
from benchmarks.ring.delays import WAYS
from benchmarks.ring.output import write
from benchmarks.ring.scaling import Start, starts, table
from benchmarks.ring.throttle import SlowLinks
from megatron_mtraining.config import BLOCK

MODULE = "benchmarks.bench_scaling"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
PREDICTED = "the simulator's H200 (predicted, nothing was run)"


def run(start: Start, args: argparse.Namespace) -> list[Row]:
    """One start; its rows. ``done`` in its folder holds the options that it ended with.

    Raises:
        SystemExit: if it fails or takes longer than ``--timeout``, with where its log is; if ``--resume`` finds one that ended
            with other options.
    """
    folder = args.out / "starts" / start.name
    done, log = folder / "done", folder / "log.txt"
    options = [*start.words(), "--pattern", args.pattern, "--device", args.device]
    options += ["--heads", "/".join(map(str, args.heads)), "--repeats", str(args.repeats)]
    if args.resume and done.exists():
        before, now = done.read_text(), shlex.join(options)
        if before != now:
            raise SystemExit(f"--resume: {folder} was run with {before!r}, not {now!r}; give another --out")
        return rows_in(folder)
    folder.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(start.size)]
    command += ["-m", "benchmarks.bench_ring", *options, "--out", str(folder)]
    variables = {name: value for name, value in os.environ.items() if name != CONNECTIONS}
    if start.connections is not None:
        variables[CONNECTIONS] = str(start.connections)
    for old in folder.glob("ring-*.json"):
        old.unlink()
    with log.open("w") as file:
        try:
            ended = subprocess.run(command, env=variables, stdout=file, stderr=subprocess.STDOUT, timeout=args.timeout)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{start.name}: not done after {args.timeout:g} s, see {log}") from None
    if ended.returncode:
        raise SystemExit(f"{start.name}: failed, see {log}")
    done.write_text(shlex.join(options))
    return rows_in(folder)


def rows_in(folder: Path) -> list[Row]:
    """The rows of a start that has ended."""
    latest = max(
        folder.glob("ring-*.json")
    )  # names end with the date: a run over midnight has two, the later one of all rows
    rows: list[Row] = json.loads(latest.read_text())["rows"]
    return rows


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", help="numbers of GPUs (default: 1, 2, 4 ... that there are)")
    parser.add_argument(
        "--global",
        dest="constant_global",
        type=int,
        nargs="+",
        default=[262144, 524288],
        help="constant lengths of all",
    )
    parser.add_argument(
        "--local", dest="constant_local", type=int, nargs="+", default=[131072], help="constant lengths of a rank"
    )
    parser.add_argument("--connections", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--outer-gbs", type=positive, nargs="*", default=[40.0, 20.0, 10.0, 5.0])
    parser.add_argument("--outer-us", type=microseconds, default=50.0)
    parser.add_argument("--outer-by", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--heads", type=heads_of, default=(16, 2, 128), help="heads/kv_heads/head_dim (16/2/128)")
    parser.add_argument("--pattern", choices=PATTERNS, default="bands")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: gloo, the reference operators")
    parser.add_argument("--predict", action="store_true", help="run nothing, ask the simulator")
    parser.add_argument(
        "--resume", action="store_true", help="take what --out has of starts that ended, run the others"
    )
    parser.add_argument("--timeout", type=positive, default=600.0, help="seconds of one start")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    args = parser.parse_args()
    check(parser, args)
    return args


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program with one line, before anything is started, if options do not fit; ``--sizes`` gets its default."""
    there = torch.cuda.device_count()
    if args.sizes is None:
        if not there:
            parser.error("--sizes: needed where there is no GPU")
        args.sizes = [1 << power for power in range(there.bit_length())]
    if min(args.sizes) < 1 or len(set(args.sizes)) < len(args.sizes):
        parser.error(f"--sizes {' '.join(map(str, args.sizes))}: must be different, at least 1")
    if not args.predict and args.device == "cuda" and max(args.sizes) > there:
        parser.error(f"--sizes {max(args.sizes)}: there are {there} GPUs; --predict needs none")
    if args.outer_gbs and not args.connections:
        parser.error("--outer-gbs: needs --connections, the largest of which it is run with")
    if not all(1 <= number <= 32 for number in args.connections) or len(set(args.connections)) < len(args.connections):
        parser.error(f"--connections {' '.join(map(str, args.connections))}: must be different, 1 to 32")
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: must be at least 1")
    unit = 2 * BLOCK  # two zigzag chunks a rank
    for option, given, of in (
        ("--global", args.constant_global, unit * math.lcm(*args.sizes)),
        ("--local", args.constant_local, unit),
    ):
        for length in given:
            if length < 1 or length % of:
                parser.error(f"{option} {length}: must be a multiple of {of}, two chunks of {BLOCK} tokens a rank")
    check_folder(parser, args.out)


def main() -> None:
    """Runs all starts, or predicts them; writes after each."""
    args = arguments()
    sizes: list[int] = sorted(args.sizes)
    rows: list[Row] = []
    name = f"scaling-DATE-{'predicted-' if args.predict else ''}{sizes[-1]}-{args.device.replace('cuda', 'gpu')}s"
    slow = SlowLinks(tuple(args.outer_gbs), args.outer_us, tuple(args.outer_by))
    for start in starts(sizes, args.constant_global, args.constant_local, args.connections, slow):
        if args.predict:
            if start.connections is None or start.slow.gbs:  # connections are nothing to the simulator
                rows += start.predicted(args.heads, args.pattern)
        else:
            began = time.perf_counter()
            rows += run(start, args)
            print(f"{start.name}: {time.perf_counter() - began:.0f} s", flush=True)
        found = table(rows, args.constant_global, args.constant_local)
        target = write(found + rows, args.out, MODULE, name, PREDICTED if args.predict else "")
    draw(found, rows, target.with_name(f"{target.name}.png"))
    print(f"{target}.md")


if __name__ == "__main__":
    main()
