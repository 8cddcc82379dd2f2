"""From a Hugging Face folder to a longer Megatron model with MTraining attention, and back: Bridge's own converters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mtraining import MTrainingConfig

pytestmark = pytest.mark.bridge

SEQ_LENGTH = 256


@pytest.fixture
def source(bridge: Any, tmp_path: Path) -> Path:
    """A tiny Llama, saved by transformers; Bridge maps Megatron's local layers for this family only."""
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from megatron_mtraining.bridge.recipes.llama31 import LLAMA31_8B

    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": SEQ_LENGTH // 4,
        "torch_dtype": "float32",
    }
    config = AutoConfig.for_model(**(LLAMA31_8B | small))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(256)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_there_and_back(source: Path, one_rank: None, on_cpu: None, tmp_path: Path) -> None:
    """The logits of Megatron with every line selected are those of transformers; what is exported is the longer model."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.models import gpt_provider
    from megatron.core.process_groups_config import ProcessGroupCollection
    from transformers import AutoModelForCausalLM

    from megatron_mtraining.bridge import extend_hf_config
    from megatron_mtraining.bridge.hook import PreWrapHook, Settings, end_use, hooks_of, through_layer_spec

    long = extend_hf_config(source, tmp_path / "long", SEQ_LENGTH)
    converter = AutoBridge.from_hf_pretrained(str(long), torch_dtype=torch.float32)
    provider = converter.to_megatron_provider(load_weights=True)
    assert (provider.seq_length, provider.rope_scaling_factor) == (SEQ_LENGTH, 32.0)
    settings = Settings(MTrainingConfig(top_p=1, max_vertical=None))
    provider.transformer_layer_spec, provider.transformer_impl = gpt_provider.local_layer_spec, "local"
    for name in (
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "bias_activation_fusion",
        "apply_rope_fusion",
    ):
        setattr(provider, name, False)
    provider.persist_layer_norm = provider.bias_dropout_fusion = False
    provider.use_cpu_initialization = True
    cfg = type("Container", (), {"model": provider})()
    hooks_of(provider).insert(0, PreWrapHook(settings, cfg))
    through_layer_spec(provider, settings)
    provider.finalize()
    try:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        models = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=True, pg_collection=groups, mixed_precision_wrapper=None
        )
        tokens = torch.randint(0, 256, (1, SEQ_LENGTH))
        positions = torch.arange(SEQ_LENGTH)[None]
        with torch.no_grad():
            ours = models[0].train()(tokens, positions, None)
            theirs = AutoModelForCausalLM.from_pretrained(long, dtype=torch.float32)(tokens).logits
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        converter.save_hf_pretrained(models, tmp_path / "exported", show_progress=False)
    finally:
        end_use()
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    scaling = config.get("rope_parameters") or config["rope_scaling"]
    assert (config["max_position_embeddings"], scaling["rope_type"], scaling["factor"]) == (SEQ_LENGTH, "llama3", 32.0)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(back(tokens).logits, theirs, rtol=1e-5, atol=1e-5)
