"""Runs Megatron-LM's own tests of parallel attention with this package's core attention at top-p 1, on one GPU or more.

    python tools/upstream_attention.py --megatron DIR [options of pytest]
    torchrun --nproc-per-node 2 tools/upstream_attention.py --megatron DIR [options of pytest]

DIR is a checkout of Megatron-LM with its tests and Transformer Engine is installed. Upstream, `test_attention.py` compares a
self-attention layer, output and gradients, under tensor or context parallelism with the same layer and checkpoint on one
rank. Here the layer that is compared has MTraining attention instead, under the splits that so many ranks allow (on one, the
same layer once more), and the baseline keeps Transformer Engine's. `test_thd_correctness.py` compares packed documents with
the same documents padded into a batch; here both layers have MTraining attention. Their tolerances are upstream's, for layers
about as wide as upstream's.

Wider layers have larger gradients, where bf16 alone exceeds these tolerances in single elements: there both are compared
with attention calculated in fp32.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
SPLITS = {
    1: [(1, False, 1)],
    2: [(2, False, 1), (2, True, 1), (1, False, 2)],
    4: [(4, False, 1), (4, True, 1), (1, False, 4), (2, False, 2), (2, True, 2)],
}
"""ranks -> tensor-parallel size, sequence parallelism, context-parallel size; those of 4 are upstream's"""
one_rank = pytest.mark.skipif(RANKS > 1, reason="for one rank")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused_rope": {"apply_rope_fusion": True},
    "qk_layernorm": {"qk_layernorm": True},
    "gate": {"attention_output_gate": True},
}
"""name -> what of the configuration differs"""


def every_line() -> Any:
    """The config that keeps every line."""
    from megatron_mtraining import MTrainingConfig

    return MTrainingConfig(top_p=1.0, max_vertical=None)


def exact() -> Any:
    """The core attention with every line kept."""
    from megatron_mtraining.integration import core_attention_spec

    return core_attention_spec(every_line())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for checkpoints, the same on all ranks."""
    return tmp_path if RANKS == 1 else Path(tempfile.gettempdir()) / f"upstream-{os.environ['MASTER_PORT']}"


@pytest.mark.parametrize(("tp", "sp", "cp"), SPLITS[RANKS])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("packed", [False, True], ids=["sbhd", "thd"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_parallel_attention_correctness(
    monkeypatch: pytest.MonkeyPatch, folder: Path, head_dim: int, packed: bool, variant: str, tp: int, sp: bool, cp: int
) -> None:
    """The second model that upstream's test builds has our core attention; it holds the sequence in zigzag, as upstream."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    from megatron_mtraining.integration import MTrainingCoreAttention, set_up, tear_down

    upstream = importlib.import_module("tests.unit_tests.transformer.test_attention")
    cores: list[Any] = []

    def build(**given: Any) -> GPTModel:
        if cores:
            set_up(every_line(), given["config"], layout_mode="convert")
        model = GPTModel(**given)
        cores.append(model.decoder.layers[0].self_attention.core_attention)
        return model

    monkeypatch.setattr(upstream, "GPTModel", build)
    heads = max(128 // head_dim, tp)
    groups = 1 if tp == 1 else heads
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_query_groups=groups,
        normalization="RMSNorm",
        bf16=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **VARIANTS[variant],
    )
    spec = upstream.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    try:
        upstream._test_parallel_attention_correctness(
            config,
            spec,
            folder,
            atol=1e-2,
            rtol=1e-2,
            tp=tp,
            sp=sp,
            cp=cp,
            sequence_length=256,
            sequence_packing=packed,
        )
    finally:
        tear_down()
    assert [isinstance(core, MTrainingCoreAttention) for core in cores] == [False, True]


@one_rank
@pytest.mark.parametrize("lengths", [[2048, 512, 192], [4096], [64, 3584, 64, 128]], ids=str)
@pytest.mark.parametrize("width", [(1024, 16, 4), (1024, 8, 8)], ids=str)
def test_thd_format(monkeypatch: pytest.MonkeyPatch, lengths: list[int], width: tuple[int, int, int]) -> None:
    """Upstream's layer with our core attention: documents of a batch, and packed."""
    from megatron_mtraining.integration import swap_core_attention

    upstream = importlib.import_module("tests.unit_tests.transformer.test_thd_correctness")
    layer_spec = upstream.get_gpt_layer_with_transformer_engine_spec
    swaps = []

    def swapped() -> Any:
        spec, count = swap_core_attention(layer_spec(), exact())
        swaps.append(count)
        return spec

    monkeypatch.setattr(upstream, "get_gpt_layer_with_transformer_engine_spec", swapped)
    hidden, heads, groups = width
    upstream.test_thd_format(upstream.TestCase("mtraining", hidden, heads, groups, 4 * hidden, lengths))
    assert swaps == [1]


