from dataclasses import FrozenInstanceError, fields
from fractions import Fraction

import pytest

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.config import exact_share


def test_defaults_are_those_of_the_interface() -> None:
    config = MTrainingConfig()
    expected = {
        "top_p": 0.95, "vertical_top_p": None, "slash_top_p": None, "last_q": 64, "max_vertical": 4096, "max_slash": None,
        "local_blocks": 1, "sink_tokens": 0, "stripe_size": 64, "layout": "striped", "ring": "auto", "kernel": "auto",
        "deterministic": True,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.vertical_share == config.slash_share == Fraction(19, 20)


def test_every_field_has_help() -> None:
    assert all(item.metadata["help"] for item in fields(MTrainingConfig))


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.5, "(0, 1]"),
        ("top_p", None, "(0, 1]"),
        ("top_p", float("nan"), "(0, 1]"),
        ("slash_top_p", -0.1, "(0, 1]"),
        ("vertical_top_p", "a", "(0, 1]"),
        ("last_q", 0, "multiple of 64"),
        ("last_q", 100, "multiple of 64"),
        ("last_q", 2048, "1024"),
        ("last_q", 64.0, "multiple of 64"),
        ("probe_segments", 0, "from 1 to 64"),
        ("probe_segments", 65, "from 1 to 64"),
        ("max_vertical", -1, "from 0"),
        ("max_slash", 0, "from 1"),
        ("local_blocks", 0, "from 1"),
        ("sink_tokens", -1, "from 0"),
        ("stripe_size", 96, "multiple of 64"),
        ("layout", "zigzig", "striped, zigzag, contiguous"),
        ("ring", "round", "auto, flat, hierarchical"),
        ("kernel", "cuda", "auto, reference, sm80, sm90"),
        ("deterministic", 1, "True or False"),
        ("dense", "yes", "True or False"),
        ("vertical_backward", "drop", "save, gather"),
        ("max_compact_columns", 100, "multiple of 64"),
    ],
)
def test_a_bad_value_is_named_with_the_valid_ones(name: str, value: object, valid: str) -> None:
    with pytest.raises(ValueError) as error:
        MTrainingConfig(**{name: value})  # type: ignore[arg-type]
    message = str(error.value)
    assert name in message and repr(value) in message and valid in message and "\n" not in message


def test_only_top_p_has_segments() -> None:
    with pytest.raises(ValueError, match="probe_segments=2 with index_policy='moba': must be 1"):
        MTrainingConfig(index_policy="moba", probe_segments=2)


def test_config_is_frozen_and_hashable() -> None:
    config = MTrainingConfig()
    with pytest.raises(FrozenInstanceError):
        config.top_p = 0.5  # type: ignore[misc]
    assert {config: 1}[MTrainingConfig()] == 1


def test_shares_are_exact_fractions() -> None:
    assert exact_share(0.9) == Fraction(9, 10)
    assert exact_share(0.123457) == Fraction(123457, 10**6)
    assert exact_share(1) == exact_share(1.0) == 1
    assert exact_share(0.9999999) < 1
    assert exact_share(1e-9) > 0
