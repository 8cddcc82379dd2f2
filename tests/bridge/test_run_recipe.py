"""`examples/nemo/run_recipe.py`: its command line."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .conftest import example


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return example("run_recipe")


def test_options_and_overrides_may_be_mixed(script: ModuleType) -> None:
    args = script.parse(
        ["some_config", "train.train_iters=3", "--metrics", "m.jsonl", "mtraining.top_p=1", "--dry-run"]
    )
    assert (args.recipe, args.overrides) == ("some_config", ["train.train_iters=3", "mtraining.top_p=1"])
    assert (args.metrics, args.dry_run) == (Path("m.jsonl"), True)


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "name a recipe; --list shows them"), (["some_config", "top_p"], "top_p: an override is key=value")],
)
def test_mistakes_are_named(script: ModuleType, words: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        script.parse(words)
    assert message in capsys.readouterr().err


@pytest.mark.bridge
def test_recipes_are_found_and_listed(script: ModuleType, bridge: Any, capsys: Any) -> None:
    script.main(["--list"])
    assert "qwen25_3b_pretrain_32gpu_512k_config" in capsys.readouterr().out.split()
    with pytest.raises(SystemExit, match="qwen_config: no such recipe; valid: .*qwen25_3b_pretrain_32gpu_512k_config"):
        script.main(["qwen_config"])
    with pytest.raises(SystemExit, match="--peft-scheme dora: .* trains all weights"):
        script.main(["qwen25_3b_pretrain_1gpu_16k_config", "--peft-scheme", "dora"])
    with pytest.raises(SystemExit, match=r"mtraining\.top_q: no such option"):
        script.main(["qwen25_3b_pretrain_1gpu_16k_config", "mtraining.top_q=1"])
    with pytest.raises(SystemExit, match=r"error: .*model\.no_such") as stopped:
        script.main(["qwen25_3b_pretrain_1gpu_16k_config", "model.no_such=1"])
    assert "\n" not in str(stopped.value)
    script.main(["qwen25_3b_peft_8gpu_128k_config", "--peft-scheme", "dora", "train.train_iters=3", "--dry-run"])
    shown = capsys.readouterr().out
    assert "train_iters: 3" in shown
    assert "DoRA" in shown
    assert "# attention: top_p=0.9, layout_mode=auto" in shown.splitlines()


@pytest.mark.bridge
def test_a_dry_run_shows_the_recommended_setting(script: ModuleType, bridge: Any, capsys: Any) -> None:
    """That of docs/tuning.md for pretrained models, by overrides; layers from 0."""
    words = "top_p=0.95 probe_segments=8 max_compact_columns=32768 dense_layers=7,18".split()
    script.main(["qwen25_3b_pretrain_1gpu_16k_config", *(f"mtraining.{word}" for word in words), "--dry-run"])
    line = "top_p=0.95, probe_segments=8, max_compact_columns=32768, layout_mode=auto; layers 7,18 dense"
    assert f"# attention: {line}" in capsys.readouterr().out.splitlines()
