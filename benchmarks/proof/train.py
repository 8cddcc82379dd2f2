"""One training run: the pretrained weights, a variant's attention, a seed's batches; then its evaluation."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from benchmarks.proof.attention import recorded, use
from benchmarks.proof.evaluate import logits_of, loss_by_position, planted, planted_answers, retrieval, token_losses
from benchmarks.proof.smollm import load_weights
from benchmarks.proof.state import RunState
from benchmarks.proof.step_recall import recall_line, watched
from benchmarks.proof.tasks import Phrases, training_sequence


@dataclass(frozen=True)
class Plan:
    """What every run of a comparison shares.

    Attributes:
        length: tokens of a step (one sequence).
        steps: optimizer steps.
        learning_rate: peak; linear warm-up over the first tenth of the steps, then cosine down to a tenth.
        questions: facts planted in the first half of each training sequence and asked for in the second.
        windows: held-out windows of ``length`` for the loss by position; 0: the run is for its steps alone.
        planted: held-out windows with facts planted and asked for as in training.
        retrieval: (task, length, samples) of the retrieval evaluation; each seed draws its own samples.
        sparse: variants whose attention stands for sparse inference in the evaluation of dense runs.
        recall_steps: steps after which the recall of every layer's index is measured on that step's batch.
    """

    length: int
    steps: int
    learning_rate: float = 3e-4
    questions: int = 24
    windows: int = 8
    planted: int = 0
    retrieval: tuple[tuple[str, int, int], ...] = ()
    sparse: tuple[str, ...] = ("top-p-0.95",)
    recall_steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Data:
    """Token ids and phrases."""

    train: np.ndarray
    valid: np.ndarray
    phrases: Phrases

    def batches(self, plan: Plan, seed: int) -> Iterator[np.ndarray]:
        """The sequences of a seed, int64 ``[length + 1]``: the same for every variant."""
        rng = np.random.default_rng([seed, 17])
        for _ in range(plan.steps):
            yield training_sequence(self.train, plan.length + 1, plan.questions, self.phrases, rng)


class MasterAdamW:
    """AdamW on fp32 copies of a model's parameters, as Megatron's mixed precision keeps them."""

    def __init__(self, parameters: list[torch.nn.Parameter], masters: list[Tensor], learning_rate: float) -> None:
        self.parameters = parameters
        self.masters = [master.clone() for master in masters]
        self.adam = torch.optim.AdamW(
            self.masters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=masters[0].is_cuda
        )

    def step(self, learning_rate: float) -> Tensor:
        """One update from the parameters' gradients, clipped to norm 1; returns the norm before."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        self.adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        return norm

    def state(self) -> dict[str, Any]:
        """Masters and moments."""
        return {"masters": self.masters, "adam": self.adam.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Puts what :meth:`state` gave back, and the masters into the parameters."""
        with torch.no_grad():
            torch._foreach_copy_(self.masters, [master.to(self.masters[0].device) for master in state["masters"]])
            torch._foreach_copy_(self.parameters, self.masters)
        self.adam.load_state_dict(state["adam"])


def learning_rate(plan: Plan, step: int) -> float:
    """The rate of a step, counted from 0."""
    warm = max(1, plan.steps // 10)
    if step < warm:
        return plan.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, plan.steps - warm)
    return plan.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(
    model: GPTModel,
    weights: dict[str, Tensor],
    name: str,
    seed: int,
    plan: Plan,
    data: Data,
    device: torch.device,
    state: RunState | None = None,
) -> Iterator[dict[str, Any]]:
    """Trains the model in place; yields a line per step (loss, gradient norm, seconds, density by layer) and recalls.

    Recalls are by layer, a line after each of the plan's ``recall_steps``. With a ``state`` that has begun, the steps it
    holds are not done again; it ends early where this process leaves the run.
    """
    state = state or RunState()
    load_weights(model, weights)
    model.train()
    use(model, name)
    names = [n for n, _ in model.named_parameters()]
    optimizer = MasterAdamW(list(model.parameters()), [weights[n] for n in names], plan.learning_rate)
    done = state.restore(optimizer)
    for step, batch in enumerate(data.batches(plan, seed)):
        if step < done:
            continue
        ids = torch.from_numpy(batch)[None].to(device)
        measured = step in plan.recall_steps
        began = time.perf_counter()
        with recorded() as indices, watched(model) if measured else nullcontext([]) as seen:
            loss = token_losses(logits_of(model, ids[:, :-1]), ids[:, 1:]).mean()
            loss.backward()
            norm = optimizer.step(learning_rate(plan, step))
            result = [loss.item(), norm.item()]  # waits for the device
            seconds = time.perf_counter() - began
        density = [indices[layer][0].density() for layer in sorted(indices)]
        line = {"step": step, "loss": result[0], "grad_norm": result[1], "seconds": round(seconds, 5)}
        if density:
            line["density_by_layer"] = [round(x, 4) for x in torch.stack(density).tolist()]
        yield line
        if measured and indices:
            yield {"recall_after": step, "recall": recall_line(model, seen, indices)}
        state.after(step, optimizer)
        if state.left:
            return


def evaluate_run(
    model: GPTModel, name: str, seed: int, plan: Plan, data: Data, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Held-out loss by position and retrieval, under dense attention and under the run's own (or the plan's sparse)."""
    attentions = ("dense", *(plan.sparse if name == "dense" else (name,)))
    for attention in attentions if plan.windows else ():
        found = loss_by_position(model, attention, data.valid, plan.length, plan.windows, device)
        yield {"valid": found, "attention": attention}
    windows = [planted(data.valid, plan.length, plan.questions, data.phrases, number) for number in range(plan.planted)]
    windows = [(tokens.to(device), rows.to(device)) for tokens, rows in windows]
    for attention in attentions if windows else ():
        yield {"planted": planted_answers(model, attention, windows), "attention": attention}
    for task, length, count in plan.retrieval:
        for attention in attentions:
            found = retrieval(model, attention, task, length, count, data.valid, data.phrases, seed, device)
            yield {"retrieval": found, "attention": attention}


def run(
    model: GPTModel,
    weights: dict[str, Tensor],
    name: str,
    seed: int,
    plan: Plan,
    data: Data,
    device: torch.device,
    path: Path,
    state: RunState | None = None,
) -> None:
    """Trains and evaluates; writes JSON lines to ``path``, which appears under its name when the run is complete."""
    state = state or RunState()
    state.begin({"variant": name, "seed": seed, "plan": asdict(plan), "device": str(device)})
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in state.lines)

        def write(line: dict[str, Any]) -> None:
            state.lines.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()

        for line in train(model, weights, name, seed, plan, data, device, state):
            write(line)
        if state.left:
            return
        for line in evaluate_run(model, name, seed, plan, data, device):
            write(line)
    partial.rename(path)
    state.remove()
