"""`enable`, overrides and recipes with Bridge's own classes."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.integration import RefusedError
from megatron_mtraining.integration.layer_plan import LayerPlan

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


@pytest.fixture
def tiny(bridge: Any, tmp_path: Path) -> Any:
    """The recipe of a small model, on one rank."""
    from .training_worker import tiny_qwen

    return tiny_qwen(256, tmp_path)


@pytest.fixture
def builder(tiny: Any) -> Any:
    """The same container with the other kind of model config: one for a model builder."""
    from megatron.bridge.models.gpt.gpt_builder import GPTModelConfig
    from megatron.bridge.models.transformer_config import TransformerConfig

    from megatron_mtraining.bridge import enable

    provider = tiny.model
    values = {
        name: getattr(provider, name) for name in TransformerConfig.__dataclass_fields__ if hasattr(provider, name)
    }
    tiny.model = GPTModelConfig(
        transformer=TransformerConfig(**values),
        vocab_size=512,
        seq_length=256,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    enable(tiny, top_p=0.9)
    return tiny


@pytest.fixture
def no_nvte(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No variable that chooses another attention, and no hook left in Bridge."""
    from megatron_mtraining.bridge import uninstall

    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        monkeypatch.delenv(name)
    yield
    uninstall()


def settings(cfg: Any) -> Any:
    from megatron_mtraining.bridge.hook import PreWrapHook, hooks_of

    (hook,) = (hook for hook in hooks_of(cfg.model) if isinstance(hook, PreWrapHook))
    return hook.settings


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


LOAD_WITHOUT_US = """
import importlib
import sys

class NotHere:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "megatron_mtraining":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NotHere())
for name in ("megatron.core", "megatron.training.training", "megatron.core.models.gpt.gpt_model"):
    importlib.import_module(name)
install()
from megatron.bridge.training.config import ConfigContainer
from megatron.training.config.instantiate_utils import InstantiationMode
model = ConfigContainer.from_yaml(sys.argv[1], mode=InstantiationMode.STRICT).model
spec = model.transformer_layer_spec
print("loaded", type(model).__name__, getattr(spec, "__name__", spec), model.attention_backend)
assert not [name for name in sys.modules if name.startswith("megatron_mtraining")]
"""


def saved(cfg: Any, path: Path) -> str:
    cfg.to_yaml(str(path))
    return path.read_text()


def test_a_saved_config_loads_without_this_package(tiny: Any, tmp_path: Path) -> None:
    from megatron_mtraining.bridge import enable

    tiny.model.attention_backend = "mtraining"
    enable(tiny, top_p=0.8)
    assert "megatron_mtraining" not in saved(tiny, tmp_path / "config.yaml")
    code = (Path(__file__).parent / "stand_ins.py").read_text() + LOAD_WITHOUT_US
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "config.yaml")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    shown = run.stdout.strip().split("\n")[-1].split()
    assert shown == ["loaded", "GPTModelProvider", "local_layer_spec", "AttnBackend.auto"]


def test_a_builders_saved_config_is_the_same_text_as_without_this_package(builder: Any, tmp_path: Path) -> None:
    """(Bridge 0.6 does not load such a container from YAML at all, with this package or without.)"""
    from megatron_mtraining.bridge import enable

    builder.model.pre_wrap_hooks.clear()
    builder.model.transformer_layer_spec = None
    before = saved(builder, tmp_path / "before.yaml")
    builder.model.attention_backend = "mtraining"
    enable(builder, top_p=0.8)
    assert saved(builder, tmp_path / "after.yaml") == before


