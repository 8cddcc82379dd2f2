"""Everything that the plugin refuses, through Megatron's real parser and validation, and on configs made in Python."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.integration import MTrainingCoreAttention, RefusedError, runtime
from megatron_mtraining.integration.refusals import REFUSALS, refuse

from .conftest import make_config

COMMAND_LINES = {
    "yaml_cfg": ("--yaml-cfg model.yaml", "--yaml-cfg model.yaml"),
    "window_size": ("--window-size 127,0", r"--window-size \(127, 0\)"),
    "softmax_type": ("--softmax-type learnable", "--softmax-type learnable"),
    "attention_dropout": ("--attention-dropout 0.1", "--attention-dropout 0.1"),
    "reset_attention_mask": ("--reset-attention-mask", "--reset-attention-mask True"),
    "position_embedding_type": ("--position-embedding-type relative", "--position-embedding-type relative"),
    "qk_clip": ("--qk-clip", "--qk-clip True"),
    "log_max_attention_logit": ("--log-max-attention-logit", "--log-max-attention-logit True"),
    "cuda_graph_impl": ("--cuda-graph-impl local", "--cuda-graph-impl local"),
    "enable_cuda_graph": ("--enable-cuda-graph", "--enable-cuda-graph True"),
    "external_cuda_graph": ("--external-cuda-graph", "--external-cuda-graph True"),
    "v_head_dim": ("--multi-latent-attention --qk-head-dim 128 --qk-pos-emb-head-dim 64", "--v-head-dim 128"),
    "experimental_attention_variant": (
        "--experimental-attention-variant dsa",
        "--experimental-attention-variant dsa",
    ),
    "batch_invariant_mode": ("--batch-invariant-mode", "--batch-invariant-mode True"),
    "transformer_impl": ("--transformer-impl inference_optimized", "--transformer-impl inference_optimized"),
    "inference_dynamic_batching": ("--inference-dynamic-batching", "--inference-dynamic-batching True"),
    "perform_rl_step": ("--perform-rl-step", "--perform-rl-step True"),
    "hybrid_context_parallel": ("--hybrid-context-parallel", "--hybrid-context-parallel True"),
    "dataloader_inter_document_masking": (
        "--dataloader-inter-document-masking",
        "--dataloader-inter-document-masking True",
    ),
}
"""Attribute -> the options that set it, and how the message must begin."""

ON_CONFIGS_ONLY = {
    "fp8_dot_product_attention": True,
    "fp8_multi_head_attention": True,
    "use_kitchen_attention": True,
}
"""Attributes without an option in this Megatron (or only with an optional package)."""


def test_every_refusal_has_a_test():
    assert {item.name for item in REFUSALS} == COMMAND_LINES.keys() | ON_CONFIGS_ONLY.keys()


NEAR_ATTENTION = re.compile(
    r"attn|attention|softmax|window|sink(?!horn)|qk_|rope|rotary|^cp_|context_parallel|mask|heads|query|kv_|head_dim|flash|logit"
)
SUPPORTED = {
    "around attention": (
        "add_qkv_bias apply_query_key_layer_scaling apply_rope_fusion attention_output_gate fused_single_qkv_rope "
        "kv_channels kv_lora_rank mrope_section multi_latent_attention mup_attn_scale_power mup_base_head_dim no_rope_freq "
        "num_attention_heads num_query_groups qk_head_dim qk_l2_norm qk_layernorm qk_pos_emb_head_dim rope_type rotary_base "
        "rotary_interleaved rotary_percent rotary_scaling_factor softmax_scale"
    ),
    "the plugin's own": "attention_backend context_parallel_size hierarchical_context_parallel_sizes",
    "how other attention computes the same": (
        "attention_softmax_in_fp32 cp_comm_type flash_attention_version masked_softmax_fusion"
    ),
    "nothing without what is refused": (
        "experimental_attention_variant_loss_scale_func kitchen_attention_backend qk_clip_alpha qk_clip_threshold "
        "window_attn_skip_freq"
    ),
    "other layers": (
        "linear_attention_freq linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim "
        "mamba_head_dim mamba_num_heads moe_router_pre_softmax mtp_detach_heads"
    ),
    "inference": "flash_decode",
    "when memory is given back": "ep_overlap_early_attn_memory_release",
}
"""Fields of Megatron's configs that have to do with attention and are not refused, by what they are."""


