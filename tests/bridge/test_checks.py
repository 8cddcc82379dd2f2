"""What a container may not ask for."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_mtraining.bridge.checks import REFUSALS, refuse_container
from megatron_mtraining.integration import RefusedError

REFUSED = [
    ("model.attention_backend", "flash"),
    ("model.attention_backend", "mtrainng"),
    ("model.use_transformer_engine_full_layer_spec", True),
    ("model.cp_partition_mode", "contiguous"),
    ("dataset.enable_offline_packing", True),
    ("dataset.enable_in_batch_packing", True),
    ("dataset.skip_getting_attention_mask_from_dataset", False),
    ("dataset.reset_attention_mask", True),
    ("dist.eval_context_parallel_size", 4),
]


def container(path: str = "", value: Any = None, cp_size: int = 2) -> SimpleNamespace:
    sections = {
        "model": SimpleNamespace(context_parallel_size=cp_size),
        "dataset": SimpleNamespace(),
        "dist": SimpleNamespace(),
    }
    if path:
        section, name = path.split(".")
        setattr(sections[section], name, value)
    return SimpleNamespace(**sections)


@pytest.mark.parametrize(("path", "value"), REFUSED)
def test_refused_by_name_with_value_and_remedy(path: str, value: Any) -> None:
    with pytest.raises(RefusedError, match=rf"{path}={value}: not supported with MTraining attention.*; use "):
        refuse_container(container(path, value))


def test_every_refusal_is_tested() -> None:
    assert {item.path for item in REFUSALS} == {path for path, _ in REFUSED}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.attention_backend", "mtraining"),
        ("model.attention_backend", None),
        ("model.attention_backend", SimpleNamespace(name="auto")),
        ("model.cp_partition_mode", "zigzag"),
        ("dataset.skip_getting_attention_mask_from_dataset", True),
        ("dist.eval_context_parallel_size", 1),
        ("dist.eval_context_parallel_size", 2),
    ],
)
def test_taken(path: str, value: Any) -> None:
    refuse_container(container(path, value))


def test_packing_is_taken_on_one_rank() -> None:
    refuse_container(container("dataset.enable_offline_packing", True, cp_size=1))
