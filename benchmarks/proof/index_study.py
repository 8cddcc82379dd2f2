"""Recall of the true attention against density, by layer, for every way of choosing an index (docs/proof.md).

    python -m benchmarks.proof.index_study --gguf MODEL.gguf --data data/proof --length 4096 --output FOLDER

Writes ``index-LENGTH.jsonl``: a line per layer, window, family and budget with mean and by-head density and recall.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from benchmarks.proof import estimators
from benchmarks.proof.capture import capture
from benchmarks.proof.corpus import read_ids
from benchmarks.proof.estimators import PROBES, ProbeView, last_rows, spread_rows
from benchmarks.proof.mass import block_row_mass, densities, kept_share
from benchmarks.proof.session import single_rank
from benchmarks.proof.smollm import pretrained
from megatron_mtraining import MTrainingConfig, estimate_index

SHARES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)

Family = Callable[[Tensor, Tensor, float], Iterator[tuple[float, Any]]]
"""From q, k and the softmax scale: (budget, index) pairs."""


def library(budgets: dict[float, MTrainingConfig]) -> Family:
    """The library's own estimation under each config."""

    def choose(q: Tensor, k: Tensor, scale: float) -> Iterator[tuple[float, Any]]:
        for budget, config in budgets.items():
            yield budget, estimate_index(q, k, config=config, softmax_scale=scale)

    return choose


def probed(rows: Callable[[int, int, torch.device], Tensor], count: int, choice: Callable[..., Any]) -> Family:
    """Estimators over one set of probe rows."""

    def choose(q: Tensor, k: Tensor, scale: float) -> Iterator[tuple[float, Any]]:
        view = ProbeView.make(q, k, rows(q.shape[1], count, q.device), scale)
        for share in SHARES:
            yield share, choice(view, share)

    return choose


def token_family(q: Tensor, k: Tensor, scale: float) -> Iterator[tuple[float, Any]]:
    """The authors' ranking."""
    for share in SHARES:
        yield share, estimators.token_slash(q, k, share, scale)


def families(seq: int) -> dict[str, Family]:
    """Every family by name."""
    shares = {share: MTrainingConfig(top_p=share, max_vertical=None) for share in SHARES}
    wide = {share: MTrainingConfig(top_p=share, max_vertical=None, last_q=PROBES) for share in SHARES}

    def policy(name: str, **options: Any) -> MTrainingConfig:
        return MTrainingConfig(index_policy=name, **options)

    fixed = {
        part: policy("fixed", fixed_vertical=round(part * seq / 2), fixed_slash=max(1, round(part * seq / 128)))
        for part in (0.05, 0.1, 0.2, 0.4)
    }
    block = min(512, seq // 4)
    gates = [count for count in (2, 3, 4, 6, 8, 12, 24) if count <= seq // block]
    probes = {f"spread + joint, {count} probes": probed(spread_rows, count, estimators.joint) for count in (64, 128)}
    return {
        "paper": library(shares),
        "paper, 256 probes": library(wide),
        "token slash": token_family,
        "fixed": library(fixed),
        "flexprefill": library({share: policy("flexprefill", top_p=share) for share in SHARES}),
        "xattention": library({share: policy("xattention", top_p=share) for share in SHARES}),
        "moba": library({count: policy("moba", moba_block_size=block, moba_top_k=count) for count in gates}),
        "spread": probed(spread_rows, PROBES, estimators.independent),
        "joint, last 64": probed(last_rows, 64, estimators.joint),
        "spread + joint": probed(spread_rows, PROBES, estimators.joint),
        **probes,
    }


def study_layer(q: Tensor, k: Tensor, wanted: dict[str, Family]) -> Iterator[dict[str, Any]]:
    """A line per family and budget; ``q [1, seq, heads, dim]``, ``k [1, seq, kv_heads, dim]``."""
    scale, heads = q.shape[3] ** -0.5, q.shape[2]
    mass = block_row_mass(q, k, scale)
    for name, family in wanted.items():
        for budget, index in family(q, k, scale):
            density, recall = densities(index, heads), kept_share(index, mass)
            yield {
                "family": name,
                "budget": budget,
                "density": round(density.mean().item(), 5),
                "recall": round(recall.mean().item(), 5),
                "density_by_head": [round(x, 4) for x in density.tolist()],
                "recall_by_head": [round(x, 4) for x in recall.tolist()],
            }


def study_model(
    model: GPTModel, text: np.ndarray, length: int, windows: int, wanted: dict[str, Family], layers: list[int] | None
) -> Iterator[dict[str, Any]]:
    """The lines of some layers (from 1; None: all) of a model on evenly placed windows of ``text``."""
    device = next(model.parameters()).device
    for window, start in enumerate(np.linspace(0, len(text) - length - 1, windows + 2)[1:-1].astype(int)):
        ids = torch.from_numpy(text[start : start + length + 1].astype(np.int64))[None].to(device)
        for layer, seen in enumerate(capture(model, ids), 1):
            if layers is not None and layer not in layers:
                continue
            for line in study_layer(seen.q, seen.k, wanted):
                yield {"window": window, "layer": layer, **line}


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--windows", type=int, default=1, help="held-out windows, evenly placed")
    parser.add_argument("--layers", nargs="+", type=int, help="only these, from 1")
    parser.add_argument("--families", nargs="+", help="only these")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    wanted = families(options.length)
    wanted = {name: wanted[name] for name in options.families or wanted}
    options.output.mkdir(parents=True, exist_ok=True)
    with single_rank() as device, (options.output / f"index-{options.length}.jsonl").open("w") as file:
        model = pretrained(options.gguf, options.length, device)
        text = read_ids(options.data, "valid")
        for line in study_model(model, text, options.length, options.windows, wanted, options.layers):
            file.write(json.dumps(line) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