def test_every_option_of_the_installed_megatron_that_is_near_attention_is_known():
    """A new one must be looked at before it is silently dropped (case K1): supported, or a row of the refusals."""
    known = {name for names in SUPPORTED.values() for name in names.split()} | {item.name for item in REFUSALS}
    names = {item.name for item in dataclasses.fields(MLATransformerConfig)}
    found = {name for name in names if NEAR_ATTENTION.search(name) and not name.startswith("dsa_")}
    assert found - known == set()


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_refused_on_the_command_line(parse, name):
    """Case K1: an option that changes the mathematics is refused by name, never dropped."""
    options, expected = COMMAND_LINES[name]
    with pytest.raises(
        RefusedError, match=f"^{expected}: not supported with --attention-backend mtraining.*; use "
    ) as e:
        parse("--attention-backend", "mtraining", *options.split())
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["reset_attention_mask", "dataloader_inter_document_masking"])
def test_what_is_recommended_for_documents_is_not_refused_itself(parse, name):
    """Megatron's own data set begins documents at any token."""
    with pytest.raises(
        RefusedError, match=r"; use --sft, or packed_seq_params .*multiples of 64 tokens and cu_seqlens_q_padded$"
    ):
        parse("--attention-backend", "mtraining", *COMMAND_LINES[name][0].split())


@pytest.mark.parametrize("option", ["sft", "dataloader_inter_document_masking"])
def test_the_example_does_not_ignore_packing(monkeypatch, option):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    example = importlib.import_module("pretrain_gpt")
    monkeypatch.setattr(example, "parse_and_validate_args", lambda: SimpleNamespace(**{option: True}))
    with pytest.raises(SystemExit, match=f"--{option.replace('_', '-')}: this script trains on unpacked samples"):
        example.main()


@pytest.mark.parametrize("name", ["window_size", "softmax_type", "attention_dropout", "reset_attention_mask"])
def test_the_same_options_are_fine_without_the_plugin(parse, name):
    parse(*COMMAND_LINES[name][0].split(), validate=False)
    assert not runtime.is_set_up()


@pytest.mark.parametrize("name", ON_CONFIGS_ONLY)
def test_refused_on_a_config(name):
    owner = SimpleNamespace(**{name: ON_CONFIGS_ONLY[name]})
    with pytest.raises(RefusedError, match=f"^{name.replace('use_kitchen', '--use-kitchen').replace('_', '.')} True"):
        refuse(owner)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"window_size": (127, 0)}, "--window-size"),
        ({"softmax_type": "off-by-one"}, "--softmax-type off-by-one"),
        ({"attention_dropout": 0.1}, "--attention-dropout 0.1"),
        ({"fp8_dot_product_attention": True}, "fp8_dot_product_attention True"),
        ({"log_max_attention_logit": True}, "--log-max-attention-logit"),
    ],
)
def test_the_module_refuses_a_config_made_in_python(plugin, changes, expected):
    plugin()
    with pytest.raises(RefusedError, match=expected):
        MTrainingCoreAttention(make_config(**changes), 1, AttnMaskType.causal, "self")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"attn_mask_type": AttnMaskType.padding}, "attn_mask_type padding: .*use causal"),
        ({"attn_mask_type": AttnMaskType.no_mask}, "attn_mask_type no_mask"),
        ({"attn_mask_type": AttnMaskType.arbitrary}, "attn_mask_type arbitrary"),
        ({"attn_mask_type": AttnMaskType.padding_causal}, "attn_mask_type padding_causal"),
        ({"attention_type": "cross"}, "attention_type cross"),
        ({"attention_dropout": 0.2}, "attention_dropout 0.2"),
        ({"num_splits": 2}, "num_splits 2"),
        ({"k_channels": 192, "v_channels": 128}, "k_channels 192, v_channels 128"),
    ],
)
def test_the_module_refuses_arguments(plugin, arguments, expected):
    plugin()
    defaults = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    with pytest.raises(RefusedError, match=expected):
        MTrainingCoreAttention(make_config(), 1, **(defaults | arguments))