def test_overrides_reach_bridge_and_the_attention(tiny: Any) -> None:
    from megatron_mtraining.bridge import apply_overrides

    words = ["model.seq_length=512", "train.train_iters=7", "mtraining.top_p=0.8", "mtraining.max_vertical=none"]
    apply_overrides(tiny, [*words, "mtraining.layout_mode=convert", "mtraining.deterministic=false"])
    assert (tiny.model.seq_length, tiny.dataset.seq_length, tiny.train.train_iters) == (512, 512, 7)
    assert settings(tiny).config == MTrainingConfig(top_p=0.8, max_vertical=None, deterministic=False)
    assert settings(tiny).layout_mode == "convert"
    apply_overrides(tiny, ["mtraining.layout=zigzag"])
    assert settings(tiny).config == MTrainingConfig(top_p=0.8, max_vertical=None, deterministic=False, layout="zigzag")


def test_overrides_reach_the_plan(tiny: Any) -> None:
    from megatron_mtraining.bridge import apply_overrides, describe

    words = ["mtraining.dense_layers=0", "mtraining.layer_top_p=1:0.99", "mtraining.dense_steps=3"]
    apply_overrides(tiny, [*words, "mtraining.top_p_schedule=1:0.95:10", "mtraining.top_p=0.95"])
    plan = LayerPlan(frozenset({0}), 3, ((1, 0.99),), (1.0, 0.95, 10))
    assert settings(tiny).plan == plan
    apply_overrides(tiny, ["mtraining.dense_steps=0", "mtraining.top_p_schedule=none"])
    assert settings(tiny).plan == dataclasses.replace(plan, dense_steps=0, top_p_schedule=None)
    assert describe(tiny) == "top_p=0.95, layout_mode=auto; layers 0 dense; top-p 0.99 in layer 1"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("mtraining.dense_layers=2", r"mtraining\.dense_layers 2: must be numbers and ranges .*from 0 to 1"),
        ("mtraining.dense_steps=-1", r"mtraining\.dense_steps -1: must be a number of steps"),
        ("mtraining.layer_top_p=0.9", r"mtraining\.layer_top_p 0\.9: must be LAYERS:TOP_P pairs"),
        ("mtraining.top_p_schedule=1:0.8:5", r"ends at 0\.8, mtraining\.top_p is 0\.9; make them the same"),
        ("mtraining.top_q=1", "mtraining.top_q: no such option; valid: .*top_p"),
        ("mtraining.top_p=2", r"mtraining\.top_p=2\.0: must be a number in \(0, 1\]"),
        ("mtraining.last_q=many", "mtraining.last_q=many: must be int"),
        ("mtraining.dense=perhaps", "mtraining.dense=perhaps: must be true or false"),
        ("mtraining.layout_mode=other", "layout_mode='other': must be one of auto, native, convert"),
        ("mtraining.dense", "mtraining.dense: write mtraining.dense=VALUE"),
    ],
)
def test_a_wrong_override_is_named(tiny: Any, word: str, message: str) -> None:
    from megatron_mtraining.bridge import apply_overrides

    with pytest.raises(RefusedError, match=message):
        apply_overrides(tiny, [word])


def test_enable_takes_options_or_a_config(tiny: Any) -> None:
    from megatron_mtraining.bridge import enable

    enable(tiny, MTrainingConfig(top_p=0.7))
    assert settings(tiny).config.top_p == 0.7
    with pytest.raises(RefusedError, match="top_q: no such option"):
        enable(tiny, top_q=1)
    with pytest.raises(RefusedError, match="not both"):
        enable(tiny, MTrainingConfig(), top_p=1)
    with pytest.raises(RefusedError, match="cfg.model is None"):
        enable(type("Empty", (), {"model": None})())


def test_hooks_that_bridges_own_overrides_drop_are_put_back(builder: Any, no_nvte: None) -> None:
    """A defect of Bridge 0.6 with the configs of model builders, which would leave the model dense."""
    from megatron.bridge.training import config
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    from megatron_mtraining.bridge import apply_overrides, is_enabled

    apply_overrides(builder, ["train.train_iters=7"])
    assert (builder.train.train_iters, settings(builder).config.top_p) == (7, 0.9)
    process_config_with_overrides(builder, cli_overrides=["train.train_iters=8"])
    assert not is_enabled(builder), "Bridge keeps the hooks now: drop this test and what it is about"
    config.runtime_config_update(builder)
    assert settings(builder).config.top_p == 0.9


