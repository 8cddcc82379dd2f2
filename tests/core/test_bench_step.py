"""A step from measured parts, by hand."""

import pytest

from benchmarks.ring.heads import pair_rows
from benchmarks.ring.simulated import dense_rates, predict, simulated_attention
from benchmarks.ring.step import Attention, LayerTimes, attention_of, step_ms
from megatron_mtraining import VerticalSlashIndex
from megatron_mtraining.simulator import H200_LINKS, H200_RATES, Choice, Cluster, IndexProfile, Predictor, Shape
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


def test_rates_of_a_dense_ring_give_its_times_back() -> None:
    shape = {"case": "d", "seq_len": 65536, "heads": 16, "head_dim": 128, "cp_size": 2}
    rows = [{**shape, "pass": "forward", "ms": 20.0}, {**shape, "pass": "backward", "ms": 50.0}]
    rates = dense_rates(rows, "d", 65536)
    assert rates.forward == pytest.approx(4 * 128 * 16 * 65536**2 / 2 / 2 / 20e-3) and rates.forward == rates.backward
    everything = IndexProfile.dense(65536, 16)
    found = predict(Predictor(Shape(65536), everything, Cluster(2, 2, H200_LINKS, rates)), Choice("zigzag", "flat"))
    assert (found.index, found.forward, found.backward) == (0, pytest.approx(20, rel=0.01), pytest.approx(50, rel=0.01))


def test_a_flat_ring_over_nodes_is_simulated_chunk_by_chunk_and_others_as_the_product_launches() -> None:
    def times(size: int, node: int, choice: Choice) -> tuple[Attention, list[float]]:
        found = Predictor(Shape(262144), IndexProfile.dense(262144, 16), Cluster(size, node, H200_LINKS, H200_RATES))
        by_chunks = [found.predict(Choice(choice.layout, choice.ring, chunks_per_launch=chunks)) for chunks in (1, 4)]
        return predict(found, choice), [line.forward.seconds * 1e3 for line in by_chunks]

    flat, (one, several) = times(16, 8, Choice(ring="flat"))
    assert flat.forward == one == several
    inside, (one, several) = times(8, 8, Choice(ring="flat"))
    assert inside.forward == several < one  # 32,768 local tokens: four chunks a launch


def test_simulated_systems_are_those_of_the_figure() -> None:
    found = dict(simulated_attention(Shape(65536), (8, 16), H200_RATES))
    assert {name for name, size in found if size == 8} == {"ours", "zigzag, flat ring", "dense, zigzag"}
    assert {name for name, size in found if size == 16} == {
        "ours", "striped, flat ring", "zigzag, flat ring", "dense, zigzag",
    }  # fmt: skip
    assert found["ours", 16].forward < found["striped, flat ring", 16].forward
    assert found["ours", 8].forward < found["dense, zigzag", 8].forward


def test_imbalance_of_heads_in_pairs() -> None:
    """Two heads with one distance and two with two, of two blocks: 2 and 3 blocks of pairs, by hand."""
    index = VerticalSlashIndex.from_lines([[[0], [0], [0, 1], [0, 1]]], [[[]] * 4], seq_len=128)
    rows = pair_rows(index, (2, 3, 4), "heads")
    assert [row["tp_size"] for row in rows] == [2, 4]
    few, many = (float(index.pairs()[0][head]) for head in (0, 2))
    assert few < many and rows[0]["pairs_total"] == round(2 * many / (few + many), 3)
