"""What the recipes share: the paper's training settings, and how a sequence is spread over GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.bridge import AutoBridge
from megatron.bridge.peft.base import PEFT
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from transformers import AutoConfig

from megatron_mtraining.bridge.conversion import drop_missing_fusion
from megatron_mtraining.bridge.enabling import enable
from megatron_mtraining.bridge.rope import extended_config
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.integration import RefusedError

K = 1024

ATTENTION = MTrainingConfig(top_p=0.90, max_vertical=4096)
"""The paper's budget: lines that hold 90 % of the probes' attention, at most 4096 columns."""

RUNS = Path("nemo_experiments") / "mtraining"
"""Where recipes save, below the working folder, as Bridge's own do."""


@dataclass(frozen=True)
class Spread:
    """How one recipe spreads its sequences over GPUs; all of it are values that overrides may change.

    Attributes:
        seq_length: tokens of a sequence.
        context_parallel: ranks that share a sequence.
        tensor_parallel: ranks that share a layer (with sequence parallelism).
        global_batch: sequences of a step.
        full_recompute: whether a layer's activations are computed again in backward, instead of kept.
        optimizer_offload: share of the optimizer's state and step that is on the CPU.
    """

    seq_length: int
    context_parallel: int
    tensor_parallel: int = 1
    global_batch: int = 64
    full_recompute: bool = True
    optimizer_offload: float = 0.0


def pretrain_recipe(hf_config: dict[str, Any], spread: Spread, name: str) -> ConfigContainer:
    """A recipe for continued pretraining with MTraining attention.

    The paper's settings (section 5.1): AdamW, learning rate 2e-5, betas 0.9 and 0.95, no weight decay, gradients clipped
    at 1.0, 64 sequences a step. Ours, where the paper is silent: a constant learning rate after 10 steps of warm-up, and
    100 steps. Data are random numbers until ``dataset.data_path`` is given.

    Args:
        hf_config: the model, as in its ``config.json``; extended to the recipe's length.
        spread: lengths and parallelism.
        name: of the folder below ``nemo_experiments/mtraining`` that checkpoints and logs go to.
    """
    model = _provider(hf_config, spread.seq_length)
    _spread(model, spread)
    folder = RUNS / name
    cfg = ConfigContainer(
        model=model,
        train=TrainingConfig(
            train_iters=100, global_batch_size=spread.global_batch, micro_batch_size=1, manual_gc=True
        ),
        validation=ValidationConfig(eval_interval=100, eval_iters=1),
        optimizer=_optimizer(spread),
        scheduler=SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=10,
            start_weight_decay=0.0,
            end_weight_decay=0.0,
            weight_decay_incr_style="constant",
        ),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=not spread.optimizer_offload,
            average_in_collective=True,
            check_for_nan_in_grad=True,
        ),
        dataset=GPTDatasetConfig(
            random_seed=1234,
            seq_length=spread.seq_length,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            split="9999,8,2",
            dataloader_type="single",
            skip_getting_attention_mask_from_dataset=True,
        ),
        logger=LoggerConfig(log_interval=1, tensorboard_dir=str(folder / "tb_logs")),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=hf_config["vocab_size"] - 1),
        checkpoint=CheckpointConfig(
            save=str(folder / "checkpoints"),
            load=str(folder / "checkpoints"),
            save_interval=50,
            ckpt_format="torch_dist",
        ),
        rng=RNGConfig(seed=1234),
        dist=DistributedInitConfig(),
        mixed_precision="bf16_mixed",
    )
    enable(cfg, ATTENTION)
    return cfg


def peft_recipe(hf_config: dict[str, Any], spread: Spread, name: str, peft_scheme: str | PEFT) -> ConfigContainer:
    """The same with adapters: the model's own weights stay as they are.

    Bridge demands ``checkpoint.pretrained_checkpoint``: the imported model.

    Args:
        hf_config: as for :func:`pretrain_recipe`.
        spread: as for :func:`pretrain_recipe`.
        name: as for :func:`pretrain_recipe`.
        peft_scheme: ``lora``, ``dora``, or one of Bridge's peft objects.

    Raises:
        RefusedError: for another scheme.
    """
    cfg = pretrain_recipe(hf_config, spread, name)
    cfg.peft = _adapters(peft_scheme)
    cfg.optimizer.lr = 1e-4
    cfg.ddp.overlap_param_gather = False
    cfg.ddp.overlap_grad_reduce = False
    return cfg


def _adapters(scheme: str | PEFT) -> PEFT:
    if isinstance(scheme, PEFT):
        return scheme
    if scheme not in ("lora", "dora"):
        raise RefusedError(f"peft_scheme={scheme!r}: must be lora, dora or a peft object of Bridge")
    from megatron.bridge.peft.dora import DoRA
    from megatron.bridge.peft.lora import LoRA

    kind: type[PEFT] = LoRA if scheme == "lora" else DoRA
    return kind(target_modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], dim=32, alpha=32)


def _provider(hf_config: dict[str, Any], seq_length: int) -> Any:
    """Bridge's provider for a Hugging Face config, extended to the length. Nothing is downloaded."""
    config = AutoConfig.for_model(**extended_config(hf_config, seq_length))
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    provider.seq_length = seq_length
    drop_missing_fusion(provider)
    return provider


def _spread(model: Any, spread: Spread) -> None:
    model.context_parallel_size = spread.context_parallel
    model.tensor_model_parallel_size = spread.tensor_parallel
    model.sequence_parallel = spread.tensor_parallel > 1
    model.pipeline_model_parallel_size = 1
    model.attention_dropout = 0.0
    model.hidden_dropout = 0.0
    model.cross_entropy_loss_fusion = True
    if spread.full_recompute:
        model.recompute_granularity = "full"
        model.recompute_method = "uniform"
        model.recompute_num_layers = 1


def _optimizer(spread: Spread) -> OptimizerConfig:
    offload = spread.optimizer_offload > 0
    return OptimizerConfig(
        optimizer="adam",
        lr=2e-5,
        min_lr=2e-5,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        clip_grad=1.0,
        bf16=True,
        use_distributed_optimizer=True,
        optimizer_cpu_offload=offload,
        optimizer_offload_fraction=spread.optimizer_offload,
        use_precision_aware_optimizer=offload,
        overlap_cpu_optimizer_d2h_h2d=offload,
    )
