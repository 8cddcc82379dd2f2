"""Many runs in one process: what is not there yet, in order, until the time is up.

    python -m benchmarks.proof.runs --gguf MODEL.gguf --data data/proof --output FOLDER --seconds 180 \
        --variants dense top-p-0.95 --seeds 0 1 2 --length 32768 --steps 60 --retrieval needle:8192:140

A run's file holds a header, a line per step, and the lines of its evaluation; runs whose file exists are skipped. With
``--states`` a run that was cut off is taken up where its state was last written, with the same losses as in one go.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from benchmarks.proof.corpus import read_ids
from benchmarks.proof.index_study import families, study_model
from benchmarks.proof.session import single_rank
from benchmarks.proof.smollm import ROPE_THETA, build_model, read_weights
from benchmarks.proof.state import RunState
from benchmarks.proof.tasks import Phrases
from benchmarks.proof.train import Data, Plan, run
from benchmarks.proof.variants import DENSE


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, or arguments in its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder that benchmarks.proof.corpus wrote")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run that would end after this")
    parser.add_argument("--variants", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--windows", type=int, default=8, help="held-out windows for the loss; 0: none")
    parser.add_argument("--questions", type=int, default=24, help="facts planted and asked for in a training sequence")
    parser.add_argument("--planted", type=int, default=8, help="held-out windows with facts planted and asked for")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--retrieval", nargs="*", default=[], help="TASK:LENGTH:SAMPLES")
    parser.add_argument(
        "--sparse", nargs="+", default=["top-p-0.95"], help="variants that dense runs are evaluated under besides dense"
    )
    parser.add_argument("--recall-steps", nargs="*", type=int, default=[], help="steps after which recall is measured")
    parser.add_argument("--states", type=Path, help="folder of the states of unfinished runs, which are taken up again")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two writes of a state")
    parser.add_argument(
        "--steps-a-call", type=int, help="leave a run after so many steps; the next call goes on (--states)"
    )
    parser.add_argument("--study-layers", nargs="+", type=int, help="index study of these layers after each dense run")
    options = parser.parse_args(arguments)
    if options.steps_a_call is not None and options.states is None:
        parser.error("--steps-a-call: needs --states, where the run's state is kept")
    return options


def plan_of(options: argparse.Namespace) -> Plan:
    """What the command line says that all runs share."""
    wanted = [item.split(":") for item in options.retrieval]
    return Plan(
        length=options.length,
        steps=options.steps,
        learning_rate=options.learning_rate,
        questions=options.questions,
        windows=options.windows,
        planted=options.planted,
        retrieval=tuple((task, int(length), int(count)) for task, length, count in wanted),
        sparse=tuple(options.sparse),
        recall_steps=tuple(options.recall_steps),
    )


@dataclass(frozen=True)
class Start:
    """What all runs of a process start from.

    Attributes:
        model: any attention; every run loads the weights anew.
        weights: pretrained, by Megatron's names, on the device.
        data: text and phrases.
        device: of the model.
    """

    model: GPTModel
    weights: dict[str, Tensor]
    data: Data
    device: torch.device

    @classmethod
    def load(cls, gguf: Path, folder: Path, longest: int, device: torch.device) -> Start:
        """Reads model and data; ``longest``: most tokens of a sequence."""
        shape, weights = read_weights(gguf)
        model = build_model(shape, max_seq=longest, rope_theta=ROPE_THETA, dtype=torch.bfloat16).to(device)
        data = Data(read_ids(folder, "train"), read_ids(folder, "valid"), Phrases.load(folder / "phrases.json"))
        return cls(model, {name: tensor.to(device) for name, tensor in weights.items()}, data, device)


def state_of(options: argparse.Namespace, path: Path) -> RunState:
    """Where the run of a result file keeps its state."""
    if options.states is None:
        return RunState()
    options.states.mkdir(parents=True, exist_ok=True)
    return RunState(options.states / f"{path.stem}.pt", options.save_every, options.steps_a_call)


def perform(options: argparse.Namespace, start: Start, began: float) -> None:
    """The runs of a command line, those whose file exists left out.

    Args:
        options: of :func:`parse`.
        start: what they start from.
        began: ``time.monotonic()`` from which ``options.seconds`` count.
    """
    options.output.mkdir(parents=True, exist_ok=True)
    plan, longest = plan_of(options), 0.0
    for seed in options.seeds:
        for name in options.variants:
            path = options.output / f"{name}-seed{seed}-{options.length}.jsonl"
            now = time.monotonic()
            if path.exists() or now - began + longest > options.seconds:
                continue
            state = state_of(options, path)
            run(start.model, start.weights, name, seed, plan, start.data, start.device, path, state)
            if state.left:
                print(json.dumps({"left": path.name}), flush=True)
                continue
            if name == DENSE and options.study_layers:
                study(start, options, seed)
            longest = max(longest, time.monotonic() - now)
            print(json.dumps({"done": path.name, "s": round(time.monotonic() - now, 1)}), flush=True)


def study(start: Start, options: argparse.Namespace, seed: int) -> None:
    """The index study of some layers of the model as it is now."""
    text, length = start.data.valid, options.length
    lines = study_model(start.model, text, length, 1, families(length), options.study_layers)
    with (options.output / f"index-{length}-seed{seed}.jsonl").open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def main() -> None:
    """Command line; see the module's docstring."""
    began = time.monotonic()
    options = parse()
    with single_rank() as device:
        start = Start.load(options.gguf, options.data, options.length, device)
        print(json.dumps({"ready_s": round(time.monotonic() - began, 1)}), flush=True)
        perform(options, start, began)


if __name__ == "__main__":
    main()
