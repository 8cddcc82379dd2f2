"""Extending a Hugging Face config."""

import json
from pathlib import Path

import pytest

from megatron_mtraining.bridge.rope import extend_hf_config, extended_config
from megatron_mtraining.integration import RefusedError

PLAIN = {"max_position_embeddings": 32768, "rope_theta": 1e6}


def test_a_plain_embedding_becomes_yarn_with_everything_written_out() -> None:
    config = extended_config(PLAIN, 524288)
    assert config["max_position_embeddings"] == 524288
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 32768,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
    }
    assert PLAIN == {"max_position_embeddings": 32768, "rope_theta": 1e6}


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_the_factor_of_a_scaled_embedding_grows(kind: str) -> None:
    config = {**PLAIN, "rope_scaling": {"type": kind, "factor": 8.0, "original_max_position_embeddings": 8192}}
    extended = extended_config(config, 131072)["rope_scaling"]
    assert (extended["factor"], extended["original_max_position_embeddings"]) == (32.0, 8192)
    assert config["rope_scaling"]["factor"] == 8.0


def test_the_entry_of_transformers_5_is_the_one_that_changes() -> None:
    plain = {"max_position_embeddings": 1024, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    parameters = extended_config(plain, 4096)["rope_parameters"]
    assert (parameters["rope_type"], parameters["factor"], parameters["rope_theta"]) == ("yarn", 4.0, 1e6)
    llama = {
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3", "factor": 8.0},
    }
    assert extended_config(llama, 4096)["rope_parameters"]["factor"] == 32.0
    assert "rope_scaling" not in extended_config(llama, 4096)


def test_a_shorter_length_changes_nothing() -> None:
    assert extended_config(PLAIN, 4096) == PLAIN


def test_other_scalings_are_refused() -> None:
    with pytest.raises(RefusedError, match="rope_scaling dynamic: cannot be extended"):
        extended_config({**PLAIN, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 65536)
    with pytest.raises(RefusedError, match="rope_parameters by layer: cannot be extended"):
        extended_config({**PLAIN, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, 65536)


def test_a_folder_is_extended_by_links(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(PLAIN))
    (source / "model.safetensors").write_bytes(b"weights")
    target = extend_hf_config(source, tmp_path / "long", 65536)
    assert json.loads((target / "config.json").read_text())["rope_scaling"]["factor"] == 2.0
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((source / "config.json").read_text()) == PLAIN
    with pytest.raises(RefusedError, match="exists"):
        extend_hf_config(source, target, 65536)
    with pytest.raises(RefusedError, match=r"no config\.json"):
        extend_hf_config(tmp_path, tmp_path / "other", 65536)