@pytest.mark.parametrize("changes", [{"layout": "zigzag"}, {"stripe_size": 128}, {"ring": "flat"}])
def test_a_modules_own_config_cannot_deal_the_sequence(plugin, changes):
    """It would be ignored; what differs by layer may differ, and what is left at its default says nothing."""
    plugin(MTrainingConfig(stripe_rotation=2))
    [(name, value)] = changes.items()
    with pytest.raises(
        RefusedError, match=f"^mtraining.{name} {value}: the same for all layers; that of the set-up is"
    ):
        MTrainingCoreAttention(
            make_config(), 1, AttnMaskType.causal, "self", mtraining=MTrainingConfig(top_p=0.5, **changes)
        )
    own = MTrainingConfig(top_p=0.5)
    assert MTrainingCoreAttention(make_config(), 1, AttnMaskType.causal, "self", mtraining=own).mtraining is own


def test_unequal_head_dimensions_are_refused_when_the_model_is_built(plugin):
    """Case J2: the message names both dimensions."""
    plugin()
    config = MLATransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, attention_dropout=0.0, qk_head_dim=128,
        qk_pos_emb_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    with pytest.raises(RefusedError, match=r"--v-head-dim 128.*--qk-head-dim \+ --qk-pos-emb-head-dim equal"):
        MTrainingCoreAttention(config, 1, AttnMaskType.causal, "self", k_channels=192, v_channels=128)


def test_equal_head_dimensions_of_latent_attention_are_taken(parse):
    parse(
        "--attention-backend", "mtraining", "--multi-latent-attention", "--qk-head-dim", "64", "--qk-pos-emb-head-dim",
        "64", "--v-head-dim", "128", validate=False,
    )  # fmt: skip


@pytest.mark.parametrize("modules", ["mlp", "moe_router"])
def test_cuda_graphs_without_attention_are_taken(parse, modules):
    parse(
        "--attention-backend", "mtraining", "--cuda-graph-impl", "local", "--cuda-graph-modules", modules,
        validate=False,
    )  # fmt: skip


def test_cuda_graphs_of_attention_are_refused(parse):
    options = [
        "--attention-backend",
        "mtraining",
        "--cuda-graph-impl",
        "transformer_engine",
        "--cuda-graph-modules",
        "mlp",
        "attn",
    ]
    with pytest.raises(RefusedError, match="--cuda-graph-impl transformer_engine"):
        parse(*options, validate=False)


def test_deterministic_mode_and_nondeterministic_kernels_conflict(parse):
    with pytest.raises(RefusedError, match=r"--no-mtraining-deterministic.*--deterministic-mode"):
        parse("--attention-backend", "mtraining", "--deterministic-mode", "--no-mtraining-deterministic")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--context-parallel-size 4 --seq-length 1000", "--seq-length 1000.*nearest: 768 or 1024"),
        (
            "--context-parallel-size 4 --seq-length 768 --mtraining-layout-mode convert",
            "--seq-length 768.*zigzag.*nearest: 512 or 1024",
        ),
        ("--context-parallel-size 4 --seq-length 128", "--seq-length 128.*nearest: 256"),
        (
            "--context-parallel-size 2 --seq-length 640 --mtraining-stripe-size 128",
            "--seq-length 640.*nearest: 512 or 768",
        ),
    ],
)
def test_lengths_that_do_not_fit_are_refused_with_the_nearest(parse, options, expected):
    with pytest.raises(RefusedError, match=expected):
        parse("--attention-backend", "mtraining", *options.split())
