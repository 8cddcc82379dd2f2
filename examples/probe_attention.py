"""Look at one head of a trained model: its true attention on a short slice of the text, and what the index keeps of it.

    python -m megatron_mtraining.launch examples/probe_attention.py --attention-backend mtraining \
        --load CHECKPOINT --probe-output attention.npz <the model and data options of the training run>

One process. Of all layers and heads it takes the one with the sparsest index. The file holds, for blocks of 64 x 64:
`block_attention` (mean over a block's rows of the attention that falls into the block), `block_kept` (share of the
block's causal pairs that the index keeps), and the scalars `layer` and `head` (from 0), `density`, `mass_kept`.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import get_args
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.initialize import initialize_megatron
from megatron.training.training import setup_model_and_optimizer

from megatron_mtraining import estimate_index
from megatron_mtraining.block_lists import Index
from megatron_mtraining.integration.core_attention import MTrainingCoreAttention

BLOCK = 64
LENGTH = 2048


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The script's own option."""
    parser.add_argument("--probe-output", type=Path, required=True, help="the .npz file to write")
    return parser


def last_tokens(prefix: str, count: int) -> torch.Tensor:
    """The last `count` tokens of a dataset, int64 `[1, count]`: text that training has not seen."""
    dataset = IndexedDataset(prefix)
    parts: list[np.ndarray] = []
    number = len(dataset)
    while number > 0 and sum(map(len, parts)) < count:
        number -= 1
        parts.insert(0, dataset[number])
    return torch.from_numpy(np.concatenate(parts)[-count:].astype(np.int64))[None]


def capture_queries_and_keys(model: torch.nn.Module, tokens: torch.Tensor) -> dict[int, tuple[Any, Any, Any]]:
    """One forward pass: `layer -> (core attention, q, k)`, q and k `[1, seq, heads or kv_heads, head_dim]` fp32."""
    captured: dict[int, tuple[Any, Any, Any]] = {}

    def hook(module: MTrainingCoreAttention, inputs: tuple[Any, ...]) -> None:
        query, key = (x.detach().float().transpose(0, 1) for x in inputs[:2])
        captured[module.layer_index] = (module, query, key)

    layers = [module for module in model.modules() if isinstance(module, MTrainingCoreAttention)]
    handles = [module.register_forward_pre_hook(hook) for module in layers]
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    with torch.no_grad():
        model(tokens, positions, None, labels=tokens)
    for handle in handles:
        handle.remove()
    return captured


def head_attention(query: torch.Tensor, key: torch.Tensor, head: int, scale: float | None) -> torch.Tensor:
    """Causal softmax attention of one head, `[seq, seq]`; q and k as captured."""
    group = query.shape[2] // key.shape[2]
    scores = query[0, :, head] @ key[0, :, head // group].T * (scale or query.shape[-1] ** -0.5)
    return scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf")).softmax(-1)


def by_block(pairs: torch.Tensor) -> torch.Tensor:
    """Sums of a `[seq, seq]` matrix over blocks, `[seq / 64, seq / 64]`."""
    blocks = pairs.shape[0] // BLOCK
    return pairs.view(blocks, BLOCK, blocks, BLOCK).sum((1, 3))


def describe(captured: dict[int, tuple[Any, Any, Any]]) -> dict[str, Any]:
    """The picture's data: the layer and head with the sparsest index."""
    indices: dict[int, Index] = {}
    for layer, (module, query, key) in captured.items():
        indices[layer] = estimate_index(query, key, config=module.mtraining, softmax_scale=module.softmax_scale)
    pairs = {layer: index.pairs()[0] for layer, index in indices.items()}
    layer = min(pairs, key=lambda number: int(pairs[number].min()))
    head = int(pairs[layer].argmin())
    module, query, key = captured[layer]
    attention = head_attention(query, key, head, module.softmax_scale)
    kept = indices[layer].to_mask()[0, head]
    causal = torch.ones_like(kept).tril()
    return {
        "block_attention": (by_block(attention) / BLOCK).cpu().numpy(),
        "block_kept": (by_block(kept.float()) / by_block(causal.float()).clamp(min=1)).cpu().numpy(),
        "layer": layer,
        "head": head,
        "density": float(kept.sum() / causal.sum()),
        "mass_kept": float((attention * kept).sum() / attention.sum()),
    }


def main() -> None:
    """Load the checkpoint, run one forward pass, write the file."""
    args = parse_and_validate_args(extra_args_provider=add_arguments, args_defaults={"skip_train": True})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    initialize_megatron()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    models, _, _ = setup_model_and_optimizer(
        ModelType.encoder_or_decoder, checkpointing_context={}, cfg_container=config, pg_collection=groups
    )
    model = models[0].eval()
    tokens = last_tokens(get_args().valid_data_path[0], min(LENGTH, args.seq_length)).cuda()
    np.savez_compressed(args.probe_output, **describe(capture_queries_and_keys(model, tokens)))
    print(f"> wrote {args.probe_output}")


if __name__ == "__main__":
    main()
