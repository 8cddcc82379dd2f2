"""A small random Llama model as a GGUF file, random text and phrases."""

from __future__ import annotations

import json

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="needs the proof extra")
pytest.importorskip("megatron.core", reason="needs megatron-core")

VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, DIM, LAYERS = 128, 48, 64, 3, 1, 16, 2


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """``model.gguf``, ``train.bin``, ``valid.bin`` and ``phrases.json``."""
    path = tmp_path_factory.mktemp("proof")
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path / "model.gguf", "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(DIM)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)

    def add(name, *shape):
        weight = 1 + rng.normal(size=shape) / 8 if len(shape) == 1 else rng.normal(size=shape) * shape[-1] ** -0.5
        writer.add_tensor(name, weight.astype(np.float32))

    add("token_embd.weight", VOCAB, HIDDEN)
    add("output_norm.weight", HIDDEN)
    for number in range(LAYERS):
        block = f"blk.{number}"
        for name in ("attn_norm", "ffn_norm"):
            add(f"{block}.{name}.weight", HIDDEN)
        add(f"{block}.attn_q.weight", HEADS * DIM, HIDDEN)
        add(f"{block}.attn_k.weight", KV_HEADS * DIM, HIDDEN)
        add(f"{block}.attn_v.weight", KV_HEADS * DIM, HIDDEN)
        add(f"{block}.attn_output.weight", HIDDEN, HEADS * DIM)
        add(f"{block}.ffn_gate.weight", FFN, HIDDEN)
        add(f"{block}.ffn_up.weight", FFN, HIDDEN)
        add(f"{block}.ffn_down.weight", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name, size in (("train", 6000), ("valid", 3000)):
        rng.integers(60, VOCAB, size).astype(np.uint16).tofile(path / f"{name}.bin")
    pieces = {
        "fact": [11],
        "fact_is": [12],
        "fact_end": [13],
        "question": [14],
        "question_end": [15],
        "chain": [11],
        "chain_is": [16],
    }
    phrases = {"pieces": pieces, "names": list(range(20, 40)), "digits": list(range(10))}
    (path / "phrases.json").write_text(json.dumps(phrases))
    return path
