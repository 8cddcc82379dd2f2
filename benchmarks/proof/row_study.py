"""How much of its attention every single row keeps: means hide the rows that an index serves badly (docs/proof.md).

    python -m benchmarks.proof.row_study --gguf MODEL.gguf --data data/proof --length 8192 --layers 3 9 15 21 27 \
        --variants top-p-0.95 segments-8-0.9 --output FOLDER

Rows are drawn evenly from held-out text in which facts are planted and asked for (:mod:`benchmarks.proof.tasks`); the rows
that predict the digits of the answers are looked at for themselves. Writes ``rows-LENGTH.jsonl``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from benchmarks.proof.capture import capture
from benchmarks.proof.corpus import read_ids
from benchmarks.proof.evaluate import planted
from benchmarks.proof.mass import attention_rows, densities
from benchmarks.proof.session import single_rank
from benchmarks.proof.smollm import pretrained
from benchmarks.proof.tasks import Phrases
from benchmarks.proof.variants import variant
from megatron_mtraining import MTrainingConfig, VerticalSlashIndex, estimate_index
from megatron_mtraining.block_lists import Index
from megatron_mtraining.config import BLOCK

ROWS_AT_A_TIME = 64


def kept_pairs(index: Index, rows: Tensor) -> Tensor:
    """Bool ``[heads, rows, seq]``: the keys up to each row that an index of one sample and one document keeps."""
    position = torch.arange(index.documents.num_blocks * BLOCK, device=rows.device)
    row_block, block = rows // BLOCK, position // BLOCK
    if isinstance(index, VerticalSlashIndex):
        distance = row_block[:, None] - block[None, :]
        kept = index.slash_bits()[0][:, distance.clamp(min=0)] & (distance >= 0)
        columns = torch.nn.functional.pad(index.column_bits()[0], (0, position.numel() - index.seq_len))
        kept |= columns[:, None, :] & (distance > 0)
    else:
        kept = index.block_bits()[0][:, row_block].repeat_interleave(BLOCK, -1)
    return kept & (position[None, :] <= rows[:, None])


def row_recalls(q: Tensor, k: Tensor, rows: Tensor, indices: dict[str, Index], scale: float) -> dict[str, Tensor]:
    """fp32 ``[heads, rows]``: share of each row's attention that each index keeps."""
    found: dict[str, list[Tensor]] = {name: [] for name in indices}
    for some in rows.split(ROWS_AT_A_TIME):
        p = attention_rows(q, k, some, scale)
        for name, index in indices.items():
            found[name].append((p * kept_pairs(index, some)[..., : p.shape[-1]]).sum(-1))
    return {name: torch.cat(parts, 1) for name, parts in found.items()}


def percentile(x: Tensor, percent: float) -> float:
    """The value below which ``percent`` of the entries lie."""
    flat = x.flatten().sort().values
    return float(flat[int(percent / 100 * (flat.numel() - 1))])


def study_rows(
    model: GPTModel, tokens: Tensor, answers: Tensor, configs: dict[str, MTrainingConfig], layers: list[int], count: int
) -> Iterator[dict[str, Any]]:
    """A line per layer and variant.

    Args:
        model: as it is; its attention becomes the capturing one.
        tokens: ``[1, seq + 1]``.
        answers: int64, rows looked at for themselves.
        configs: how the indices are estimated, by variant.
        layers: from 1.
        count: rows drawn evenly.
    """
    with torch.no_grad():
        captured = capture(model, tokens)
    for layer in layers:
        q, k = captured[layer - 1].q, captured[layer - 1].k
        scale, seq = q.shape[3] ** -0.5, q.shape[1]
        even = torch.linspace(0, seq - 1, count, device=q.device).long()
        indices = {name: estimate_index(q, k, config=config, softmax_scale=scale) for name, config in configs.items()}
        recalls = row_recalls(q, k, torch.cat([even, answers]), indices, scale)
        for name, recall in recalls.items():
            plain, asked = recall[:, :count], recall[:, count:]
            yield {
                "layer": layer,
                "variant": name,
                "density": densities(indices[name], q.shape[2]).mean().item(),
                "recall": plain.mean().item(),
                "recall_5th": percentile(plain, 5),
                "recall_1st": percentile(plain, 1),
                "by_position": plain.mean(0).unflatten(0, (8, -1)).mean(1).tolist(),
                "answers": asked.mean().item(),
                "answers_5th": percentile(asked, 5),
                "answers_1st": percentile(asked, 1),
            }


def configs_of(names: list[str]) -> dict[str, MTrainingConfig]:
    """The configs of variants that have one index for all rows, as the library estimates it.

    Raises:
        ValueError: for another variant.
    """
    configs = {}
    for name in names:
        chosen = variant(name)
        if not chosen.has_one_index:
            raise ValueError(f"variant {name!r}: has no index of the library for all rows")
        assert chosen.config is not None
        configs[name] = chosen.config
    return configs


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--layers", nargs="+", type=int, required=True, help="from 1")
    parser.add_argument("--variants", nargs="+", required=True)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--rows", type=int, default=512, help="rows drawn evenly: a multiple of 8")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    configs = configs_of(options.variants)
    phrases = Phrases.load(options.data / "phrases.json")
    with single_rank() as device, (options.output / f"rows-{options.length}.jsonl").open("w") as file:
        model = pretrained(options.gguf, options.length, device)
        text = read_ids(options.data, "valid")
        tokens, answers = planted(text, options.length, options.questions, phrases, 0)
        for line in study_rows(model, tokens.to(device), answers.to(device), configs, options.layers, options.rows):
            file.write(json.dumps(line) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
