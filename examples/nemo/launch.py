"""Starts `run_recipe.py` with NeMo-Run: on this machine, or on a Slurm cluster.

    python examples/nemo/launch.py --nodes 4 --gpus 8 --slurm ACCOUNT PARTITION -- \
        qwen25_3b_pretrain_32gpu_512k_config checkpoint.pretrained_checkpoint=/data/checkpoints/qwen25_3b_512k

Everything after `--` goes to `run_recipe.py`; give absolute paths, because NeMo-Run starts it in a folder of its own. With
`--image`, this repository and every such path must be in the container: `--mount`. `--dry-run` shows what would be started.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nemo_run as run

SCRIPT = Path(__file__).resolve().with_name("run_recipe.py")


def count(text: str) -> int:
    """A number from 1 up."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a number from 1 up")
    return int(text)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's options, and the words for `run_recipe.py`."""
    parser = argparse.ArgumentParser(description="Start a recipe with NeMo-Run.")
    parser.add_argument("--nodes", type=count, default=1)
    parser.add_argument("--gpus", type=count, default=8, help="GPUs of a node")
    parser.add_argument(
        "--slurm", nargs=2, metavar=("ACCOUNT", "PARTITION"), help="submit to Slurm (default: run here)"
    )
    parser.add_argument("--time", default="04:00:00", help="Slurm's time limit")
    parser.add_argument("--image", default=None, help="container image, on Slurm")
    parser.add_argument("--mount", action="append", default=[], help="FOLDER[:FOLDER_IN_CONTAINER], on Slurm")
    parser.add_argument("--name", default="mtraining", help="name of the experiment")
    parser.add_argument("--dry-run", action="store_true")
    split = list(argv).index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    words = list(argv[split + 1 :])
    if not words:
        parser.error("name the recipe after --")
    if not args.slurm:
        if args.nodes > 1:
            parser.error(f"--nodes {args.nodes}: more than one node needs --slurm")
        if args.image or args.mount:
            parser.error(f"{'--image' if args.image else '--mount'}: a container needs --slurm")
    return args, words


def make_executor(args: argparse.Namespace) -> Any:
    """Where it runs: `torchrun` here, or on the nodes that Slurm gives."""
    if not args.slurm:
        return run.LocalExecutor(ntasks_per_node=args.gpus, launcher="torchrun")
    account, partition = args.slurm
    return run.SlurmExecutor(
        account=account,
        partition=partition,
        nodes=args.nodes,
        ntasks_per_node=args.gpus,
        gpus_per_node=args.gpus,
        time=args.time,
        container_image=args.image,
        container_mounts=[mount if ":" in mount else f"{mount}:{mount}" for mount in args.mount],
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Starts the experiment."""
    args, words = parse(sys.argv[1:] if argv is None else argv)
    task = run.Script(path=str(SCRIPT), entrypoint="python", args=words)
    run.run(task, executor=make_executor(args), name=args.name, dryrun=args.dry_run)


if __name__ == "__main__":
    main()
