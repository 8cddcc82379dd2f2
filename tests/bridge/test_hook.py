"""The pre-wrap hook on Megatron's models; needs no Bridge: a provider has the same few members here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.bridge.hook import PreWrapHook, Settings, end_use, hooks_of, name_no_backend, through_layer_spec
from megatron_mtraining.integration import MTrainingCoreAttention, RefusedError, runtime
from megatron_mtraining.integration.layer_plan import LayerPlan
from tests.megatron.conftest import make_config

SETTINGS = Settings(MTrainingConfig(top_p=0.9))


def local_spec(config: Any) -> Any:
    """The spec function of a recipe."""
    return get_gpt_layer_local_spec(normalization="RMSNorm")


@dataclass
class Provider(TransformerConfig):
    """What the hook asks of Bridge's `GPTModelProvider`."""

    transformer_layer_spec: Any = local_spec
    seq_length: int = 256

    def register_pre_wrap_hook(self, hook: Callable[..., Any], prepend: bool = False) -> None:
        hooks_of(self).insert(0 if prepend else len(hooks_of(self)), hook)

    def build(self) -> list[GPTModel]:
        spec = self.transformer_layer_spec
        model = GPTModel(
            self,
            transformer_layer_spec=spec if isinstance(spec, ModuleSpec) else spec(self),
            vocab_size=128,
            max_sequence_length=self.seq_length,
            position_embedding_type="rope",
        )
        models = [model]
        for hook in hooks_of(self):
            models = hook(models)
        return models


@pytest.fixture(autouse=True)
def prepared_anew(one_rank: None) -> Any:
    yield
    end_use()


def container(**changes: Any) -> SimpleNamespace:
    values = {
        name: value for name, value in vars(make_config()).items() if name in TransformerConfig.__dataclass_fields__
    }
    return SimpleNamespace(model=Provider(**(values | changes)), dataset=SimpleNamespace(), dist=SimpleNamespace())


def hooked(cfg: SimpleNamespace, spec_too: bool = False) -> SimpleNamespace:
    cfg.model.register_pre_wrap_hook(PreWrapHook(SETTINGS, cfg), prepend=True)
    if spec_too:
        through_layer_spec(cfg.model, SETTINGS)
    return cfg


def cores(models: list[GPTModel]) -> list[Any]:
    return [layer.self_attention.core_attention for layer in models[0].decoder.layers]


