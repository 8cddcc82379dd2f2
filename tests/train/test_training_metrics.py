"""One line of metrics from the summaries of all ranks."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining.integration.training_metrics import TrainingMetrics, format_line, merge_ranks
from megatron_mtraining.metrics import Recorder


def summary(layers: dict[int, float], worker: float = 1.0, step: float = 1.0, index: float = 0.0) -> dict[str, object]:
    return {
        "density_by_layer": layers,
        "imbalance_worker": worker,
        "imbalance_step": step,
        "seconds": {"index": index, "forward": 1.0},
    }


def test_ranks_of_a_layer_are_averaged() -> None:
    """Two tensor-parallel ranks of two pipeline stages."""
    ranks = [
        summary({1: 0.2, 2: 0.4}, worker=1.2, step=1.4, index=1.0),
        summary({1: 0.4, 2: 0.4}, worker=1.0, step=1.2, index=3.0),
        summary({3: 0.5}, worker=1.1, step=1.0, index=2.0),
        summary({3: 0.7}, worker=1.1, step=1.2, index=2.0),
    ]
    line = merge_ranks(ranks, seconds=20.0)
    assert line["density_by_layer"] == pytest.approx({"1": 0.3, "2": 0.4, "3": 0.6})
    assert line["density"] == pytest.approx(1.3 / 3)
    assert line["imbalance_worker"] == pytest.approx(1.1)
    assert line["imbalance_step"] == pytest.approx(1.2)
    assert line["index_share"] == pytest.approx(0.1)


def test_ranks_without_attention_do_not_count() -> None:
    line = merge_ranks([summary({1: 0.5}, worker=1.5, index=2.0), summary({}, worker=1.0)], seconds=4.0)
    assert (line["imbalance_worker"], line["index_share"], line["density"]) == (1.5, 0.5, 0.5)


def test_no_attention_is_not_a_number() -> None:
    assert math.isnan(merge_ranks([summary({})], seconds=1.0)["density"])


def test_an_interval_is_a_line(tmp_path: Path) -> None:
    """The loss is the mean of the interval's steps; the next interval starts afresh."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        metrics = TrainingMetrics(tmp_path / "m.jsonl", Recorder())
        scalars: dict[str, float] = {}

        class Writer:
            def add_scalar(self, name: str, value: float, step: int) -> None:
                scalars[name] = value

        for loss in (4.0, 2.0):
            metrics.note_step({"lm loss": torch.tensor([loss])})
        metrics.write(2, tokens_per_step=1000, writer=Writer())
        metrics.note_step({"lm loss": torch.tensor(1.0)})
        metrics.write(3, tokens_per_step=1000, writer=None)
    finally:
        dist.destroy_process_group()
    first, second = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert (first["step"], first["loss"], second["step"], second["loss"]) == (2, 3.0, 3, 1.0)
    assert first["tokens_per_s"] > 0
    assert "mtraining/tokens_per_s" in scalars
    assert "step 2 | loss 3.0000" in format_line(first)
