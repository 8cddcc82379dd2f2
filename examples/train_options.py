"""Options of the training job, checked before any work, and the Megatron command line made of them."""

import argparse
import importlib.util
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

BLOCK = 64
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 2, 192, 2, 1, 64, 512  # trains in minutes on two cores
INIT_STD = 0.07  # about 1 / sqrt(HIDDEN): logits of order one from the first step
# Caps of the index, of all columns and distances: so small a model attends too diffusely for top-p alone to be sparse.
VERTICAL_CAP, SLASH_CAP = 1 / 16, 1 / 4
ATTENTIONS = ("mtraining", "dense")
RUNS = Path("runs")
DATA_FOLDER = Path("data")
SAVE_INTERVAL = 50  # steps between two checkpoints; the last step is always saved


class OptionError(ValueError):
    """A make variable with a value that cannot work; the message names it and the valid values."""


@dataclass(frozen=True)
class TrainOptions:
    """What `make train` was asked for. `gpus` is the number of GPUs found (0: train on the CPU)."""

    name: str
    attention: str
    seq: int
    steps: int
    nproc: int
    inner: int
    top_p: float
    data: Path | None
    resume: bool
    extra: tuple[str, ...]
    gpus: int

    @property
    def folder(self) -> Path:
        """Where the run's files go."""
        return RUNS / self.name

    @property
    def checkpoint(self) -> Path:
        """Megatron's checkpoint folder of the run."""
        return self.folder / "checkpoint"

    @property
    def save_interval(self) -> int:
        """Steps between two checkpoints."""
        return min(SAVE_INTERVAL, self.steps)

    @property
    def last_saved(self) -> int | None:
        """The step of the run's last checkpoint; None where there is none."""
        tracker = self.checkpoint / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else None

    @property
    def log_interval(self) -> int:
        """Steps between two lines of metrics: about twenty lines a run, at most ten steps apart."""
        return max(1, min(10, self.steps // 20))


def parse_options(argv: list[str], gpus: int) -> TrainOptions:
    """The options of a command line for a machine with `gpus` GPUs, with defaults filled in and checked.

    Raises:
        OptionError: for a value that cannot work.
    """
    parser = argparse.ArgumentParser(prog="examples/train.py", description="Train a small GPT; see the Makefile.")
    parser.add_argument("--name", help="run folder below runs/ (default: the value of --attention)")
    parser.add_argument("--attention", default="mtraining", help="mtraining (sparse) or dense")
    parser.add_argument("--seq", default="8192", help="sequence length in tokens (bytes)")
    parser.add_argument("--steps", default="80", help="training steps")
    parser.add_argument("--nproc", help="processes (default: the GPUs found, or 4 on the CPU)")
    parser.add_argument("--inner", help="ranks of a node: the inner ring (default: half of 4 and more processes)")
    parser.add_argument("--top-p", default="0.9", help="share of the attention mass to keep")
    parser.add_argument("--data", type=Path, help="text file or folder (default: the Python standard library)")
    parser.add_argument("--resume", nargs="?", const="1", default="0", help="1: go on from the run's last checkpoint")
    parser.add_argument("--extra", default="", help="more Megatron options, as one string: --extra='--seed 7'")
    given = parser.parse_args(argv)
    if given.attention not in ATTENTIONS:
        raise OptionError(f"ATTENTION={given.attention}: must be one of {', '.join(ATTENTIONS)}")
    nproc = _positive("NPROC", given.nproc) if given.nproc else (gpus or 4)
    if gpus and nproc > gpus:
        raise OptionError(f"NPROC={nproc}: this machine has {gpus} GPU(s), one a process")
    inner = _positive("INNER", given.inner) if given.inner else (nproc // 2 if nproc % 2 == 0 and nproc >= 4 else nproc)
    if nproc % inner:
        raise OptionError(f"INNER={inner}: must divide NPROC={nproc}")
    name = given.name or given.attention
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise OptionError(f"NAME={name}: must be made of letters, digits, '.', '_' and '-'")
    options = TrainOptions(
        name=name,
        attention=given.attention,
        seq=_sequence(given.seq, nproc),
        steps=_positive("STEPS", given.steps),
        nproc=nproc,
        inner=inner,
        top_p=_share(given.top_p),
        data=given.data,
        resume=_switch("RESUME", given.resume),
        extra=_words("EXTRA", given.extra),
        gpus=gpus,
    )
    if options.resume:
        _check_resumable(options)
    return options


def _check_resumable(options: TrainOptions) -> None:
    """Raise OptionError unless the run has a checkpoint from before its last step."""
    done = options.last_saved
    if done is None:
        raise OptionError(f"RESUME=1: {options.checkpoint} holds no checkpoint (NAME={options.name})")
    if done >= options.steps:
        raise OptionError(
            f"STEPS={options.steps}: the checkpoint of {options.name} is at step {done}; ask for more steps"
        )


def _positive(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) == 0:
        raise OptionError(f"{name}={text}: must be a positive integer")
    return int(text)


def _switch(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise OptionError(f"{name}={text}: must be 0 or 1")
    return text == "1"


def _words(name: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise OptionError(f"{name}={text}: must be quoted as for a shell ({error})") from None


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise OptionError(f"TOP_P={text}: must be a number in (0, 1]")
    return value


def _sequence(text: str, nproc: int) -> int:
    """The sequence length; with several processes a multiple of a stripe of 64 tokens on each."""
    value = _positive("SEQ", text)
    unit = BLOCK * nproc
    if value % unit:
        below, above = value // unit * unit, (value // unit + 1) * unit
        valid = f"{below} or {above}" if below else str(above)
        raise OptionError(f"SEQ={value}: must be a multiple of {unit} (64 tokens x {nproc} processes), e.g. {valid}")
    return value


def model_arguments(options: TrainOptions) -> list[str]:
    """The model: a small GPT with rotary positions, grouped-query attention, RMSNorm and SwiGLU."""
    return shlex.split(
        f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} "
        f"--num-attention-heads {HEADS} --group-query-attention --num-query-groups {KV_HEADS} --kv-channels {HEAD_DIM} "
        f"--seq-length {options.seq} --max-position-embeddings {options.seq} --position-embedding-type rope "
        f"--normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
        f"--init-method-std {INIT_STD}"
    )


def data_arguments(prefix: str) -> list[str]:
    """The two datasets `prefix`-train and `prefix`-valid, and their byte tokens."""
    train, valid = shlex.quote(f"{prefix}-train"), shlex.quote(f"{prefix}-valid")
    return shlex.split(
        f"--train-data-path {train} --valid-data-path {valid} --data-cache-path {DATA_FOLDER / 'cache'} "
        "--tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 64 "
        "--no-create-attention-mask-in-dataloader"
    )


def optimizer_arguments(options: TrainOptions) -> list[str]:
    """Steps, learning rate, logging and checkpoints."""
    interval = options.log_interval
    arguments = shlex.split(
        f"--micro-batch-size 1 --global-batch-size 1 --train-iters {options.steps} --lr 3e-3 --min-lr 3e-4 "
        f"--lr-decay-style cosine --lr-warmup-iters {max(1, options.steps // 20)} --adam-beta2 0.95 "
        f"--weight-decay 0.01 --log-interval {interval} --tensorboard-log-interval {interval} "
        f"--tensorboard-dir {options.folder}/tensorboard --mtraining-metrics {options.folder}/metrics.jsonl "
        f"--eval-interval {options.steps + 1} --eval-iters 2 "
        f"--save {options.checkpoint} --save-interval {options.save_interval} --ckpt-format torch_dist"
    )
    if options.resume:  # a longer run than the one before decays over its own steps
        arguments += ["--load", str(options.checkpoint), "--override-opt_param-scheduler"]
    return arguments


def attention_arguments(options: TrainOptions, nproc: int) -> list[str]:
    """The plugin's flag and what goes with it, over `nproc` context-parallel ranks."""
    arguments = ["--attention-backend", "mtraining", "--context-parallel-size", str(nproc)]
    if nproc > options.inner:
        arguments += ["--hierarchical-context-parallel-sizes", str(options.inner), str(nproc // options.inner)]
    if options.attention == "dense":
        return [*arguments, "--mtraining-dense"]
    max_vertical, max_slash = int(options.seq * VERTICAL_CAP), max(1, int(options.seq // BLOCK * SLASH_CAP))
    caps = ["--mtraining-max-vertical", str(max_vertical), "--mtraining-max-slash", str(max_slash)]
    return [*arguments, "--mtraining-top-p", str(options.top_p), *caps]


def device_arguments(options: TrainOptions) -> list[str]:
    """CPU: the compatibility layer. GPU: bf16, and Megatron's own modules where Transformer Engine is not installed."""
    if not options.gpus:
        return ["--mtraining-cpu"]
    arguments = ["--bf16"]
    if importlib.util.find_spec("transformer_engine") is None:
        arguments += shlex.split(
            "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-rope-fusion"
        )
    return arguments


def launch_command(script: str, nproc: int, arguments: list[str]) -> list[str]:
    """The command that runs `script` in `nproc` processes through the plugin's launcher."""
    torchrun = [relative_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    return [*torchrun, "-m", "megatron_mtraining.launch", script, *arguments]


def training_command(options: TrainOptions, prefix: str) -> list[str]:
    """The whole command of the training run on the dataset `prefix`."""
    arguments = [
        *attention_arguments(options, options.nproc),
        *device_arguments(options),
        *model_arguments(options),
        *data_arguments(prefix),
        *optimizer_arguments(options),
        *options.extra,
    ]
    return launch_command("examples/pretrain_gpt.py", options.nproc, arguments)


def environment(nproc: int) -> dict[str, str]:
    """What the command needs in its environment: the cores shared out among the processes; on GPUs, Megatron asks for
    one connection where it overlaps context parallelism (architectures up to Hopper).
    """
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def relative_python() -> str:
    """This interpreter, as a path relative to the working directory where that is shorter."""
    executable = Path(sys.executable)
    return str(executable.relative_to(Path.cwd())) if executable.is_relative_to(Path.cwd()) else str(executable)


def printable(command: list[str], variables: dict[str, str]) -> str:
    """A command with its variables, one option a line, to be pasted into a shell."""
    lines = [" ".join(f"{name}={value}" for name, value in variables.items())]
    for word in command:
        if word.startswith("--") and len(lines[-1]) + len(word) > 70:
            lines.append("   ")
        lines[-1] += f" {shlex.quote(word)}"
    return " \\\n".join(line.rstrip() for line in lines)
