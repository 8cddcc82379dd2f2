"""Runs the functional tests without Megatron's runner (which needs uv and yq): same files, same rules.

    python -m tests.functional_tests run CASE ... --megatron DIR [--record] [--values DIR] [--output DIR]
    python -m tests.functional_tests compare CASE --tensorboard DIR [--values DIR]

``run`` trains with an unmodified ``pretrain_gpt.py`` of the Megatron-LM checkout DIR and compares with the golden values;
``--record`` writes them instead. Where ``megatron-mtraining enable`` was run the script is started as it is, else through
the launcher. ``compare`` looks at the TensorBoard files of a run that is there already. ``--values`` takes golden values from
a folder of your own (other GPUs, other versions), or records into it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_mtraining import opt_in

from . import golden
from .cases import Case, load_cases

ROOT = Path(__file__).parents[2]
SCRIPT = "pretrain_gpt.py"
FOLDERS = ("tensorboard", "cache", "checkpoints")
"""What a run leaves in its folder, beside its log."""


def command(case: Case, script: Path, output: Path, plain: bool) -> list[str]:
    """The command line that trains."""
    paths = {
        "TENSORBOARD_PATH": str(output / "tensorboard"),
        "DATA_CACHE_PATH": str(output / "cache"),
        "CHECKPOINT_SAVE_PATH": str(output / "checkpoints"),
        "CHECKPOINT_LOAD_PATH": str(output / "no_checkpoints"),
        "DATA_PATH": str(output),
    }
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.gpus}"]
    launcher = [] if plain else ["-m", "megatron_mtraining.launch"]
    exit_interval = ["--exit-interval", str(case.steps)]  # as Megatron's runner sets it
    return [*start, *launcher, str(script), *case.arguments(paths), *exit_interval]


def find_script(megatron: Path) -> Path:
    """The training script of a checkout.

    Raises:
        SystemExit: with one line, if it is not there.
    """
    script = (megatron / SCRIPT).resolve()
    if not script.is_file():
        raise SystemExit(f"--megatron {megatron}: no {SCRIPT} there; give the folder of a Megatron-LM checkout")
    return script


def make_folder(folder: Path, option: str) -> None:
    """Makes a folder that an option names.

    Raises:
        SystemExit: with one line, if that cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"{option} {folder}: {error.strerror}") from error


def train(case: Case, megatron: Path, output: Path, extra: Sequence[str]) -> None:
    """Trains; the output goes to ``log.txt``.

    Raises:
        SystemExit: with one line, if the script is not there or training fails.
    """
    script = find_script(megatron)
    make_folder(output, "--output")
    for name in FOLDERS:  # an earlier run's TensorBoard files would be read instead of this one's
        shutil.rmtree(output / name, ignore_errors=True)
    path = os.pathsep.join([str(script.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    variables = os.environ | case.environment_variables() | {"PYTHONPATH": path}
    words = [*command(case, script, output, bool(opt_in.enabled_folders())), *extra]
    with (output / "log.txt").open("w") as log:
        done = subprocess.run(words, env=variables, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{case.name}: training failed with status {done.returncode}; see {output / 'log.txt'}")


def measured(case: Case, tensorboard: Path) -> dict[str, golden.Values]:
    """The metrics of a run.

    Raises:
        SystemExit: with one line, if there are none.
    """
    try:
        return golden.read_tensorboard(tensorboard, case.steps)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from error


def report(case: Case, tensorboard: Path, expected: dict[str, golden.Values]) -> bool:
    """Compares a run with the golden values and prints a line per metric that fails; returns whether none does."""
    actual = measured(case, tensorboard)
    failures = golden.compare(expected, actual, case.metrics, case.approximate)
    kind = "approximately" if case.approximate else "exactly"
    print(f"{case.name}: {'FAILED' if failures else 'passed'} ({', '.join(case.metrics)}, {kind})", flush=True)
    for line in failures:
        print(f"  {line}", flush=True)
    return not failures


def run(case: Case, options: argparse.Namespace, expected: dict[str, golden.Values] | None) -> bool:
    """Trains one case and compares it with ``expected``, or records its golden values if there are none to expect.

    Raises:
        SystemExit: with one line, if training fails or has no value of a metric in some step.
    """
    output = options.output / case.name
    train(case, options.megatron, output, options.extra.split())
    if expected is None:
        values = measured(case, output / "tensorboard")
        missing = golden.incomplete(values, case.metrics, case.steps)
        if missing:
            raise SystemExit(f"{case.name}: not recorded, {missing}; see {output / 'log.txt'}")
        golden.write(values, case.golden_values)
        print(f"{case.name}: recorded {case.golden_values}", flush=True)
        return True
    return report(case, output / "tensorboard", expected)


def golden_values(cases: Sequence[Case]) -> list[dict[str, golden.Values]]:
    """What every case is compared with, read before anything is trained.

    Raises:
        SystemExit: with one line, if a case has no golden values, or some that a run cannot be compared with.
    """
    missing = [case.name for case in cases if not case.golden_values.exists()]
    if missing:
        raise SystemExit(f"no golden values of {', '.join(missing)}: record them with run --record")
    found = []
    for case in cases:
        try:
            found.append(golden.read(case.golden_values))
        except golden.UnreadableError as error:
            raise SystemExit(str(error)) from error
        cut_off = golden.cut_off(found[-1], case.metrics, case.steps)
        if cut_off:
            raise SystemExit(f"{case.golden_values}: {cut_off}")
    return found


def parse(argv: Sequence[str] | None, cases: dict[str, Case]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.functional_tests", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="train and compare")
    running.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(sorted(cases))} (default: all)")
    running.add_argument("--megatron", type=Path, required=True, help="folder of a Megatron-LM checkout")
    running.add_argument("--output", type=Path, default=None, help="folder of the runs (default: a temporary one)")
    running.add_argument("--record", action="store_true", help="write the golden values instead of comparing")
    running.add_argument("--extra", default="", help="more options of Megatron, as one string")
    comparing = commands.add_parser("compare", help="compare a run that is there")
    comparing.add_argument("case", choices=sorted(cases))
    comparing.add_argument("--tensorboard", type=Path, required=True, help="folder of its TensorBoard files")
    for command in (running, comparing):
        command.add_argument(
            "--values", type=Path, default=None, help="folder of golden values (default: beside the cases)"
        )
    options = parser.parse_args(argv)
    if options.command == "run":
        unknown = [name for name in options.cases if name not in cases]
        if unknown:
            running.error(f"no case {', '.join(unknown)}; there are {', '.join(sorted(cases))}")
        options.cases = options.cases or sorted(cases)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command.

    Raises:
        SystemExit: with status 1 if a case fails, or with one line if there is nothing to compare it with.
    """
    options = parse(argv, load_cases())
    cases = load_cases(options.values)
    if options.command == "compare":
        [expected] = golden_values([cases[options.case]])
        raise SystemExit(0 if report(cases[options.case], options.tensorboard, expected) else 1)
    find_script(options.megatron)
    chosen = [cases[name] for name in options.cases]
    if options.record and options.values:
        make_folder(options.values, "--values")
    compared = [None] * len(chosen) if options.record else golden_values(chosen)
    if options.output is None:
        options.output = Path(tempfile.mkdtemp(prefix="mtraining-functional-"))
        print(f"runs are in {options.output}")
    passed = [run(case, options, expected) for case, expected in zip(chosen, compared, strict=True)]
    raise SystemExit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
