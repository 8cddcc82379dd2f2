"""Small random models in Hugging Face's format, data in Megatron's, and what is compared of two models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Sizes:
    """Of the small models; heads have 128 dimensions."""

    hidden: int = 1024
    feed_forward: int = 2816
    heads: int = 8
    groups: int = 2
    vocabulary: int = 32768
    layers: int = 4


ON_CPU = Sizes(256, 512, 2, 1, 512, 2)
FAMILIES = {
    # length of the original model, of the extended one, and the recipe that has the same extension
    "qwen": (32768, 131072, "qwen25_3b_pretrain_8gpu_128k_config"),
    "llama": (131072, 524288, "llama31_8b_pretrain_32gpu_512k_config"),
}


def make_model(family: str, folder: Path, own: Sizes) -> None:
    """Random weights and a tokenizer, as a download would be; scores of attention are spread (weights of 0.05)."""
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    sizes: dict[str, Any] = {
        "hidden_size": own.hidden,
        "intermediate_size": own.feed_forward,
        "num_hidden_layers": own.layers,
        "num_attention_heads": own.heads,
        "num_key_value_heads": own.groups,
        "vocab_size": own.vocabulary,
        "head_dim": 128,
        "max_position_embeddings": FAMILIES[family][0],
        "initializer_range": 0.05,
    }
    if family == "qwen":
        kind = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "use_sliding_window": False}
        config = AutoConfig.for_model("qwen2", **sizes, **kind)
    else:
        scaling = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        kind = {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_scaling": scaling}
        config = AutoConfig.for_model("llama", **sizes, **kind)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(own.vocabulary - 8)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(folder)


def make_data(prefix: Path, own: Sizes, documents: int = 400, length: int = 2000) -> None:
    """Documents of random tokens in which a part returns, in Megatron's indexed format."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = torch.Generator().manual_seed(5)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for _ in range(documents):
        part = torch.randint(2, own.vocabulary - 8, (length // 4,), generator=generator)
        document = torch.cat([part, part, part, part])
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")


def fixed_tokens(length: int, own: Sizes) -> torch.Tensor:
    """Tokens [1, length] that all logits are taken for."""
    return torch.randint(2, own.vocabulary - 8, (1, length), generator=torch.Generator().manual_seed(11))


def transformers_logits(folder: Path, tokens: torch.Tensor, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Logits [seq, vocabulary], fp32 on the host, of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    with torch.no_grad():
        return model(tokens.to(device)).logits[0].float().cpu()


def distance(logits: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """How far logits are from a reference: divergence in nats, largest difference of a logit, share of equal first choices."""
    p, q = reference.log_softmax(-1), logits.log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1)
    return {
        "kl_mean": divergence.mean().item(),
        "kl_max": divergence.max().item(),
        "logit_max": (logits - reference).abs().max().item(),
        "logit_std": reference.std().item(),
        "same_first": (logits.argmax(-1) == reference.argmax(-1)).float().mean().item(),
    }


def compare_weights(one: Path, two: Path) -> dict[str, Any]:
    """Whether the weights of two folders are the same bits, and by how much they differ."""
    from transformers import AutoModelForCausalLM

    a, b = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.bfloat16).state_dict() for p in (one, two))
    if a.keys() != b.keys():
        raise ValueError(f"other names: {sorted(a.keys() ^ b.keys())[:6]}")
    off = {k: (a[k].float() - b[k].float()).abs().max().item() for k in a}
    return {"tensors": len(a), "equal": sum(v == 0 for v in off.values()), "largest": max(off.values())}
