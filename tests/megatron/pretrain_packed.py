"""Fine-tunes a GPT on packed conversations: Megatron's ``SFTDataset`` on made-up ones, and its way from there to the model."""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core import mpu, utils
from megatron.core.datasets.utils import Split
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import is_first_or_last_pipeline_stage

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import pretrain_gpt as example

SEQUENCE_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
KEYS = (*SEQUENCE_KEYS, "attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen")


class Tokenizer:
    """Tokens of a conversation are made from its seed; the first third is a prompt without loss."""

    eod, pad = 1, 0
    unique_identifiers = {"kind": "seeded"}  # noqa: RUF012

    def tokenize_conversation(self, conversation, **_):
        generator = torch.Generator().manual_seed(conversation[0]["seed"])
        tokens = torch.randint(2, 127, (conversation[0]["length"],), generator=generator)
        labels = tokens.clone()
        labels[: len(labels) // 3] = -100
        return tokens, labels


def datasets(num_samples, vp_stage=None):
    """Three to eight conversations a sample, of very different lengths."""
    args = get_args()
    dice = random.Random(3)
    packs = [
        [{"role": "system", "seed": dice.randrange(10**6), "length": dice.choice((5, 30, 64, 100, 170))}
         for _ in range(dice.randrange(3, 9))]
        for _ in range(16)
    ]  # fmt: skip
    config = SimpleNamespace(
        tokenizer=Tokenizer(), sequence_length=args.seq_length, context_parallel_size=args.context_parallel_size,
        random_seed=args.seed, split="1", split_matrix=None, reset_position_ids=False, create_attention_mask=False,
        reset_attention_mask=False,
    )  # fmt: skip
    return [SFTDataset(packs, None, list(range(16)), n, Split.train, config) if n else None for n in num_samples]


def get_batch(iterator, vp_stage):
    args = get_args()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch = {}
    if tp_rank == 0:
        sample = next(iterator)
        batch = {key: sample[key].cuda() if key in sample else None for key in KEYS}
    batch = get_batch_on_this_tp_rank(
        batch, has_cu_seqlens=True, is_hybrid_cp=False, broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(), create_attention_mask_in_dataloader=False,
        cp_size=args.context_parallel_size, tp_rank=tp_rank, micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length, mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(), is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )  # fmt: skip
    batch = flatten_batch_for_packed_sequences(batch)
    if not is_first_or_last_pipeline_stage(vp_stage):
        return batch | dict.fromkeys(SEQUENCE_KEYS)
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def forward_step(iterator, model):
    batch = get_batch(iterator, get_attr_wrapped_model(model, "vp_stage"))
    lengths, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"])
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    output = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"],
        packed_seq_params=packed,
    )  # fmt: skip
    return output, partial(example.loss_func, batch["loss_mask"])


def partitioned_indices(cu_seqlens, total_tokens, cp_size, cp_rank):
    """What Transformer Engine computes: every document in zigzag by itself."""
    index = []
    for begin, end in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False):
        chunks = torch.arange(begin, end).chunk(2 * cp_size)
        index += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]]
    return torch.cat(index)


def main():
    utils.tex = SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
    datasets.is_distributed = True
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
