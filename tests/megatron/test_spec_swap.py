"""Swapping core attention in specs, whoever built them, and counting what was swapped in the built model."""

from __future__ import annotations

import collections
import functools

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid import hybrid_block, hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import (
    CrossAttention,
    CrossAttentionSubmodules,
    SelfAttention,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.integration import (
    MTrainingCoreAttention,
    MTrainingSpecProvider,
    RefusedError,
    check_model,
    gpt_block_spec,
    gpt_layer_spec,
    hybrid_stack_spec,
    swap_core_attention,
)
from megatron_mtraining.integration.model_check import count_attention

from . import user_specs
from .conftest import make_config
from .user_specs import attention_spec, user_layer_spec


def build_gpt(spec, config=None, **options):
    return GPTModel(
        config or make_config(),
        spec,
        vocab_size=128,
        max_sequence_length=256,
        position_embedding_type="rope",
        **options,
    )


def test_the_given_spec_is_not_changed():
    spec = user_layer_spec()
    swapped, count = swap_core_attention(spec, MTrainingCoreAttention)
    assert count == 1
    assert spec.submodules.self_attention.submodules.core_attention is DotProductAttention
    assert swapped.submodules.self_attention.submodules.core_attention is MTrainingCoreAttention
    assert swapped.submodules.mlp is spec.submodules.mlp


def test_nothing_to_swap_is_the_same_object():
    spec = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=IdentityOp))
    assert swap_core_attention(spec, MTrainingCoreAttention) == (spec, 0)
    assert swap_core_attention(spec, MTrainingCoreAttention)[0] is spec


def test_partials_and_lists_are_walked():
    inner = attention_spec()
    partial = functools.partial(SelfAttention, submodules=inner.submodules, attn_mask_type=AttnMaskType.causal)
    swapped, count = swap_core_attention([partial, {"not": "walked"}, (inner,)], MTrainingCoreAttention)
    assert count == 2
    assert swapped[0].keywords["submodules"].core_attention is MTrainingCoreAttention
    assert swapped[2][0].submodules.core_attention is MTrainingCoreAttention
    pair = collections.namedtuple("Pair", "attention other")
    swapped, count = swap_core_attention(pair(inner, 1), MTrainingCoreAttention)
    assert (count, type(swapped), swapped.other) == (1, pair, 1)


