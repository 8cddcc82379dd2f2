"""Loss by position and retrieval of a trained model, under dense or sparse attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from benchmarks.proof.attention import use
from benchmarks.proof.tasks import DIGITS, Phrases, answer_rows, make_samples, training_sequence

TOKENS_PER_BATCH = 131072
BUCKET = 1024
LOSS_ROWS = 8192  # logits are turned into fp32 this many at a time


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each token, fp32 ``[batch, seq]``; ``logits [batch, seq, vocab]`` in any dtype."""
    flat, targets = logits.flatten(0, 1), labels.flatten()
    parts = [
        torch.nn.functional.cross_entropy(flat[i : i + LOSS_ROWS].float(), targets[i : i + LOSS_ROWS], reduction="none")
        for i in range(0, len(flat), LOSS_ROWS)
    ]
    return torch.cat(parts).view(labels.shape)


def logits_of(model: GPTModel, tokens: Tensor) -> Tensor:
    """``[batch, seq, vocab]`` of int64 tokens ``[batch, seq]``."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    out: Tensor = model(tokens, positions, None)
    return out


@contextmanager
def last_rows_only(model: GPTModel, rows: int) -> Iterator[None]:
    """Within the block the model returns the logits of the last ``rows`` positions alone."""
    handle = model.output_layer.register_forward_pre_hook(lambda _, inputs: (inputs[0][-rows:], *inputs[1:]))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def evaluating(model: GPTModel, attention: str) -> Iterator[None]:
    """Evaluation mode under the attention of a variant; the caller puts its own back afterwards."""
    training = model.training
    model.eval()
    use(model, attention)
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def loss_by_position(
    model: GPTModel, attention: str, text: np.ndarray, length: int, windows: int, device: torch.device
) -> dict[str, Any]:
    """Held-out loss in nats of ``windows`` windows of ``text``, evenly placed: by window, and by bucket of positions."""
    starts = np.linspace(0, len(text) - length - 1, windows).astype(int)
    losses = []
    with evaluating(model, attention):
        for start in starts:
            ids = torch.from_numpy(text[start : start + length + 1].astype(np.int64))[None].to(device)
            losses.append(token_losses(logits_of(model, ids[:, :-1]), ids[:, 1:])[0])
    table = torch.stack(losses).double()
    buckets = table.mean(0).view(-1, min(BUCKET, length)).mean(1)
    return {"by_window": table.mean(1).tolist(), "by_position": buckets.tolist(), "loss": table.mean().item()}


def retrieval(
    model: GPTModel,
    attention: str,
    task: str,
    length: int,
    count: int,
    text: np.ndarray,
    phrases: Phrases,
    seed: int,
    device: torch.device,
) -> dict[str, Any]:
    """Share of samples whose whole answer greedy decoding gives.

    One forward pass over prompt and answer tells: greedy decoding gives the answer iff each of its tokens is the best
    one after those before it. Under sparse attention the answer's own rows are among the probe rows, as they are when a
    sequence is scored in training.
    """
    samples = list(make_samples(task, length, count, text, phrases, seed))
    batch = max(1, TOKENS_PER_BATCH // length)
    right: list[int] = []
    with evaluating(model, attention), last_rows_only(model, DIGITS + 1):
        for first in range(0, count, batch):
            tokens = torch.from_numpy(np.stack([s.tokens for s in samples[first : first + batch]])).to(device)
            best = logits_of(model, tokens)[:, :-1].argmax(-1)
            right += (best == tokens[:, -DIGITS:]).all(1).int().tolist()
    return {
        "task": task,
        "length": length,
        "right": sum(right),
        "count": count,
        "depths": [round(s.depth, 3) for s, hit in zip(samples, right, strict=True) if not hit],
    }


def planted(text: np.ndarray, length: int, questions: int, phrases: Phrases, seed: int) -> tuple[Tensor, Tensor]:
    """Token ids ``[1, length + 1]`` of a window with planted facts, and the rows that predict the answers' digits."""
    ids = training_sequence(text, length + 1, questions, phrases, np.random.default_rng([seed, 29]))
    return torch.from_numpy(ids)[None], torch.from_numpy(answer_rows(ids, phrases))


def answers_of(model: GPTModel, tokens: Tensor, rows: Tensor) -> tuple[float, int, int]:
    """Mean loss of the digits of planted answers, answers that are right as a whole, and their number."""
    logits = logits_of(model, tokens[:, :-1])[:, rows]
    labels = tokens[:, 1:][:, rows]
    right = (logits.argmax(-1) == labels).view(-1, DIGITS).all(1)
    return token_losses(logits, labels).mean().item(), int(right.sum()), right.numel()


def planted_answers(model: GPTModel, attention: str, windows: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """:func:`answers_of` in the middle of the text, where no probe row of the end looks, over some of :func:`planted`."""
    with evaluating(model, attention):
        found = [answers_of(model, tokens, rows) for tokens, rows in windows]
    losses, right, count = zip(*found, strict=True)
    return {"loss": float(np.mean(losses)), "right": sum(right), "count": sum(count)}
