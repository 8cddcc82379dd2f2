"""Time of everything of a transformer layer but attention, and of the output layer with its loss, on one GPU.

    python -m benchmarks.bench_layer --tokens 8192 16384 32768 --out benchmarks/results

``benchmarks.plot_ring`` puts a training step together from it and from the times of attention.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ring.cases import Row
from benchmarks.ring.output import write
from benchmarks.ring.transformer import PIECE, after_attention, layer_shapes, queries_keys_values, rotary_table
from benchmarks.timing import measure
from megatron_mtraining.simulator.memory import MODELS, Model


class Layer:
    """A layer of a dense transformer in bf16 without its attention: norms, projections, rotary embedding, gated MLP."""

    def __init__(self, model: Model, tokens: int, device: str) -> None:
        self.model = model

        def weight(*shape: int) -> Tensor:
            return (0.02 * torch.randn(*shape, device=device, dtype=torch.bfloat16)).requires_grad_()

        self.weights = [weight(*shape) for shape in layer_shapes(model)]
        self.x = torch.randn(tokens, model.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        self.dout = torch.randn_like(self.x)
        self.rotary = rotary_table(torch.arange(tokens, device=device), model.head_dim, torch.bfloat16)
        self.out: Tensor | None = None

    def forward(self) -> None:
        """One pass; its graph serves the backward passes."""
        model = self.model
        q, k, v = queries_keys_values(model, self.weights, self.x, self.rotary)
        # In place of attention: every operand is used, so that its gradient is needed.
        attended = q + torch.cat((k + v,) * (model.heads // model.kv_heads), 1)
        self.out = after_attention(model, self.weights, self.x, attended)

    def backward(self) -> tuple[Tensor, ...]:
        """Gradients of the input and the weights."""
        assert self.out is not None
        return torch.autograd.grad(self.out, [self.x, *self.weights], self.dout, retain_graph=True)


def head_ms(model: Model, device: str) -> float:
    """Forward and backward of output layer and loss, for ``PIECE`` tokens."""
    weight = (0.02 * torch.randn(model.vocabulary, model.hidden, device=device)).bfloat16().requires_grad_()
    x = torch.randn(PIECE, model.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(model.vocabulary, (PIECE,), device=device)

    def run() -> object:
        loss = F.cross_entropy(F.linear(x, weight).float(), labels)
        return torch.autograd.grad(loss, (x, weight))

    return measure(run, repeats=5, queued=True).ms


def main() -> None:
    """Measures, and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-3b", choices=sorted(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768], help="local tokens")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = MODELS[args.model]
    rows: list[Row] = [{"part": "output layer and loss", "tokens": PIECE, "ms": round(head_ms(model, args.device), 3)}]
    for tokens in args.tokens:
        layer = Layer(model, tokens, args.device)
        forward = measure(layer.forward, repeats=5, queued=True).ms
        backward = measure(layer.backward, repeats=5, queued=True).ms
        for name, ms in (("forward", forward), ("backward", backward)):
            rows.append({"part": f"layer {name}", "tokens": tokens, "ms": round(ms, 3)})
        print(json.dumps(rows[-2:]), flush=True)
        write(rows, args.out, "benchmarks.bench_layer", f"layer-DATE-{args.model}")


if __name__ == "__main__":
    main()
