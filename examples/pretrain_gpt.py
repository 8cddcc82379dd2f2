"""Pretrain a GPT with Megatron's own training loop (`megatron.training`), with or without the mtraining plugin.

A thin script in the manner of Megatron-LM's pretrain_gpt.py, for those who have megatron-core as a package and no
checkout. Nothing here knows about sparse attention: started through the launcher it gets it from one option,

    torchrun --nproc-per-node 4 -m megatron_mtraining.launch examples/pretrain_gpt.py --attention-backend mtraining ...

and started alone (`torchrun --nproc-per-node 4 examples/pretrain_gpt.py ...`) it is plain Megatron. Batches pass
through Megatron's `get_batch_on_this_cp_rank`, where the plugin puts its sequence layout.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def get_batch(data_iterator: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None) -> dict[str, Any]:
    """This rank's share of the next micro-batch: broadcast over tensor-parallel, sliced over context-parallel ranks.

    Pipeline stages that need no tokens (neither the first nor the last) get None for every key.
    """
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    args = get_args()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        assert data_iterator is not None, "no data iterator on a rank that reads data"
        sample = next(data_iterator)
        batch = {key: sample[key].cuda(non_blocking=True) if key in sample else None for key in BATCH_KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def loss_func(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss of the local tokens, their number, and both together for the log (Megatron divides and reduces)."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss.dtype)])}


def forward_step(data_iterator: Iterator[dict[str, torch.Tensor]] | None, model: GPTModel) -> tuple[torch.Tensor, Any]:
    """One forward pass of one micro-batch: the per-token losses and the function that sums them."""
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def is_dataset_built_on_rank(vp_stage: int | None = None) -> bool:
    """Whether this rank reads data: tensor-parallel rank 0 of the first and of the last pipeline stage."""
    return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Train, validation and test sets of (train, valid, test) `num_samples`, from --data-path or --mock-data."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    is_built = partial(is_dataset_built_on_rank, vp_stage=vp_stage)
    print_rank_0(f"> building {dataset.__name__} with (train, valid, test) samples {tuple(num_samples)}")
    return tuple(BlendedMegatronDatasetBuilder(dataset, num_samples, is_built, config).build())


def refuse_packing(args: Any) -> None:
    """Stops at the options that pack documents: batches here have no cumulative lengths, so they would do nothing."""
    for name in ("sft", "dataloader_inter_document_masking"):
        if getattr(args, name, False):
            option = "--" + name.replace("_", "-")
            raise SystemExit(f"pretrain_gpt: error: {option}: this script trains on unpacked samples; drop {option}")


def main() -> None:
    """Parse Megatron's command line and train."""
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron then builds on every rank
    args = parse_and_validate_args()
    refuse_packing(args)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
