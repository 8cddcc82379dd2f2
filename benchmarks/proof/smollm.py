"""SmolLM2-135M from a GGUF file as a Megatron ``GPTModel``: the names, layouts and permutations between the two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

ROPE_THETA = 1_000_000.0
"""For sequences beyond the model's 8K tokens (its own is 1e5): a longer base, the same for all runs and lengths."""


@dataclass(frozen=True)
class Shape:
    """The architecture, as the GGUF file states it."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float
    norm_eps: float
    context: int


def read_shape(reader: gguf.GGUFReader) -> Shape:
    """The architecture of a Llama GGUF file.

    Raises:
        ValueError: the file holds another architecture.
    """

    def value(key: str) -> object:
        field = reader.get_field(key)
        if field is None:
            raise ValueError(f"GGUF file without {key}: expected a Llama model")
        return field.contents()

    if value("general.architecture") != "llama":
        raise ValueError(f"general.architecture={value('general.architecture')}: must be llama")
    return Shape(
        layers=int(value("llama.block_count")),  # type: ignore[call-overload]
        hidden=int(value("llama.embedding_length")),  # type: ignore[call-overload]
        ffn=int(value("llama.feed_forward_length")),  # type: ignore[call-overload]
        heads=int(value("llama.attention.head_count")),  # type: ignore[call-overload]
        kv_heads=int(value("llama.attention.head_count_kv")),  # type: ignore[call-overload]
        head_dim=int(value("llama.rope.dimension_count")),  # type: ignore[call-overload]
        vocab=int(value("llama.vocab_size")),  # type: ignore[call-overload]
        rope_theta=float(value("llama.rope.freq_base")),  # type: ignore[arg-type]
        norm_eps=float(value("llama.attention.layer_norm_rms_epsilon")),  # type: ignore[arg-type]
        context=int(value("llama.context_length")),  # type: ignore[call-overload]
    )


def half_rotation(weight: Tensor, heads: int) -> Tensor:
    """Undoes the row order of q and k in Llama GGUF files.

    They hold the two halves of each rotated pair next to each other; Megatron (like transformers) rotates row ``i`` of
    a head with row ``i + head_dim / 2``.
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def fused_qkv(q: Tensor, k: Tensor, v: Tensor, kv_heads: int) -> Tensor:
    """Megatron's ``linear_qkv``: for each kv head its query heads, its key, its value."""
    return torch.cat([x.view(kv_heads, -1, x.shape[1]) for x in (q, k, v)], 1).flatten(0, 1)


def read_weights(path: Path) -> tuple[Shape, dict[str, Tensor]]:
    """Architecture and fp32 weights of a Llama GGUF file under Megatron's names (local layer spec, tied embedding)."""
    reader = gguf.GGUFReader(path)
    shape = read_shape(reader)
    raw = {
        item.name: torch.from_numpy(
            np.asarray(gguf.quants.dequantize(item.data, item.tensor_type), dtype=np.float32).copy()
        )
        for item in reader.tensors
    }
    weights = {
        "embedding.word_embeddings.weight": raw["token_embd.weight"],
        "decoder.final_layernorm.weight": raw["output_norm.weight"],
    }
    for number in range(shape.layers):
        source, target = f"blk.{number}", f"decoder.layers.{number}"
        weights[f"{target}.input_layernorm.weight"] = raw[f"{source}.attn_norm.weight"]
        weights[f"{target}.self_attention.linear_qkv.weight"] = fused_qkv(
            half_rotation(raw[f"{source}.attn_q.weight"], shape.heads),
            half_rotation(raw[f"{source}.attn_k.weight"], shape.kv_heads),
            raw[f"{source}.attn_v.weight"],
            shape.kv_heads,
        )
        weights[f"{target}.self_attention.linear_proj.weight"] = raw[f"{source}.attn_output.weight"]
        weights[f"{target}.pre_mlp_layernorm.weight"] = raw[f"{source}.ffn_norm.weight"]
        weights[f"{target}.mlp.linear_fc1.weight"] = torch.cat(
            [raw[f"{source}.ffn_gate.weight"], raw[f"{source}.ffn_up.weight"]]
        )
        weights[f"{target}.mlp.linear_fc2.weight"] = raw[f"{source}.ffn_down.weight"]
    return shape, weights


def build_model(shape: Shape, *, max_seq: int, rope_theta: float, dtype: torch.dtype = torch.float32) -> GPTModel:
    """A ``GPTModel`` of this architecture with Megatron's local layer spec and random weights, on the current device.

    The model-parallel groups must exist (:func:`benchmarks.proof.session.single_rank`).
    """
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        transformer_impl="local",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(
        config,
        spec,
        vocab_size=shape.vocab,
        max_sequence_length=max_seq,
        position_embedding_type="rope",
        rotary_base=rope_theta,
        share_embeddings_and_output_weights=True,
        parallel_output=False,
    )


def load_weights(model: GPTModel, weights: dict[str, Tensor]) -> None:
    """Copies the weights into the model in its dtype; every parameter must be named.

    Raises:
        ValueError: names of the weights and of the parameters differ.
    """
    parameters = dict(model.named_parameters())
    if parameters.keys() != weights.keys():
        raise ValueError(f"weights do not fit the model: {sorted(parameters.keys() ^ weights.keys())[:6]}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def pretrained(gguf: Path, length: int, device: torch.device) -> GPTModel:
    """The model of a GGUF file for `length` tokens, for evaluation: bf16 on a GPU, else fp32.

    Beyond the context that it was trained with its RoPE base is `ROPE_THETA`.
    """
    shape, weights = read_weights(gguf)
    theta = shape.rope_theta if length <= shape.context else ROPE_THETA
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_model(shape, max_seq=length, rope_theta=theta, dtype=dtype).to(device).eval()
    load_weights(model, weights)
    return model
