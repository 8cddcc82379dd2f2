"""`enable` and overrides with Bridge's own classes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.integration import RefusedError
from megatron_mtraining.integration.layer_plan import LayerPlan

from .conftest import settings

pytestmark = pytest.mark.bridge

ROOT = Path(__file__).resolve().parents[2]


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
