"""What sparse attention costs weights that were trained densely, by variant and by layer (docs/proof.md).

    python -m benchmarks.proof.zero_shot --gguf MODEL.gguf --data data/proof --length 32768 --steps 40 --output FOLDER \
        --variants top-p-0.95 segments-8-0.9 --by-layer top-p-0.95

Trains dense weights as ``benchmarks.proof.runs`` does (seed 0), then evaluates them under every variant: held-out loss, loss
and hits on the digits of planted answers in the middle of the text, density. ``--by-layer`` makes one layer sparse at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from benchmarks.proof.attention import attention_layers, recorded, use_by_layer
from benchmarks.proof.corpus import read_ids
from benchmarks.proof.evaluate import answers_of, logits_of, planted, token_losses
from benchmarks.proof.row_study import configs_of, study_rows
from benchmarks.proof.session import single_rank
from benchmarks.proof.smollm import ROPE_THETA, build_model, read_weights
from benchmarks.proof.tasks import Phrases
from benchmarks.proof.train import Data, Plan, run, train
from benchmarks.proof.variants import DENSE, variant


def windows_of(data: Data, plan: Plan, device: torch.device) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """``plan.windows`` evenly placed held-out windows ``[1, length + 1]``; half as many with planted facts, and their rows."""
    starts = np.linspace(0, len(data.valid) - plan.length - 1, plan.windows).astype(int)
    plain = [torch.from_numpy(data.valid[s : s + plan.length + 1].astype(np.int64))[None].to(device) for s in starts]
    asked = [
        tuple(x.to(device) for x in planted(data.valid, plan.length, plan.questions, data.phrases, seed))
        for seed in range(max(1, plan.windows // 2))
    ]
    return plain, asked  # type: ignore[return-value]


def measure(
    model: GPTModel, names: list[str], plain: list[Tensor], asked: list[tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    """Losses in nats under a variant for each layer, hits of whole answers, and the mean density of the sparse layers."""
    model.train()  # nothing is dropped in this model; the plugin records densities in training only
    use_by_layer(model, names)
    losses, answer_losses, hits, density = [], [], [], []
    with torch.no_grad():
        for ids in plain:
            with recorded() as indices:
                losses.append(token_losses(logits_of(model, ids[:, :-1]), ids[:, 1:]).mean().item())
            density += [index.density() for index, *_ in indices.values()]
        for ids, rows in asked:
            loss, right, count = answers_of(model, ids, rows)
            answer_losses.append(loss)
            hits.append(right / count)
    return {
        "loss": float(np.mean(losses)),
        "by_window": losses,
        "answer_loss": float(np.mean(answer_losses)),
        "answers_right": float(np.mean(hits)),
        "density": torch.stack(density).mean().item() if density else 1.0,
    }


def sweep(
    model: GPTModel, data: Data, plan: Plan, variants: list[str], by_layer: list[str], device: torch.device
) -> Iterator[dict[str, Any]]:
    """A line per variant, then per variant of ``by_layer`` and layer, the others being dense."""
    layers = len(attention_layers(model))
    plain, asked = windows_of(data, plan, device)
    for name in (DENSE, *variants):
        start = time.perf_counter()
        line = measure(model, [name] * layers, plain, asked)
        yield {"variant": name, **line, "seconds": round(time.perf_counter() - start, 2)}
    for name in by_layer:
        for layer in range(layers):
            names = [name if number == layer else DENSE for number in range(layers)]
            yield {"variant": name, "layer": layer + 1, **measure(model, names, plain, asked)}


def best_of(lines: list[dict[str, Any]], gap: float) -> str:
    """The variant of the least density whose loss is at most ``gap`` above dense's; the one of the least loss if none is."""
    whole = {line["variant"]: line for line in lines if "layer" not in line}
    base = whole.pop(DENSE)["loss"]
    near = {name: line["density"] for name, line in whole.items() if line["loss"] - base <= gap}
    return min(near, key=lambda name: near[name]) if near else min(whole, key=lambda name: whole[name]["loss"])


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--variants", nargs="+", required=True)
    parser.add_argument("--by-layer", nargs="*", default=[])
    parser.add_argument("--row-layers", nargs="*", type=int, default=[], help="row study of these layers, from 1")
    parser.add_argument(
        "--then-train", nargs="*", type=int, default=[], help="seeds with which the best variant is trained"
    )
    parser.add_argument(
        "--gap", type=float, default=0.01, help="the best keeps the loss within this at the least density"
    )
    options = parser.parse_args()
    plan = Plan(options.length, options.steps, questions=options.questions, windows=options.windows)
    phrases = Phrases.load(options.data / "phrases.json")
    data = Data(read_ids(options.data, "train"), read_ids(options.data, "valid"), phrases)
    options.output.mkdir(parents=True, exist_ok=True)
    with single_rank() as device, (options.output / f"zero-shot-{options.length}.jsonl").open("w") as file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        shape, weights = read_weights(options.gguf)
        weights = {name: tensor.to(device) for name, tensor in weights.items()}
        model = build_model(shape, max_seq=options.length, rope_theta=ROPE_THETA, dtype=torch.bfloat16).to(device)
        for line in train(model, weights, DENSE, options.seed, plan, data, device):
            write(line)
        swept = []
        for line in sweep(model, data, plan, options.variants, options.by_layer, device):
            write(line)
            swept.append(line)
        for seed in options.then_train:
            name = best_of(swept, options.gap)
            path = options.output / f"{name}-seed{seed}-{options.length}.jsonl"
            run(model, weights, name, seed, replace(plan, windows=8, planted=6), data, device, path)
        if options.row_layers:
            tokens, rows = (x.to(device) for x in planted(data.valid, plan.length, plan.questions, phrases, 0))
            configs = configs_of([name for name in options.variants if variant(name).has_one_index])
            for line in study_rows(model, tokens, rows, configs, options.row_layers, 1024):
                write(line)


if __name__ == "__main__":
    main()
