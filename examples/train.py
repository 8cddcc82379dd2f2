"""The training job behind `make train`: real text, Megatron's training loop with sparse attention, metrics and plots.

Prepares the text, prints the Megatron command line, runs it (output in runs/NAME/log.txt), shows progress from
runs/NAME/metrics.jsonl, and draws the run. Options: see the Makefile or `python examples/train.py --help`.
"""

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import plot_run
import prepare_text
import torch
import train_options
from logged_run import run_logged, stop_on_signals
from tqdm import tqdm
from train_options import OptionError, TrainOptions


class MetricsFile:
    """The lines that a run appends to its metrics.jsonl, as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = path.stat().st_size if path.exists() else 0

    def new_lines(self) -> list[dict[str, Any]]:
        """The complete lines written since the last call."""
        if not self._path.exists():
            return []
        with self._path.open() as file:
            file.seek(self._read)
            text = file.read()
        complete = text[: text.rfind("\n") + 1]
        self._read += len(complete.encode())
        return [json.loads(line) for line in complete.splitlines()]


def describe(line: dict[str, Any]) -> str:
    """One line of metrics for a person."""
    return (
        f"step {line['step']:4d}  loss {line['loss']:.3f}  {line['tokens_per_s']:,.0f} tokens/s  "
        f"density {line['density']:.3f}  imbalance worker {line['imbalance_worker']:.3f} "
        f"step {line['imbalance_step']:.3f}  index {100 * line['index_share']:.1f} % of the time"
    )


def prepare_data(options: TrainOptions) -> str:
    """The dataset's prefix, made if need be.

    Raises:
        OptionError: no text, or too little for one sequence of training and one of validation.
    """
    try:
        corpus = prepare_text.prepare(options.data, train_options.DATA_FOLDER)
    except ValueError as error:
        raise OptionError(str(error)) from None
    if min(corpus.train_tokens, corpus.valid_tokens) <= options.seq:
        raise OptionError(
            f"DATA={corpus.source}: {corpus.tokens:,} bytes of text, {corpus.valid_tokens:,} of them kept for "
            f"validation; both parts must be longer than SEQ={options.seq}: about {51 * options.seq:,} bytes are needed"
        )
    print(f"data: {corpus.tokens:,} byte tokens in {corpus.documents:,} documents of {corpus.source}")
    return corpus.prefix


def make_run_folder(options: TrainOptions) -> None:
    """The run's folder; one of an earlier run of the same name is renamed unless this run resumes it."""
    folder = options.folder
    if folder.exists() and not options.resume:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(folder.stat().st_mtime))
        kept = folder.with_name(f"{folder.name}-{stamp}")
        folder.rename(kept)
        print(f"the earlier run {folder} is now {kept} (RESUME=1 would have gone on with it)")
    folder.mkdir(parents=True, exist_ok=True)


def train(options: TrainOptions, prefix: str) -> None:
    """Run the training command and show its progress; SystemExit with the reason if it fails."""
    command = train_options.training_command(options, prefix)
    variables = train_options.environment(options.nproc)
    print(f"\n{train_options.printable(command, variables)}\n", flush=True)
    metrics = MetricsFile(options.folder / "metrics.jsonl")
    log = options.folder / "log.txt"
    print("starting Megatron in every process", flush=True)
    with tqdm(total=options.steps, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:

        def show() -> None:
            for line in metrics.new_lines():
                bar.write(describe(line))
                bar.update(line["step"] - bar.n)

        run_logged(command, variables, log, show)


def probe(options: TrainOptions, prefix: str) -> None:
    """Save one head's true attention and its index, from the trained model on a short slice of the text."""
    arguments = [
        *train_options.attention_arguments(options, nproc=1),
        *train_options.device_arguments(options),
        *train_options.model_arguments(options),
        *train_options.data_arguments(prefix),
        *("--micro-batch-size", "1", "--load", str(options.checkpoint), "--no-load-optim", "--no-load-rng"),
        *("--skip-train", "--probe-output", str(options.folder / "attention.npz")),
    ]
    command = train_options.launch_command("examples/probe_attention.py", 1, arguments)
    run_logged(command, train_options.environment(1), options.folder / "probe.txt", lambda: None)


def summarise(options: TrainOptions) -> None:
    """What the run came to and where its files are."""
    lines = plot_run.read_metrics(options.folder)
    first, last = lines[0], lines[-1]
    print(f"\nloss {first['loss']:.3f} (step {first['step']}) -> {last['loss']:.3f} (step {last['step']})")
    for path in sorted([*options.folder.glob("*.png"), *train_options.RUNS.glob("compare.png")]):
        print(f"  {path}")
    print(f"  {options.folder}/metrics.jsonl, log.txt, tensorboard/ (tensorboard --logdir runs), checkpoint/")


def stopped(options: TrainOptions) -> str:
    """What can be done after Ctrl-C."""
    done = options.last_saved
    if done is None:
        return f"stopped before the first checkpoint (one every {options.save_interval} steps): nothing to go on from"
    if done >= options.steps:
        return f"stopped after training; the checkpoint of step {done} is in {options.checkpoint}"
    return f"stopped; RESUME=1 NAME={options.name} goes on from the checkpoint of step {done}"


def main() -> None:
    """Parse, prepare, train, probe, draw."""
    stop_on_signals()
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # no CUDA toolkit is no news here
    try:
        options = train_options.parse_options(sys.argv[1:], torch.cuda.device_count())
        prefix = prepare_data(options)
    except OptionError as error:
        raise SystemExit(f"make train: {error}") from None
    make_run_folder(options)
    started = time.monotonic()
    try:
        train(options, prefix)
        print(f"trained in {time.monotonic() - started:.0f} s", flush=True)
        if options.attention == "mtraining":
            print("looking at one head of the trained model", flush=True)
            probe(options, prefix)
    except KeyboardInterrupt:
        raise SystemExit(stopped(options)) from None
    plot_run.draw_run(options.folder)
    others = [train_options.RUNS / name for name in train_options.ATTENTIONS]
    if all((folder / "metrics.jsonl").exists() for folder in others):
        plot_run.draw_comparison(others, train_options.RUNS / "compare.png")
    summarise(options)


if __name__ == "__main__":
    main()