def test_other_masks_cross_attention_and_special_cores_are_left():
    cross = ModuleSpec(
        module=CrossAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=CrossAttentionSubmodules(
            linear_q=ColumnParallelLinear,
            linear_kv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )
    special = attention_spec(core=ModuleSpec(module=DotProductAttention, submodules=MLPSubmodules(None, None)))
    for spec in (cross, special, attention_spec(mask=AttnMaskType.padding)):
        assert swap_core_attention(spec, MTrainingCoreAttention)[1] == 0


def test_megatrons_hybrid_spec_is_swapped_where_attention_is_plain():
    """The layer with an indexer of its own (sparse attention) keeps it; plain and latent attention are swapped."""
    swapped, count = swap_core_attention(hybrid_layer_specs.hybrid_stack_spec, MTrainingCoreAttention)
    assert count == 2
    layers = swapped.submodules
    for layer in (layers.attention_layer, layers.mla_layer):
        assert layer.submodules.self_attention.submodules.core_attention is MTrainingCoreAttention
    dsa = layers.dsa_layer.submodules.self_attention.submodules.core_attention
    assert (
        dsa
        is hybrid_layer_specs.hybrid_stack_spec.submodules.dsa_layer.submodules.self_attention.submodules.core_attention
    )


@pytest.mark.usefixtures("one_rank")
class TestModels:
    def test_gpt_with_the_local_spec(self, plugin):
        plugin()
        model = build_gpt(get_gpt_layer_local_spec(normalization="RMSNorm"))
        assert len(check_model([model]).swapped) == 2

    def test_gpt_with_experts(self, plugin):
        config = make_config(num_moe_experts=2, moe_ffn_hidden_size=64, moe_layer_freq=[0, 1])
        plugin(model=config)
        model = build_gpt(get_gpt_decoder_block_spec(config, use_transformer_engine=False), config)
        assert len(check_model([model]).swapped) == 2

    def test_gpt_with_multi_token_prediction(self, plugin):
        config = make_config(mtp_num_layers=1)
        plugin(model=config)
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        model = build_gpt(spec, config, mtp_block_spec=mtp)
        swapped = check_model([model]).swapped
        assert len(swapped) == 3
        assert any(name.startswith("mtp.") for name in swapped)

    def test_layers_of_multi_token_prediction_are_recorded_after_the_decoders(self, plugin):
        """Megatron begins anew with them; recorded so, they would take the place of the decoder's in the metrics."""
        config = make_config(mtp_num_layers=2)
        plugin(model=config)
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        model = build_gpt(spec, config, mtp_block_spec=mtp)
        cores = [module for module in model.modules() if isinstance(module, MTrainingCoreAttention)]
        assert [core.layer_number for core in cores] == [1, 2, 1, 2]
        assert [core.layer_index for core in cores] == [0, 1, 2, 3]

    def test_gpt_with_a_users_spec(self, plugin):
        plugin()
        assert len(check_model([build_gpt(user_layer_spec())]).swapped) == 2

    def test_hybrid_with_a_local_spec(self, plugin, monkeypatch):
        monkeypatch.setattr(hybrid_block, "TENorm", WrappedTorchNorm)  # Transformer Engine's norm is hard-wired there
        config = make_config(num_layers=4, is_hybrid_model=True)
        plugin(model=config)
        model = HybridModel(
            config, user_specs.hybrid_stack_spec, vocab_size=128, max_sequence_length=256, hybrid_layer_pattern="*-*-",
            position_embedding_type="rope",
        )  # fmt: skip
        assert len(check_model([model]).swapped) == 2

    @pytest.mark.parametrize(("pattern", "expected"), [("*-", [4, 6]), ("-*", [5, 7])])
    def test_prediction_of_a_hybrid_is_numbered_as_its_pattern(self, plugin, monkeypatch, pattern, expected):
        """Every layer of the pattern counts, with or without attention, as in the decoder."""
        monkeypatch.setattr(hybrid_block, "TENorm", WrappedTorchNorm)
        config = make_config(num_layers=4, is_hybrid_model=True, mtp_num_layers=2)
        plugin(model=config)
        stack = user_specs.hybrid_stack_spec
        depths = []
        for number in (1, 2):
            depth = MultiTokenPredictionLayer.__new__(MultiTokenPredictionLayer)
            torch.nn.Module.__init__(depth)
            depth.config, depth.layer_number, depth.mtp_layer_pattern = config, number, pattern
            depth.mtp_model_layer = HybridModel(
                config, stack, vocab_size=128, max_sequence_length=256, hybrid_layer_pattern=pattern,
                position_embedding_type="rope",
            ).decoder  # fmt: skip
            depths.append(depth)
        check_model(depths)
        cores = [module for depth in depths for module in depth.modules() if isinstance(module, MTrainingCoreAttention)]
        assert [core.layer_index for core in cores] == expected

    def test_a_layer_that_was_skipped_is_an_error_that_names_it(self, plugin):
        """A core that the swap leaves alone would train densely, without a word."""
        plugin()
        own = ModuleSpec(module=DotProductAttention, submodules=MLPSubmodules(None, None))
        own.module = type("OwnAttention", (DotProductAttention,), {"__init__": _drop_submodules})
        with pytest.raises(
            RefusedError,
            match=r"only 0 of 2 causal.*decoder.layers.0.self_attention \(OwnAttention\), decoder.layers.1",
        ):
            build_gpt(user_layer_spec(core=own))

    def test_a_model_without_causal_attention_is_an_error(self, plugin):
        plugin()
        with pytest.raises(RefusedError, match=r"no causal self-attention layer.*padding, DotProductAttention"):
            build_gpt(user_layer_spec(mask=AttnMaskType.padding))

    @pytest.mark.parametrize("mask", [AttnMaskType.no_mask, AttnMaskType.padding, AttnMaskType.arbitrary])
    def test_a_layer_that_is_not_causal_beside_others_is_an_error_that_names_it(self, plugin, mask):
        plugin()
        block = TransformerBlockSubmodules(
            layer_specs=[user_layer_spec(), user_layer_spec(mask=mask)], layer_norm=WrappedTorchNorm
        )
        with pytest.raises(
            RefusedError,
            match=rf"not causal is not supported.*: decoder.layers.1.self_attention \({mask.name}, DotProductAttention\)$",
        ):
            build_gpt(block)

    def test_other_masks_beside_the_language_model_are_left_alone(self, plugin):
        """A vision tower's, say."""
        tower = build_gpt(user_layer_spec(mask=AttnMaskType.no_mask)).decoder
        plugin()
        model = torch.nn.ModuleDict({"language": build_gpt(user_layer_spec()), "tower": tower})
        census = check_model([model])
        assert (len(census.swapped), len(census.other), census.not_causal) == (2, 2, [])

    def test_without_the_plugin_nothing_is_swapped(self):
        model = build_gpt(get_gpt_layer_local_spec(normalization="RMSNorm"))
        census = count_attention([model])
        assert (len(census.swapped), len(census.skipped)) == (0, 2)

    def test_our_specs_build_without_hooks(self, plugin):
        plugin()
        config, mtraining = make_config(), MTrainingConfig(top_p=0.5)
        for spec in (gpt_layer_spec(config, mtraining), gpt_block_spec(config, mtraining)):
            model = build_gpt(spec, config)
            assert len(check_model([model]).swapped) == 2
            # Their own config, not that of the set-up.
            assert model.decoder.layers[0].self_attention.core_attention.mtraining == mtraining

    def test_hybrid_spec_function(self):
        spec = hybrid_stack_spec(user_specs.hybrid_stack_spec)
        assert _core_of(spec.submodules.attention_layer).module is MTrainingCoreAttention

    def test_a_spec_without_attention_is_refused(self):
        with pytest.raises(RefusedError, match="no causal self-attention"):
            hybrid_stack_spec(ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules()))

    def test_spec_provider(self):
        provider = MTrainingSpecProvider(mtraining=MTrainingConfig(top_p=0.5))
        assert provider.core_attention().module is MTrainingCoreAttention
        assert provider.column_parallel_linear() is ColumnParallelLinear
        assert provider.row_parallel_linear() is RowParallelLinear
        assert provider.fuse_layernorm_and_linear() is False
        assert provider.column_parallel_layer_norm_linear() is None
        assert provider.activation_func() is None
        assert provider.layer_norm() is provider.fallback.layer_norm()


def _drop_submodules(self, *args, submodules=None, **kwargs):
    DotProductAttention.__init__(self, *args, **kwargs)


def _core_of(spec):
    layer = spec.layer_specs[0] if hasattr(spec, "layer_specs") else spec
    return layer.submodules.self_attention.submodules.core_attention
