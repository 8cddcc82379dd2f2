"""What happens when Bridge builds a model that :func:`.enable` was called for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.integration import RefusedError, groups, hooks, layout_mode, model_check, runtime
from megatron_mtraining.integration.core_attention import MTrainingCoreAttention
from megatron_mtraining.integration.layer_plan import LayerPlan, check_plan, layers_of
from megatron_mtraining.integration.options import BACKEND
from megatron_mtraining.integration.rebind import Rebinding, rebind
from megatron_mtraining.integration.refusals import refuse
from megatron_mtraining.integration.spec_swap import swap_core_attention
from megatron_mtraining.integration.specs import core_attention_spec

from .checks import refuse_container

PROVIDER_HOOKS = "_pre_wrap_hooks"
"""Where ``ModelProviderMixin.register_pre_wrap_hook`` keeps its hooks. Not a field, so it is in no saved config."""

BUILDER_HOOKS = "pre_wrap_hooks"
"""The same of a model builder's config: a field that its serialisation leaves out."""

LAYER_SPEC = "transformer_layer_spec"

PREFIX = "mtraining."
"""Before the names of the attention's options, in overrides and messages."""


@dataclass(frozen=True)
class Settings:
    """What :func:`.enable` was told.

    Attributes:
        config: the attention's config.
        layout_mode: ``auto``, ``native`` or ``convert``.
        inner_across_hosts: whether an inner ring may cross hosts.
        plan: what differs by layer and by step.
    """

    config: MTrainingConfig
    layout_mode: str = "auto"
    inner_across_hosts: bool = False
    plan: LayerPlan = field(default_factory=LayerPlan)


def has_hook_field(model_config: Any) -> bool:
    """Whether it is the config of a model builder; a provider keeps its hooks outside its fields."""
    return BUILDER_HOOKS in getattr(model_config, "__dataclass_fields__", {})


def hooks_of(model_config: Any) -> list[Any]:
    """The list of pre-wrap hooks of a provider or of a builder's config; what is changed in it takes effect."""
    if has_hook_field(model_config):
        return model_config.pre_wrap_hooks
    if not hasattr(model_config, "register_pre_wrap_hook"):
        raise RefusedError(
            f"cfg.model is a {type(model_config).__name__}, which has no pre-wrap hooks: MTraining attention needs a "
            "Megatron-Bridge model provider or the config of a model builder"
        )
    if not hasattr(model_config, PROVIDER_HOOKS):
        setattr(model_config, PROVIDER_HOOKS, [])
    return getattr(model_config, PROVIDER_HOOKS)


def name_no_backend(model_config: Any) -> None:
    """Turns the word ``mtraining`` into ``auto``, so that saved configs and Transformer Engine know the value."""
    if getattr(model_config, "attention_backend", None) == BACKEND:
        model_config.attention_backend = AttnBackend.auto


@dataclass
class PreWrapHook:
    """The pre-wrap hook: swaps core attention in built models and refuses them unless all of it was swapped.

    An object rather than a function, because a copy of the container must carry a hook that knows the copy.

    Attributes:
        settings: what :func:`.enable` was told.
        cfg: the container, read when the model has been built.
    """

    settings: Settings
    cfg: Any

    def refuse(self, cfg: Any) -> None:
        """Refuses what in the container is not supported.

        Raises:
            RefusedError: names the setting, its value and what is valid.
        """
        refuse_container(cfg)
        refuse(cfg.model)
        if self.settings.plan != LayerPlan():
            check_plan(self.settings.plan, self.settings.config, layers_of(cfg.model), PREFIX.__add__)
        seq_len = getattr(cfg.model, "seq_length", None)
        if seq_len is not None:
            mode = layout_mode.choose_layout_mode(self.settings.layout_mode, cfg.model, self.settings.config)
            layout_mode.check_sequence_length(seq_len, cfg.model, self.settings.config, mode)

    def __call__(self, models: list[MegatronModule]) -> list[MegatronModule]:
        """Swaps and checks the model chunks of this rank. Every rank calls it, at the same point of its set-up.

        Args:
            models: the chunks, before they are wrapped for mixed precision and data parallelism.

        Raises:
            RefusedError: for a setting that is not supported, or listing the layers that were not swapped.
        """
        self.refuse(self.cfg)
        prepare(self.settings, self.cfg.model)
        for model in models:
            _swap_built(model)
        _give_rotary_its_group(models)
        _make_decentralized_groups(models, self.settings)
        census = model_check.check_model(models)
        for model in models:
            _refuse_foreign_attention(model)
        _say(self.settings, len(census.swapped))
        return models


def through_layer_spec(model_config: Any, settings: Settings) -> None:
    """Also goes through the config's ``transformer_layer_spec``, so that no other core attention is ever built.

    The function put there carries the name of the one it stands for: a saved config names Bridge's, and loads without
    this package. A spec that is an object stays as it is, and the pre-wrap hook swaps in the built model.
    """
    spec = getattr(model_config, LAYER_SPEC, None)
    if not callable(spec) or isinstance(spec, ModuleSpec):
        return
    setattr(model_config, LAYER_SPEC, _swapping_spec(getattr(spec, "mtraining_original", spec), settings))


