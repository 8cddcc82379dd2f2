"""`examples/nemo/convert.py`: its command line. The conversions themselves are in `test_hugging_face.py` and on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_mtraining.integration import RefusedError

from .conftest import example


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return example("convert")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    config = {"model_type": "qwen2", "max_position_embeddings": 1024, "rope_theta": 1e6}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path / "model"


def test_extend_makes_the_longer_config(script: ModuleType, model: Path, tmp_path: Path, capsys: Any) -> None:
    script.main(["extend", str(model), str(tmp_path / "long"), "--seq-length", "4096"])
    config = json.loads((tmp_path / "long" / "config.json").read_text())
    assert config["max_position_embeddings"] == 4096
    assert (config["rope_scaling"]["rope_type"], config["rope_scaling"]["factor"]) == ("yarn", 4.0)
    assert capsys.readouterr().out == f"wrote {tmp_path / 'long'}\n"


def test_extend_refuses_a_target_that_exists(script: ModuleType, model: Path) -> None:
    with pytest.raises(SystemExit, match="exists; give a folder to make"):
        script.main(["extend", str(model), str(model), "--seq-length", "4096"])


@pytest.mark.parametrize(
    ("config", "length", "message"),
    [
        ('{"max_position_embeddings": 1024}', "0", "seq_length 0: must be a number of tokens"),
        ("{", "2048", "config.json: no JSON"),
        ('{"model_type": "qwen2"}', "2048", "max_position_embeddings None: the config must name"),
    ],
)
def test_extend_names_what_it_cannot_do(
    script: ModuleType, model: Path, tmp_path: Path, config: str, length: str, message: str
) -> None:
    (model / "config.json").write_text(config)
    with pytest.raises(SystemExit, match=message) as stopped:
        script.main(["extend", str(model), str(tmp_path / "long"), "--seq-length", length])
    assert "\n" not in str(stopped.value)
    assert not (tmp_path / "long").exists()


def test_extend_names_a_folder_that_cannot_be_made(script: ModuleType, model: Path) -> None:
    with pytest.raises(SystemExit, match="config.json/long: cannot make the folder: "):
        script.main(["extend", str(model), str(model / "config.json" / "long"), "--seq-length", "4096"])


@pytest.mark.bridge
@pytest.mark.parametrize("step", ["import", "export"])
def test_what_is_no_model_is_named(script: ModuleType, step: str, bridge: Any, tmp_path: Path) -> None:
    words = [str(tmp_path)] * (2 if step == "import" else 3)
    with pytest.raises(SystemExit, match="no config.json there"):
        script.main([step, *words])


@pytest.fixture
def known(model: Path) -> Path:
    """The same, as an architecture that Bridge converts."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2ForCausalLM"]}))
    return model


@pytest.mark.bridge
def test_a_model_that_bridge_does_not_know_is_one_line(
    script: ModuleType, model: Path, bridge: Any, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="model: Megatron-Bridge refuses the model: .*architecture") as stopped:
        script.main(["import", str(model), str(tmp_path / "out")])
    assert "\n" not in str(stopped.value)


@pytest.mark.bridge
def test_nothing_is_overwritten(script: ModuleType, known: Path, bridge: Any, tmp_path: Path) -> None:
    """Above all not the extended model, whose weights are links to the original ones."""
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "iter_0000005").mkdir(parents=True)
    with pytest.raises(SystemExit, match="model: exists; give a folder to make"):
        script.main(["export", str(known), str(checkpoints), str(known)])
    with pytest.raises(SystemExit, match="checkpoints: exists; give a folder to make"):
        script.main(["import", str(known), str(checkpoints)])


def test_the_newest_checkpoint_is_the_newest_complete_one(tmp_path: Path) -> None:
    """A run that was ended while it saved leaves a folder behind, which Megatron has not noted."""
    from megatron_mtraining.bridge.conversion import _newest

    for number in (50, 100):
        (tmp_path / f"iter_{number:07d}").mkdir()
    assert _newest(tmp_path).name == "iter_0000100"
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("50")
    assert _newest(tmp_path).name == "iter_0000050"
    tracker.write_text("75")
    with pytest.raises(RefusedError, match=r"names iter_0000075, which is not there; .*iter_0000050 to iter_0000100"):
        _newest(tmp_path)


@pytest.mark.bridge
def test_export_wants_a_checkpoint(script: ModuleType, known: Path, bridge: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no checkpoint there"):
        script.main(["export", str(known), str(tmp_path), str(tmp_path / "out")])