def test_the_word_alone_is_enough_once_installed(tiny: Any, no_nvte: None) -> None:
    from megatron.bridge.training import config

    from megatron_mtraining.bridge import install, is_enabled, uninstall
    from megatron_mtraining.bridge.hook import hooks_of

    hooks_of(tiny.model).clear()
    tiny.model.attention_backend = "mtraining"
    install()
    install()
    try:
        config.runtime_config_update(tiny)
        assert is_enabled(tiny)
        tiny.dataset.reset_attention_mask = True
        with pytest.raises(RefusedError, match="dataset.reset_attention_mask=True"):
            config.runtime_config_update(tiny)
    finally:
        uninstall()
    assert config.runtime_config_update.__module__ == "megatron.bridge.training.config"


@pytest.mark.parametrize("kind", ["provider", "builder"])
def test_a_model_of_either_kind_is_swapped(kind: str, tiny: Any, one_rank: None, on_cpu: None, request: Any) -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_mtraining.bridge.hook import end_use
    from megatron_mtraining.integration import MTrainingCoreAttention

    cfg = tiny if kind == "provider" else request.getfixturevalue("builder")
    groups = ProcessGroupCollection.use_mpu_process_groups()
    cfg.model.finalize()
    try:
        if kind == "provider":
            models = cfg.model.provide_distributed_model(
                wrap_with_ddp=False, use_cpu_initialization=True, pg_collection=groups
            )
        else:
            kind_of = cfg.model.get_builder_cls()
            models = kind_of(cfg.model).build_distributed_models(pg_collection=groups, wrap_with_ddp=False)
        built = [layer.self_attention.core_attention for layer in models[0].decoder.layers]
        assert [type(core) for core in built] == [MTrainingCoreAttention] * 2
    finally:
        end_use()


def test_evaluation_on_other_ranks_rebinds_the_group(
    tiny: Any, one_rank: None, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bridge exchanges process groups for evaluation; attention must ask for its group at each call."""
    from types import SimpleNamespace

    from megatron.bridge.training.eval_context_parallel_rebinding import eval_cp_context
    from megatron.core.extensions import transformer_engine
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_mtraining.bridge.hook import end_use

    monkeypatch.setattr(transformer_engine, "TEDotProductAttention", type("NotInstalled", (torch.nn.Module,), {}))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    tiny.model.finalize()
    try:
        models = tiny.model.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=True, pg_collection=groups
        )
    finally:
        end_use()
    core = models[0].decoder.layers[0].self_attention.core_attention
    four = SimpleNamespace(size=lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: list(range(group.size())))
    assert core._cp_group() is None
    with eval_cp_context(models, SimpleNamespace(cp=four), groups):
        assert core._cp_group() is four
    assert core._cp_group() is None


def test_a_fusion_that_only_apex_has_is_off_without_it(bridge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bridge takes Transformer Engine for enough; Megatron's output layer is refused without APEX."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    from megatron_mtraining.bridge import conversion

    for installed in (True, False):
        monkeypatch.setattr(conversion, "EXTENSION", "json" if installed else "no_such_extension")
        provider = GPTModelProvider(
            num_layers=2, hidden_size=64, num_attention_heads=2, gradient_accumulation_fusion=True
        )
        conversion.drop_missing_fusion(provider)
        assert provider.gradient_accumulation_fusion is installed


def test_enable_lets_bridge_start_with_a_megatron_from_the_registry(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel has no Makefile, and Bridge's start-up exits the process when `make` fails."""
    from megatron.bridge.training import initialize
    from megatron.core.datasets import utils

    from megatron_mtraining.bridge import enable

    enable(tiny)
    has_makefile = (Path(utils.__file__).parent / "Makefile").exists()
    assert initialize.compile_helpers is utils.compile_helpers
    assert hasattr(initialize.compile_helpers, "__wrapped__") is not has_makefile
    if not has_makefile:
        initialize.compile_helpers()
