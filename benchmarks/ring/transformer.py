"""A dense transformer in bf16 whose attention is given from outside, and one training step of it.

The sequence may be dealt to context-parallel ranks: every rank holds all weights, and gradients are summed over the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_mtraining.simulator.memory import Model

PIECE = 4096
"""Tokens whose logits are made at a time."""
ROTARY_BASE = 1e6
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(q, k, v)``, each ``[1, tokens, heads, head_dim]``, to what they attend, of q's shape."""


def layer_shapes(model: Model) -> list[tuple[int, ...]]:
    """Shapes of a layer's weights: query-key-value, projection, up (with its gate), down, and two norms."""
    width = (model.heads + 2 * model.kv_heads) * model.head_dim
    return [
        (width, model.hidden), (model.hidden, model.heads * model.head_dim), (2 * model.ffn, model.hidden),
        (model.hidden, model.ffn), (model.hidden,), (model.hidden,),
    ]  # fmt: skip


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``[tokens, heads, dim]``; ``cos`` and ``sin`` are ``[tokens, 1, dim // 2]``."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rotary_table(position: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[tokens, 1, dim // 2]`` of some positions."""
    frequency = ROTARY_BASE ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=position.device) / dim)
    angle = position.double()[:, None, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def queries_keys_values(
    model: Model, weights: list[Tensor], x: Tensor, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer attends with, ``[tokens, heads, head_dim]`` each, from its input ``[tokens, hidden]``."""
    made = F.linear(F.rms_norm(x, (model.hidden,), weights[4]), weights[0]).unflatten(-1, (-1, model.head_dim))
    q, k, v = made.split((model.heads, model.kv_heads, model.kv_heads), 1)
    return rotate(q, *rotary), rotate(k, *rotary), v


def after_attention(model: Model, weights: list[Tensor], x: Tensor, attended: Tensor) -> Tensor:
    """A layer's output ``[tokens, hidden]`` from its input and ``attended [tokens, heads, head_dim]``."""
    hidden = x + F.linear(attended.flatten(1), weights[1])
    gate, value = F.linear(F.rms_norm(hidden, (model.hidden,), weights[5]), weights[2]).chunk(2, -1)
    return hidden + F.linear(F.silu(gate) * value, weights[3])


@dataclass
class Marks:
    """Points of a step in time; on CUDA by events, so that the host is not held up."""

    cuda: bool
    points: list[tuple[str, torch.cuda.Event | float]] = field(default_factory=list)

    def __call__(self, name: str) -> None:
        """The part that ends here."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.points.append((name, event))
        else:
            self.points.append((name, time.perf_counter()))

    def read(self) -> dict[str, float]:
        """Milliseconds of each part, and of the whole, ``step``."""
        if self.cuda:
            torch.cuda.synchronize()

        def between(first: torch.cuda.Event | float, last: torch.cuda.Event | float) -> float:
            if isinstance(first, float) or isinstance(last, float):
                return (float(last) - float(first)) * 1e3  # type: ignore[arg-type]
            return float(first.elapsed_time(last))

        times = [point for _, point in self.points]
        parts = {name: between(times[n], times[n + 1]) for n, (name, _) in enumerate(self.points[1:])}
        return parts | {"step": between(times[0], times[-1])}


class Transformer:
    """Weights, optimizer and one rank's tokens.

    fp32 weights, gradients and moments beside bf16 weights (fp32 ones on the CPU), as Megatron keeps them, none sharded.
    The output layer is the embedding. The same seed gives the same weights and tokens on all ranks.

    Args:
        position: int64 ``[tokens]``, where in the sequence this rank's tokens lie, on the device.
        group: the ranks that share the sequence; ``None``: this process has it all.
    """

    def __init__(
        self, model: Model, layers: int, seq_len: int, position: Tensor, group: dist.ProcessGroup | None = None
    ) -> None:
        self.model, self.group, device = model, group, position.device
        self.dtype = torch.bfloat16 if position.is_cuda else torch.float32
        generator = torch.Generator(device).manual_seed(0)
        shapes = [(model.vocabulary, model.hidden), (model.hidden,), *layer_shapes(model) * layers]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = [torch.zeros(sum(sizes), device=device) for _ in range(2)]
        self.grad_sum = flat[1]
        self.main, self.main_grads = (
            [part.view(shape) for part, shape in zip(x.split(sizes), shapes, strict=True)] for x in flat
        )
        for weight in self.main:
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, 0.02, generator=generator)
        self.weights = [weight.to(self.dtype, copy=True).requires_grad_() for weight in self.main]
        for weight, grad in zip(self.main, self.main_grads, strict=True):
            weight.grad = grad
        self.optimizer = torch.optim.AdamW(self.main, lr=1e-4, fused=position.is_cuda)
        text = torch.randint(model.vocabulary, (seq_len + 1,), device=device, generator=generator)
        self.tokens, self.labels, self.seq_len = text[position], text[position + 1], seq_len
        self.rotary = rotary_table(position, model.head_dim, self.dtype)

    def layer(self, x: Tensor, attend: Attend, *weights: Tensor) -> Tensor:
        """One layer, ``[tokens, hidden]`` to the same."""
        made = list(weights)
        q, k, v = queries_keys_values(self.model, made, x, self.rotary)
        return after_attention(self.model, made, x, attend(q[None], k[None], v[None])[0])

    def output(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Loss (this rank's share of the mean over the sequence) and its gradient by ``hidden``; that of the weights is summed
        up in fp32. In pieces, so that their logits need not be kept.
        """
        embedding, norm = self.weights[:2]
        loss, grads = hidden.new_zeros((), dtype=torch.float32), torch.empty_like(hidden)
        for piece in range(0, hidden.shape[0], PIECE):
            rows = slice(piece, piece + PIECE)
            x = hidden[rows].detach().requires_grad_()
            logits = F.linear(F.rms_norm(x, (self.model.hidden,), norm), embedding).float()
            part = F.cross_entropy(logits, self.labels[rows], reduction="sum") / self.seq_len
            grads[rows], *of_weights = torch.autograd.grad(part, (x, embedding, norm))
            torch._foreach_add_(self.main_grads[:2], of_weights)
            loss += part.detach()
        return loss, grads

    def step(self, attend: Attend, layers: int | None = None) -> tuple[float, dict[str, float]]:
        """``(loss, milliseconds of the parts)`` of a training step, every layer recomputed once; loss is this rank's share.

        Args:
            attend: a layer's attention.
            layers: only so many layers (to warm up).
        """
        marks = Marks(self.tokens.is_cuda)
        marks("begin")
        self.grad_sum.zero_()
        x = F.embedding(self.tokens, self.weights[0])
        used = self.weights[2 : None if layers is None else 2 + 6 * layers]
        for first in range(0, len(used), 6):
            x = checkpoint(
                self.layer, x, attend, *used[first : first + 6], use_reentrant=False, preserve_rng_state=False
            )
        marks("forward")
        loss, grads = self.output(x)
        marks("output layer and loss")
        x.backward(grads)
        marks("backward")
        for weight, grad in zip(self.weights, self.main_grads, strict=True):
            if weight.grad is not None:
                grad += weight.grad
                weight.grad = None
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(self.grad_sum, group=self.group)
        marks("gradients")
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.main)
        marks("optimizer")
        times = marks.read()
        return float(loss), times
