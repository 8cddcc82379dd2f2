"""Compare the Megatron model with transformers' own loading of the same GGUF file, in fp32 on the CPU.

python -m benchmarks.proof.check_logits --gguf MODEL.gguf --output benchmarks/results/proof-2026-11-30-cpu
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks.proof.session import single_rank

TEXT = (
    "The attention of a language model falls on few keys. Those that it falls on are near, or at the beginning, or at a "
    "fixed distance; a budget that is found while the model trains keeps them. def merge(a, b): return a + b\n"
)


def compare(path: Path, repeats: int = 8) -> dict[str, float]:
    """Largest and mean difference of the logits, agreement of the best token and both losses on a short text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.proof.attention import use
    from benchmarks.proof.smollm import build_model, load_weights, read_weights

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = tokenizer(TEXT * repeats, return_tensors="pt")["input_ids"]
    with single_rank() as device, torch.no_grad():
        expected = theirs(ids).logits
        shape, weights = read_weights(path)
        model = build_model(shape, max_seq=ids.shape[1], rope_theta=shape.rope_theta).to(device).eval()
        load_weights(model, weights)
        use(model, "dense")
        found = model(ids, torch.arange(ids.shape[1])[None], None)
    losses = [torch.nn.functional.cross_entropy(x[0, :-1], ids[0, 1:]).item() for x in (found, expected)]
    return {
        "tokens": ids.shape[1],
        "max_difference": (found - expected).abs().max().item(),
        "mean_difference": (found - expected).abs().mean().item(),
        "largest_logit": expected.abs().max().item(),
        "same_best_token": (found.argmax(-1) == expected.argmax(-1)).float().mean().item(),
        "loss_megatron": losses[0],
        "loss_transformers": losses[1],
    }


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    options = parser.parse_args()
    result = compare(options.gguf)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "logits.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
