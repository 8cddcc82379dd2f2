"""A step from measured parts, by hand."""

import pytest

from benchmarks.ring.step import Attention, LayerTimes, attention_of, step_ms
from megatron_mtraining.simulator.memory import Model

LAYER = LayerTimes(
    [
        {"part": "output layer and loss", "tokens": 100, "ms": 5.0},
        {"part": "layer forward", "tokens": 100, "ms": 1.0},
        {"part": "layer forward", "tokens": 300, "ms": 3.0},
        {"part": "layer backward", "tokens": 100, "ms": 2.0},
        {"part": "layer backward", "tokens": 300, "ms": 6.0},
    ]
)


def test_a_step_recomputes_every_layer_once() -> None:
    model = Model(10, 64, 128, 4, 2, 16, 100)
    # Per layer 2 * (2 + 0.5 + 3) + (4 + 7); the output layer for 200 tokens.
    assert step_ms(model, LAYER, Attention(0.5, 3.0, 7.0), 200) == pytest.approx(10 * (11 + 11) + 10)
    with pytest.raises(ValueError, match="layer forward of 50 tokens: measured from 100 to 300"):
        step_ms(model, LAYER, Attention(0, 0, 0), 50)


def test_attention_of_real_and_of_played_rows() -> None:
    rows = [
        {"case": "a", "seq_len": 64, "pass": "index", "ms": 1.0},
        {"case": "a", "seq_len": 64, "pass": "forward", "ms": 2.0},
        {"case": "a", "seq_len": 64, "pass": "backward", "ms": 3.0},
        {"case": "b", "seq_len": 64, "pass": "forward", "simulated_ms": 4.0, "compute_ms": 3.0},
        {"case": "b", "seq_len": 64, "pass": "backward", "simulated_ms": 5.0, "compute_ms": 3.0},
    ]
    assert attention_of(rows, "a", 64, 9.0) == Attention(1.0, 2.0, 3.0)
    assert attention_of(rows, "b", 64, 9.0) == Attention(9.0, 4.0, 5.0)
    assert attention_of(rows, "a", 128) is None
