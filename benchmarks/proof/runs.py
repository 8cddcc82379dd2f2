"""Many runs in one process: what is not there yet, in order, until the time is up.

    python -m benchmarks.proof.runs --gguf MODEL.gguf --data data/proof --output FOLDER --seconds 180 \
        --variants dense top-p-0.95 --seeds 0 1 2 --length 32768 --steps 60 --retrieval needle:8192:140

A run's file holds a header, a line per step, and the lines of its evaluation; runs whose file exists are skipped.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from benchmarks.proof.corpus import read_ids
from benchmarks.proof.session import single_rank
from benchmarks.proof.tasks import Phrases
from benchmarks.proof.variants import DENSE


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder that benchmarks.proof.corpus wrote")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run that would end after this")
    parser.add_argument("--variants", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--questions", type=int, default=24, help="facts planted and asked for in a training sequence")
    parser.add_argument("--planted", type=int, default=8, help="held-out windows with facts planted and asked for")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--retrieval", nargs="*", default=[], help="TASK:LENGTH:SAMPLES")
    parser.add_argument("--study-layers", nargs="+", type=int, help="index study of these layers after each dense run")
    return parser.parse_args()


def main() -> None:
    """Command line; see the module's docstring."""
    began = time.monotonic()
    options = parse()
    from benchmarks.proof.index_study import families, study_model
    from benchmarks.proof.smollm import ROPE_THETA, build_model, read_weights
    from benchmarks.proof.train import Data, Plan, run

    wanted = [item.split(":") for item in options.retrieval]
    plan = Plan(
        length=options.length,
        steps=options.steps,
        learning_rate=options.learning_rate,
        questions=options.questions,
        windows=options.windows,
        planted=options.planted,
        retrieval=tuple((task, int(length), int(count)) for task, length, count in wanted),
    )
    data = Data(
        read_ids(options.data, "train"), read_ids(options.data, "valid"), Phrases.load(options.data / "phrases.json")
    )
    options.output.mkdir(parents=True, exist_ok=True)
    with single_rank() as device:
        shape, weights = read_weights(options.gguf)
        weights = {name: tensor.to(device) for name, tensor in weights.items()}
        model = build_model(shape, max_seq=options.length, rope_theta=ROPE_THETA, dtype=torch.bfloat16).to(device)
        print(json.dumps({"ready_s": round(time.monotonic() - began, 1)}), flush=True)
        longest = 0.0
        for seed in options.seeds:
            for name in options.variants:
                path = options.output / f"{name}-seed{seed}-{options.length}.jsonl"
                start = time.monotonic()
                if path.exists() or start - began + longest > options.seconds:
                    continue
                run(model, weights, name, seed, plan, data, device, path)
                if name == DENSE and options.study_layers:
                    lines = study_model(
                        model, data.valid, options.length, 1, families(options.length), options.study_layers
                    )
                    with (options.output / f"index-{options.length}-seed{seed}.jsonl").open("w") as file:
                        file.writelines(json.dumps(line) + "\n" for line in lines)
                longest = max(longest, time.monotonic() - start)
                print(json.dumps({"done": path.name, "s": round(time.monotonic() - start, 1)}), flush=True)


if __name__ == "__main__":
    main()
