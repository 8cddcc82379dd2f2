"""Bridge's training loop on the CPU over gloo, for tests: what `integration/cpu_compat` does for Megatron, for Bridge."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from megatron_mtraining.integration import cpu_compat
from megatron_mtraining.integration.cpu_compat.megatron_patches import _with_one_device

from . import stand_ins

MEGATRON = (
    "megatron.core",
    "megatron.training.training",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.hybrid.hybrid_model",
)


def import_bridge() -> list[str]:
    """Imports Megatron, then Bridge; returns the packages that stand-ins replace."""
    for name in MEGATRON:
        importlib.import_module(name)
    missing = stand_ins.install()
    importlib.import_module("megatron.bridge")
    return missing


def activate() -> None:
    """Makes Bridge train on the CPU in this process, once and for all."""
    import_bridge()
    cpu_compat.activate()
    from megatron.bridge.training import initialize, setup

    setup.initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    for name in ("_initialize_distributed", "_set_random_seed"):
        setattr(initialize, name, _with_one_device(getattr(initialize, name)))
    setup.set_jit_fusion_options = _nothing
    torch.distributed.distributed_c10d.new_group = _gloo_for_nccl(torch.distributed.distributed_c10d.new_group)


def _gloo_for_nccl(original: Callable[..., Any]) -> Callable[..., Any]:
    """Bridge's decentralized groups are NCCL's by name, whatever `dist.distributed_backend` says."""

    @functools.wraps(original)
    def new_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return original(*args, backend="gloo" if backend == "nccl" else backend, **kwargs)

    return new_group


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def prepare_model(model: Any) -> Any:
    """Changes a provider to what the CPU can do: Megatron's own layers, no fusion, no mixed precision."""
    from megatron.bridge.models import gpt_provider

    model.transformer_layer_spec = gpt_provider.local_layer_spec
    model.transformer_impl = "local"
    model.use_cpu_initialization = True
    model.params_dtype = torch.float32
    model.pipeline_dtype = torch.float32
    model.bf16 = model.fp16 = False
    for name in (
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "apply_rope_fusion",
        "persist_layer_norm",
        "cross_entropy_loss_fusion",
    ):
        setattr(model, name, False)
    return model


def prepare(cfg: Any) -> Any:
    """Changes a recipe to what the CPU can do: gloo, and the model as above."""
    prepare_model(cfg.model)
    cfg.dist.distributed_backend = "gloo"
    cfg.mixed_precision = None
    cfg.optimizer.bf16 = False
    cfg.ddp.overlap_grad_reduce = cfg.ddp.overlap_param_gather = False
    cfg.ddp.average_in_collective = False
    cfg.dataset.num_workers = 0
    cfg.dataset.persistent_workers = False
    cfg.dataset.pin_memory = False
    return cfg
