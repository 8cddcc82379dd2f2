"""Runs Megatron-LM's own tests of parallel attention with this package's core attention at top-p 1, on one GPU.

    python tools/upstream_attention.py --megatron DIR [options of pytest]

DIR is a checkout of Megatron-LM with its tests and Transformer Engine is installed. Upstream, `test_attention.py` compares a
self-attention layer, output and gradients, under tensor or context parallelism with the same layer and checkpoint on one
rank. Here the layer that is compared has MTraining attention instead, on one rank, and the baseline keeps Transformer
Engine's. `test_thd_correctness.py` compares packed documents with the same documents padded into a batch; here both layers
have MTraining attention. Their tolerances are upstream's.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

HEADS = {64: (4, None), 128: (8, 2)}
"""head dimension -> heads, query groups"""
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused_rope": {"apply_rope_fusion": True},
    "qk_layernorm": {"qk_layernorm": True},
    "gate": {"attention_output_gate": True},
}
"""name -> what of the configuration differs"""


def exact() -> Any:
    """The core attention with every line kept."""
    from megatron_mtraining import MTrainingConfig
    from megatron_mtraining.integration import core_attention_spec

    return core_attention_spec(MTrainingConfig(top_p=1.0, max_vertical=None))


@pytest.mark.parametrize("head_dim", list(HEADS))
@pytest.mark.parametrize("packed", [False, True], ids=["sbhd", "thd"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_parallel_attention_correctness(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, head_dim: int, packed: bool, variant: str
) -> None:
    """The second model that upstream's test builds has our core attention."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    from megatron_mtraining.integration import MTrainingCoreAttention, swap_core_attention

    upstream = importlib.import_module("tests.unit_tests.transformer.test_attention")
    cores: list[Any] = []

    def build(*, transformer_layer_spec: Any, **given: Any) -> GPTModel:
        swaps = 1
        if cores:
            transformer_layer_spec, swaps = swap_core_attention(transformer_layer_spec, exact())
        model = GPTModel(transformer_layer_spec=transformer_layer_spec, **given)
        cores.append(model.decoder.layers[0].self_attention.core_attention)
        assert swaps == 1
        return model

    monkeypatch.setattr(upstream, "GPTModel", build)
    heads, groups = HEADS[head_dim]
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
    upstream._test_parallel_attention_correctness(
        config, spec, tmp_path, atol=1e-2, rtol=1e-2, tp=1, cp=1, sequence_length=256, sequence_packing=packed
    )
    assert [isinstance(core, MTrainingCoreAttention) for core in cores] == [False, True]


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
    raise SystemExit(pytest.main([here, *settings, "-v", "--tb=short", *more]))


if __name__ == "__main__":
    main()
