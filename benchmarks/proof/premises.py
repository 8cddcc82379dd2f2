"""What the method rests on, measured on the real model (docs/proof.md): the paper's sections 2 and 3, Theorem 3.1.

    python -m benchmarks.proof.premises --gguf MODEL.gguf --data data/proof --length 2048 --output FOLDER

Writes ``premises.jsonl``, a line per layer: how much of the attention and of |dL/dS| the blocks hold that hold 90% of the
attention, what indices keep of both, and the mean score by relative distance beside its prediction; and
``premises-heads.npz`` with one head of each of some layers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.proof.capture import LayerTensors, capture
from benchmarks.proof.corpus import read_ids
from benchmarks.proof.estimators import PROBES, ProbeView, joint, spread_rows
from benchmarks.proof.mass import BLOCK, block_gradient_mass, block_row_mass, densities, expand_heads, kept_share
from benchmarks.proof.session import single_rank
from benchmarks.proof.smollm import build_model, load_weights, read_weights
from megatron_mtraining import MTrainingConfig, estimate_index

SHARE = 0.9
SHOWN = (2, 10, 20, 28)  # layers whose first head goes into the picture


def heaviest_blocks(by_block: Tensor, share: float) -> Tensor:
    """Bool like ``by_block [heads, n, n]``: the heaviest blocks of each head that hold ``share`` of its mass."""
    flat = by_block.flatten(1)
    ordered, order = flat.sort(1, descending=True)
    keep = ordered.cumsum(1) - ordered < share * flat.sum(1, keepdim=True)
    return torch.zeros_like(keep).scatter(1, order, keep).view_as(by_block)


def score_by_distance(q: Tensor, k: Tensor) -> Tensor:
    """fp64 ``[heads, seq]``: the mean of ``q_m . k_(m-d)`` over all m, by distance d; inputs ``[heads, seq, dim]``."""
    seq = q.shape[1]
    left, right = (torch.fft.rfft(x.double(), 2 * seq, dim=1) for x in (q, k))
    sums = torch.fft.irfft((left * right.conj()).sum(2), 2 * seq, dim=1)[:, :seq]
    return sums / (seq - torch.arange(seq, device=q.device))


def rotate(x: Tensor, theta: float, sign: int) -> Tensor:
    """Rotary embedding of ``x [heads, seq, dim]`` by ``sign`` times its position, as complex ``[heads, seq, dim / 2]``."""
    half = x.shape[2] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float64)[:, None] * frequency * sign
    return torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)


def predicted_by_distance(q: Tensor, k: Tensor, theta: float) -> Tensor:
    """fp64 ``[heads, seq]``: what the means of q and k before rotation give at each distance (Theorem 3.1)."""
    mean_q, mean_k = (rotate(x, theta, -1).mean(1) for x in (q, k))
    half, seq = mean_q.shape[1], q.shape[1]
    frequency = theta ** (-torch.arange(half, device=q.device, dtype=torch.float64) / half)
    angle = torch.arange(seq, device=q.device, dtype=torch.float64)[:, None] * frequency
    turned = (mean_q * mean_k.conj())[:, None] * torch.polar(torch.ones_like(angle), angle)
    return turned.real.sum(2)


def describe(seen: LayerTensors, theta: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The line of a layer, and what its picture shows."""
    assert seen.dout is not None
    scale, heads = seen.q.shape[3] ** -0.5, seen.q.shape[2]
    attention = block_row_mass(seen.q, seen.k, scale)
    gradient = block_gradient_mass(seen.q, seen.k, seen.v, seen.dout, scale)
    by_block, gradient_by_block = (x.unflatten(2, (-1, BLOCK)).sum(3) for x in (attention, gradient))
    heavy = heaviest_blocks(by_block, SHARE)
    causal = torch.ones_like(heavy[0]).tril()
    indices: dict[str, Any] = {
        f"top-p-{p:.2f}": estimate_index(seen.q, seen.k, config=MTrainingConfig(top_p=p)) for p in (0.9, 0.95)
    }
    rows = spread_rows(seen.q.shape[1], PROBES, seen.q.device)
    indices["joint-0.95"] = joint(ProbeView.make(seen.q, seen.k, rows, scale), 0.95)
    q, k = expand_heads(seen.q, heads), expand_heads(seen.k, heads)
    measured, expected = score_by_distance(q, k) * scale, predicted_by_distance(q, k, theta) * scale
    near = slice(0, q.shape[1] * 3 // 4)  # the mean of the farthest distances is over few pairs
    line = {
        "heavy_density": (heavy.sum() / (heads * causal.sum())).item(),
        "heavy_gradient": ((gradient_by_block * heavy).sum((1, 2)) / gradient_by_block.sum((1, 2))).mean().item(),
        "indices": {
            name: {
                "density": densities(index, heads).mean().item(),
                "attention": kept_share(index, attention).mean().item(),
                "gradient": kept_share(index, gradient).mean().item(),
            }
            for name, index in indices.items()
        },
        "distance_correlation": [
            round(torch.corrcoef(torch.stack(pair))[0, 1].item(), 4)
            for pair in zip(measured[:, near], expected[:, near], strict=True)
        ],
    }
    picture = {
        "attention": by_block[0] / BLOCK,
        "gradient": gradient_by_block[0] / gradient_by_block[0].sum(),
        "measured": measured[0],
        "expected": expected[0],
    }
    return line, picture


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, np.ndarray] = {}
    with single_rank() as device, (options.output / "premises.jsonl").open("w") as file:
        shape, weights = read_weights(options.gguf)
        model = build_model(shape, max_seq=options.length, rope_theta=shape.rope_theta).to(device).eval()
        load_weights(model, weights)
        text = read_ids(options.data, "valid")
        start = (len(text) - options.length) // 2
        ids = torch.from_numpy(text[start : start + options.length + 1].astype(np.int64))[None].to(device)
        for layer, seen in enumerate(capture(model, ids, backward=True), 1):
            line, picture = describe(seen, shape.rope_theta)
            file.write(json.dumps({"layer": layer, "length": options.length, **line}) + "\n")
            file.flush()
            if layer in SHOWN:
                pictures |= {f"{name}-{layer}": value.float().cpu().numpy() for name, value in picture.items()}
    np.savez_compressed(options.output / "premises-heads.npz", **pictures)


if __name__ == "__main__":
    main()
