"""The recipes with Bridge's own classes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.integration import RefusedError

from .conftest import settings

pytestmark = pytest.mark.bridge

ROOT = Path(__file__).resolve().parents[2]

RECIPES = {
    "qwen25_3b_pretrain_32gpu_512k_config": (524288, 32, 1),
    "qwen25_3b_pretrain_8gpu_128k_config": (131072, 8, 1),
    "qwen25_3b_pretrain_2gpu_32k_config": (32768, 2, 1),
    "qwen25_3b_pretrain_1gpu_16k_config": (16384, 1, 1),
    "qwen25_3b_peft_8gpu_128k_config": (131072, 8, 1),
    "llama31_8b_pretrain_32gpu_512k_config": (524288, 32, 1),
    "llama31_8b_pretrain_8gpu_64k_config": (65536, 4, 2),
    "llama31_8b_pretrain_2gpu_16k_config": (16384, 1, 2),
    "llama31_8b_peft_8gpu_128k_config": (131072, 8, 1),
}
"""Tokens, context-parallel and tensor-parallel ranks of each."""


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_what_its_name_says(bridge: Any, name: str) -> None:
    from megatron.bridge.training.config import ConfigContainer

    from megatron_mtraining.bridge import recipes

    recipe = getattr(recipes, name)
    required = [item for item in inspect.signature(recipe).parameters.values() if item.default is item.empty]
    assert not required
    assert list(inspect.signature(recipe).parameters) == (["peft_scheme"] if "peft" in name else [])
    cfg = recipe()
    seq_length, cp, tp = RECIPES[name]
    assert type(cfg) is ConfigContainer
    assert (cfg.model.seq_length, cfg.dataset.seq_length) == (seq_length, seq_length)
    assert (cfg.model.context_parallel_size, cfg.model.tensor_model_parallel_size) == (cp, tp)
    assert settings(cfg).config == MTrainingConfig(top_p=0.9, max_vertical=4096)
    assert (cfg.peft is not None) == ("peft" in name)
    assert f"{cp * tp}gpu" in name
    assert f"{seq_length // 1024}k" in name


@pytest.mark.parametrize("name", RECIPES)
def test_bridge_takes_a_recipe_at_its_size(
    bridge: Any, name: str, no_nvte: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bridge's own validation of everything together, as on that many GPUs; and our own refusals."""
    from megatron.bridge.training import config

    from megatron_mtraining.bridge import install, recipes

    _, cp, tp = RECIPES[name]
    monkeypatch.setenv("WORLD_SIZE", str(cp * tp))
    cfg = getattr(recipes, name)()
    cfg.env_vars = {}
    cfg.checkpoint.pretrained_checkpoint = str(tmp_path)
    cfg.model.apply_rope_fusion = False  # needs Transformer Engine
    install()
    config.runtime_config_update(cfg)
    assert cfg.data_parallel_size == 1
    assert cfg.model.bf16


def test_the_small_run_of_the_page_is_longer_than_its_warmup(
    bridge: Any, no_nvte: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's scheduler stops a run that is not, with an assertion that says nothing."""
    from megatron.bridge.training import config

    from megatron_mtraining.bridge import apply_overrides, recipes

    page = (ROOT / "docs" / "from_hf_to_512k.md").read_text()
    name, words = re.search(r"`(\w+_1gpu_\w+_config) ([^`]+)`", page).groups()  # type: ignore[union-attr]
    monkeypatch.setenv("WORLD_SIZE", "1")
    cfg = getattr(recipes, name)()
    apply_overrides(cfg, words.split())
    cfg.env_vars = {}
    cfg.model.apply_rope_fusion = False  # needs Transformer Engine
    config.runtime_config_update(cfg)
    assert cfg.train.train_iters < 10
    assert cfg.scheduler.lr_warmup_steps < cfg.scheduler.lr_decay_steps


def test_no_recipe_is_untested(bridge: Any) -> None:
    from megatron_mtraining.bridge import recipes

    assert set(recipes.__all__) == set(RECIPES)


def test_the_papers_settings(bridge: Any) -> None:
    from megatron_mtraining.bridge.recipes import qwen25_3b_pretrain_32gpu_512k_config

    cfg = qwen25_3b_pretrain_32gpu_512k_config()
    adam = cfg.optimizer
    assert (adam.lr, adam.adam_beta1, adam.adam_beta2, adam.weight_decay, adam.clip_grad) == (2e-5, 0.9, 0.95, 0.0, 1.0)
    assert adam.decoupled_weight_decay
    assert cfg.train.global_batch_size == 64
    yarn = cfg.model
    assert (yarn.position_embedding_type, yarn.yarn_rotary_scaling_factor) == ("yarn", 16.0)
    assert (yarn.num_layers, yarn.num_attention_heads, yarn.num_query_groups) == (36, 16, 2)


@pytest.mark.parametrize("scheme", ["lora", "dora"])
def test_peft_takes_a_scheme(bridge: Any, scheme: str) -> None:
    from megatron_mtraining.bridge.recipes import qwen25_3b_peft_8gpu_128k_config

    assert type(qwen25_3b_peft_8gpu_128k_config(scheme).peft).__name__.lower() == scheme
    with pytest.raises(RefusedError, match="peft_scheme='prefix'"):
        qwen25_3b_peft_8gpu_128k_config("prefix")


def test_yarn_is_that_of_transformers(bridge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same extended config means the same angles and the same scale to Megatron and to transformers."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from megatron_mtraining.bridge.recipes import qwen25_3b_pretrain_32gpu_512k_config
    from megatron_mtraining.bridge.recipes.qwen25 import QWEN25_3B
    from megatron_mtraining.bridge.rope import extended_config

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    model = qwen25_3b_pretrain_32gpu_512k_config().model
    rotary = YarnRotaryEmbedding(
        kv_channels=128,
        rotary_base=model.rotary_base,
        use_cpu_initialization=True,
        scaling_factor=model.yarn_rotary_scaling_factor,
        original_max_position_embeddings=model.yarn_original_max_position_embeddings,
        beta_fast=model.yarn_beta_fast,
        beta_slow=model.yarn_beta_slow,
        mscale=model.yarn_mscale,
        mscale_all_dim=model.yarn_mscale_all_dim,
        correction_range_round_to_int=model.yarn_correction_range_round_to_int,
    )
    emb, scale = rotary.get_emb(65)
    theirs = AutoConfig.for_model(**extended_config(QWEN25_3B, 524288))
    frequencies, their_scale = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    torch.testing.assert_close(emb[64, 0, 0, :64] / 64, frequencies.float(), rtol=1e-5, atol=0)
    assert scale == pytest.approx(their_scale)