def _swapping_spec(original: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    @functools.wraps(original)
    def layer_spec(model_config: Any, *args: Any, **kwargs: Any) -> Any:
        _check_hook(model_config)
        prepare(settings, model_config)
        swapped, _ = swap_core_attention(original(model_config, *args, **kwargs), core_attention_spec())
        return swapped

    layer_spec.mtraining_original = original  # type: ignore[attr-defined]
    return layer_spec


def _check_hook(model_config: Any) -> None:
    """Refuses to build without the hook: Bridge's overrides drop the hooks of a builder's config."""
    if not any(isinstance(hook, PreWrapHook) for hook in hooks_of(model_config)):
        raise RefusedError(
            "Bridge's command-line overrides dropped the model's pre-wrap hooks (it rebuilds the list without "
            "functions): apply them with megatron_mtraining.bridge.apply_overrides, or call enable after them"
        )


@dataclass
class _Use:
    """The use of the plugin by the model that was built last, and what ends it.

    Attributes:
        settings: of that model.
        model_config: of that model.
        state: the plugin's state that was made for it.
        ending: the hook that ends the use with Megatron's process groups.
    """

    settings: Settings
    model_config: Any
    state: runtime.Runtime
    ending: Rebinding

    def serves(self, settings: Settings, model_config: Any) -> bool:
        """Whether a chunk with these settings belongs to the same model, and nobody has ended the use since."""
        same = self.settings == settings and self.model_config is model_config
        return same and runtime.is_set_up() and runtime.current() is self.state


_use: _Use | None = None


def prepare(settings: Settings, model_config: Any) -> None:
    """Puts the plugin to use for the model being built, once: the chunks of a pipeline stage share it. Collective.

    Raises:
        RefusedError: for what is not supported.
    """
    global _use
    if _use is not None and _use.serves(settings, model_config):
        return
    end_use()
    name_no_backend(model_config)
    state = hooks.set_up(settings.config, model_config, settings.layout_mode, settings.inner_across_hosts)
    state.plan = settings.plan
    if settings.plan.dense_steps or settings.plan.top_p_schedule:
        state.steps_done = _no_counter
    # Put on top of the hooks of set_up, and so taken out before them.
    name = parallel_state.__name__
    ending = rebind(name, "destroy_model_parallel", _ending(parallel_state.destroy_model_parallel))
    _use = _Use(settings, model_config, state, ending)


def _no_counter() -> int:
    raise RefusedError("a plan that changes over the steps needs the callback that enable returns, which counts them")


def _ending(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ends the use of the plugin when Bridge destroys its process groups: the next run in this process may be dense."""

    @functools.wraps(original)
    def destroy_model_parallel(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            end_use()

    return destroy_model_parallel


def end_use() -> None:
    """Ends the use of the plugin in this process, if a model of Bridge began it."""
    global _use
    if _use is not None:
        _use.ending.undo()
        _use = None
        hooks.tear_down()


def _swap_built(model: MegatronModule) -> None:
    """Swaps core attention in a built model, for specs that :func:`through_layer_spec` did not reach."""
    for layer in model.modules():
        if not isinstance(layer, Attention) or isinstance(layer.core_attention, MTrainingCoreAttention):
            continue
        if layer.attention_type != "self" or layer.attn_mask_type != AttnMaskType.causal:
            continue  # the check of the model reports it
        layer.core_attention = MTrainingCoreAttention(
            config=layer.config,
            layer_number=layer.layer_number,
            attn_mask_type=layer.attn_mask_type,
            attention_type=layer.attention_type,
            softmax_scale=getattr(layer, "softmax_scale", layer.config.softmax_scale),
            pg_collection=layer.pg_collection,
        )


def _refuse_foreign_attention(model: MegatronModule) -> None:
    """Refuses attention that Megatron's own layers do not wrap, which no check of core attention would find."""
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.startswith("transformer_engine") and "Attention" in kind.__name__:
            raise RefusedError(f"{name} is Transformer Engine's {kind.__name__}: it could not be swapped")


def _give_rotary_its_group(models: list[MegatronModule]) -> None:
    """Hands YaRN's embedding the model's context-parallel group where there are no global groups.

    Megatron's GPTModel hands it to plain RoPE only (0.19). Without it every rank would embed the whole sequence.
    """
    for model in models:
        group = getattr(getattr(model, "pg_collection", None), "cp", None)
        for module in model.modules():
            if isinstance(module, RotaryEmbedding) and module.cp_group is None:
                module.cp_group = group


def _make_decentralized_groups(models: list[MegatronModule], settings: Settings) -> None:
    """Ring groups where Bridge did not use Megatron's global groups (``dist.use_decentralized_pg``). Collective."""
    if parallel_state.model_parallel_is_initialized():
        return
    group = getattr(getattr(models[0], "pg_collection", None), "cp", None)
    if group is None or group.size() == 1:
        return
    hierarchical = getattr(models[0].pg_collection, "hcp", None)
    groups.create_ring_groups(group, settings.config.ring, hierarchical, settings.inner_across_hosts)


def _say(settings: Settings, swapped: int) -> None:
    """One line of log, on rank 0: the number of layers, and whether the sequence is dealt natively or converted."""
    mode, plan = runtime.current().layout_mode, settings.plan.describe()
    if torch.distributed.get_rank() == 0:
        print(
            f"> megatron_mtraining: {swapped} attention layers of rank 0 swapped; layout {settings.config.layout}, "
            f"{mode.mode}: {mode.reason}{plan and '; ' + plan}",
            flush=True,
        )