@one_rank
@pytest.mark.parametrize("shape", [(2, 1, 128), (8, 2, 128), (16, 4, 64), (8, 8, 128)], ids=str)
@pytest.mark.parametrize("seq_len", [256, 4096])
@pytest.mark.parametrize("variant", ["plain", "qk_layernorm"])
def test_error_is_that_of_transformer_engine(shape: tuple[int, int, int], seq_len: int, variant: str) -> None:
    """Output and gradients: the error against fp32 is at most a tenth above Transformer Engine's (of vectors: half)."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_submodules
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.enums import AttnMaskType

    utilities = importlib.import_module("tests.unit_tests.test_utilities").Utils
    utilities.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(5)
    heads, groups, head_dim = shape
    config = TransformerConfig(
        num_layers=1, hidden_size=heads * head_dim, num_attention_heads=heads, num_query_groups=groups, bf16=True,
        params_dtype=torch.bfloat16, attention_dropout=0.0, hidden_dropout=0.0, **VARIANTS[variant],
    )  # fmt: skip
    engines = get_gpt_layer_with_transformer_engine_submodules(
        qk_layernorm=config.qk_layernorm
    ).self_attention.submodules
    cores = {"fp32": _attention_in_fp32(), "engine": engines.core_attention, "ours": exact()}
    hidden = torch.randn(seq_len, 2, config.hidden_size, device="cuda", dtype=torch.bfloat16)
    gradient = torch.randn_like(hidden)
    weights, results = None, {}
    for name, core in cores.items():
        submodules = dataclasses.replace(engines, core_attention=core)
        layer = SelfAttention(config, submodules, layer_number=1, attn_mask_type=AttnMaskType.causal).cuda()
        weights = weights or {key: value.clone() for key, value in layer.named_parameters()}
        for key, parameter in layer.named_parameters():
            parameter.data.copy_(weights[key])
        given = hidden.clone().requires_grad_()
        output, _ = layer(given, attention_mask=None)
        output.backward(gradient)
        results[name] = [output.detach(), given.grad, *(parameter.grad for parameter in layer.parameters())]
    for exact_value, engine, ours in zip(results["fp32"], results["engine"], results["ours"], strict=True):
        if exact_value is None:
            continue
        errors = [float((value.double() - exact_value.double()).norm()) for value in (ours, engine)]
        print(f"{tuple(exact_value.shape)}: error {errors[0]:.3e}, of Transformer Engine {errors[1]:.3e}")
        bound = 1.1 if exact_value.dim() > 1 else 1.5  # of a bias, the rounding of few large elements decides
        assert errors[0] <= bound * errors[1] + 1e-6 * float(exact_value.double().norm())
    utilities.destroy_model_parallel()


def _attention_in_fp32() -> type:
    import torch

    class AttentionInFp32(torch.nn.Module):
        """Causal attention with fp32 arithmetic, behind Megatron's contract."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
            q, k, v = (x.permute(1, 2, 0, 3).float() for x in (query, key, value))
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.permute(2, 0, 1, 3).flatten(2).to(query.dtype)

    return AttentionInFp32


def main() -> None:
    """Runs this file by pytest, with the checkout's packages before any other."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megatron", type=Path, required=True, help="a checkout of Megatron-LM")
    options, more = parser.parse_known_args()
    sys.path.insert(0, str(options.megatron.resolve()))
    here = str(Path(__file__).resolve())
    sys.argv[1:] = []  # upstream has Megatron parse it
    os.chdir(options.megatron)
    settings = [
        "-c",
        os.devnull,
        "--rootdir",
        str(Path(here).parent),
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
    ]
    raise SystemExit(
        pytest.main([here, *settings, "-v", "-rP", "--show-capture=stdout", "-p", "no:logging", "--tb=short", *more])
    )


if __name__ == "__main__":
    main()