@pytest.mark.parametrize("spec_too", [False, True], ids=["hook", "layer spec"])
def test_every_layer_is_swapped_and_said_so(spec_too: bool, on_cpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    built = cores(hooked(container(), spec_too).model.build())
    assert [type(core) for core in built] == [MTrainingCoreAttention] * 2
    assert [core.mtraining for core in built] == [SETTINGS.config] * 2
    assert [core.layer_number for core in built] == [1, 2]
    assert "2 attention layers of rank 0 swapped; layout striped, native" in capsys.readouterr().out


def test_a_plan_by_layer_and_by_step(on_cpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = container()
    plan = LayerPlan(dense_layers=frozenset({1}), dense_steps=3)
    cfg.model.register_pre_wrap_hook(PreWrapHook(replace(SETTINGS, plan=plan), cfg))
    built = cores(cfg.model.build())
    assert all(core.follows_plan for core in built)
    assert runtime.current().plan == plan
    assert "layers 1 dense; all layers dense in the first 3 steps" in capsys.readouterr().out
    with pytest.raises(RefusedError, match="needs the callback that enable returns"):
        runtime.current().steps_done()


@pytest.mark.parametrize(
    ("plan", "dense", "message"),
    [
        (LayerPlan(dense_layers=frozenset({2})), False, r"mtraining\.dense_layers: there is no layer 2; valid: 0 to 1"),
        (LayerPlan(layer_top_p=((-1, 0.9),)), False, r"mtraining\.layer_top_p: there is no layer -1; valid: 0 to 1"),
        (LayerPlan(dense_layers=frozenset({1}), layer_top_p=((1, 0.9),)), False, "layer 1 also has"),
        (LayerPlan(dense_steps=3), True, r"mtraining\.dense_steps: mtraining\.dense makes every layer and step dense"),
    ],
)
def test_a_plan_made_in_code_is_checked_against_the_model(
    on_cpu: None, plan: LayerPlan, dense: bool, message: str
) -> None:
    cfg = container()
    settings = replace(SETTINGS, plan=plan, config=replace(SETTINGS.config, dense=dense))
    cfg.model.register_pre_wrap_hook(PreWrapHook(settings, cfg))
    with pytest.raises(RefusedError, match=message):
        cfg.model.build()


def test_a_spec_object_is_swapped_in_the_built_model(on_cpu: None) -> None:
    cfg = container(transformer_layer_spec=local_spec(None))
    before = cfg.model.transformer_layer_spec
    built = cores(hooked(cfg, spec_too=True).model.build())
    assert all(isinstance(core, MTrainingCoreAttention) for core in built)
    assert cfg.model.transformer_layer_spec is before


def test_a_layer_that_cannot_be_swapped_is_named(on_cpu: None) -> None:
    cfg = hooked(container())
    model = cfg.model
    original = model.transformer_layer_spec

    def one_not_causal(config: Any) -> Any:
        spec = original(config)
        spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
        return spec

    model.transformer_layer_spec = one_not_causal
    with pytest.raises(RefusedError, match=r"no causal self-attention layer in the model; it has decoder\.layers\.0"):
        model.build()


def test_transformer_engines_own_attention_is_named(on_cpu: None) -> None:
    models = container().model.build()
    foreign = type(
        "MultiheadAttention", (type(models[0].decoder.layers[0].mlp),), {"__module__": "transformer_engine.x"}
    )
    models[0].decoder.layers[0].mlp.__class__ = foreign
    cfg = hooked(container())
    with pytest.raises(RefusedError, match=r"decoder\.layers\.0\.mlp is Transformer Engine's MultiheadAttention"):
        hooks_of(cfg.model)[0](models)


def test_what_is_refused_is_refused_before_the_model_is_touched(on_cpu: None) -> None:
    cfg = hooked(container(attention_dropout=0.1))
    with pytest.raises(RefusedError, match=r"--attention-dropout 0\.1"):
        cfg.model.build()
    cfg = hooked(container())
    cfg.dataset.reset_attention_mask = True
    with pytest.raises(RefusedError, match="dataset.reset_attention_mask=True"):
        cfg.model.build()
    assert not runtime.is_set_up()


def test_a_length_that_the_layout_cannot_deal_is_refused_by_the_hook() -> None:
    cfg = container(seq_length=1000, context_parallel_size=4)
    with pytest.raises(RefusedError, match="--seq-length 1000"):
        PreWrapHook(SETTINGS, cfg).refuse(cfg)


def test_a_copy_of_the_container_has_a_hook_that_knows_the_copy() -> None:
    cfg = hooked(container())
    other = copy.deepcopy(cfg)
    assert hooks_of(other.model)[0].cfg is other
    assert hooks_of(cfg.model)[0].cfg is cfg


def test_the_layer_spec_keeps_the_name_that_is_saved() -> None:
    cfg = hooked(container(), spec_too=True)
    spec = cfg.model.transformer_layer_spec
    assert (spec.__module__, spec.__qualname__) == (local_spec.__module__, "local_spec")
    through_layer_spec(cfg.model, SETTINGS)
    assert cfg.model.transformer_layer_spec.mtraining_original is local_spec


def test_a_config_that_lost_its_hook_is_refused(on_cpu: None) -> None:
    cfg = hooked(container(), spec_too=True)
    hooks_of(cfg.model).clear()
    with pytest.raises(RefusedError, match="dropped the model's pre-wrap hooks"):
        cfg.model.build()


def test_the_word_becomes_auto() -> None:
    cfg = container()
    cfg.model.attention_backend = "mtraining"
    name_no_backend(cfg.model)
    assert cfg.model.attention_backend is AttnBackend.auto


def test_use_ends_with_megatrons_process_groups(on_cpu: None) -> None:
    hooked(container(), spec_too=True).model.build()
    assert runtime.is_set_up()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    assert not runtime.is_set_up()
    assert not any(isinstance(core, MTrainingCoreAttention) for core in cores(container().model.build()))


def test_a_config_without_hooks_is_refused() -> None:
    with pytest.raises(RefusedError, match="cfg.model is a dict, which has no pre-wrap hooks"):
        hooks_of({})
