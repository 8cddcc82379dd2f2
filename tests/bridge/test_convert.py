"""`examples/nemo/convert.py`: its command line. The conversions themselves are in `test_hugging_face.py` and on a GPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "nemo" / "convert.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nemo_convert", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


@pytest.mark.bridge
@pytest.mark.parametrize("step", ["import", "export"])
def test_what_is_no_model_is_named(script: ModuleType, step: str, bridge: Any, tmp_path: Path) -> None:
    words = [str(tmp_path)] * (2 if step == "import" else 3)
    with pytest.raises(SystemExit, match="no config.json there"):
        script.main([step, *words])


@pytest.mark.bridge
def test_export_wants_a_checkpoint(script: ModuleType, model: Path, bridge: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no checkpoint there"):
        script.main(["export", str(model), str(tmp_path), str(tmp_path / "out")])
