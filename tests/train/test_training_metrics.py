"""One line of metrics from the summaries of all ranks, and what it is told to."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_mtraining import Documents, Layout, MTrainingConfig, VerticalSlashIndex, mtraining_attention
from megatron_mtraining.block_lists import BlockListIndex
from megatron_mtraining.integration.training_metrics import SCALARS, TrainingMetrics, format_line, merge_ranks
from megatron_mtraining.metrics import Recorder, imbalance_step, imbalance_worker, work_table


def summary(layers: dict[int, float], ring: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "ring": ring,
        "place": ("striped", 2, 2),
        "density_by_layer": layers,
        "recall_by_layer": dict.fromkeys(layers, 0.9),
        "recall_lowest": 0.8 if layers else None,
        "work": ([0.0, 0.0], 0.0, 0.0),
        "seconds": {"index": 1.0, "forward": 1.0, "backward": 2.0},
        "useful_flops": 4e12,
        "dense_flops": 40e12,
    } | changes


def test_ranks_of_a_layer_are_averaged() -> None:
    """Two tensor-parallel ranks of two pipeline stages; each is a context-parallel ring of its own here."""
    ranks = [
        summary({1: 0.2, 2: 0.4}, 0, recall_by_layer={1: 0.8, 2: 1.0}, recall_lowest=0.7),
        summary({1: 0.4, 2: 0.4}, 1, recall_by_layer={1: 0.9, 2: 1.0}),
        summary({3: 0.5}, 2, seconds={"index": 3.0, "forward": 1.0, "backward": 2.0}),
        summary({3: 0.7}, 3, useful_flops=8e12),
    ]
    line = merge_ranks(ranks, seconds=20.0)
    assert line["density_by_layer"] == pytest.approx({"1": 0.3, "2": 0.4, "3": 0.6})
    assert line["density"] == pytest.approx(1.3 / 3)
    assert line["recall_by_layer"] == pytest.approx({"1": 0.85, "2": 1.0, "3": 0.9})
    assert (line["recall"], line["recall_lowest"]) == pytest.approx((2.75 / 3, 0.7))
    assert line["index_share"] == pytest.approx(1.5 / 20)
    assert line["index_share_of_attention"] == pytest.approx(6 / 18)
    assert (line["useful_tflops"], line["dense_equivalent_tflops"]) == pytest.approx((20 / 18, 160 / 18))
    assert (line["layout"], line["ring"]) == ("striped", "flat ring of 2")


def test_ranks_of_a_ring_share_the_counting_of_the_work() -> None:
    """Layers add up within a ring, whoever counted them; rings are averaged."""
    ranks = [
        summary({1: 0.5}, 0, work=([3.0, 1.0], 4.0, 2.0)),
        summary({1: 0.5}, 0, work=([1.0, 3.0], 6.0, 2.0)),
        summary({1: 0.5}, 2, work=([3.0, 1.0], 2.0, 1.0)),
        summary({1: 0.5}, 2, work=([0.0, 0.0], 0.0, 0.0)),
    ]
    line = merge_ranks(ranks, seconds=1.0)
    assert line["imbalance_worker"] == pytest.approx((1.0 + 1.5) / 2)
    assert line["imbalance_step"] == pytest.approx((2.5 + 2.0) / 2)


def test_ranks_without_attention_do_not_count() -> None:
    line = merge_ranks([summary({1: 0.5}, 0, seconds={"index": 2.0}), summary({}, 1, seconds={})], seconds=4.0)
    assert (line["index_share"], line["density"], line["useful_tflops"]) == (0.5, 0.5, 2.0)


def test_what_is_not_known_is_null() -> None:
    line = merge_ranks([summary({}, seconds={})], seconds=1.0)
    assert all(line[name] is None for name in (*SCALARS[1:], "layout", "ring"))
    assert "density: - |" in format_line(line | {"step": 1, "loss": None, "tokens_per_s": 0.0})


def one_rank(folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)


def test_a_recorded_step(tmp_path: Path) -> None:
    """Density, balance and FLOPs of real calls; nothing of calls while the recorder is not armed."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 512, heads, 64, requires_grad=True) for heads in (4, 2, 2))
    documents = Documents.from_cu_seqlens([0, 200, 456], 512, [0, 256, 512])
    recorder = Recorder()
    with recorder.active():
        for armed in (True, False):
            recorder.armed = armed
            out, aux = mtraining_attention(
                q, k, v, config=MTrainingConfig(top_p=0.6), documents=documents, return_aux=True
            )
            out.sum().backward()
    recorder.record(3, aux.index, aux.layout, aux.inner_size)
    found = recorder.summary()
    assert set(found["seconds"]) == {"index", "forward", "backward"}
    assert found["density_by_layer"] == {3: float(aux.index.density())}
    pairs = 2 * 4 * (200**2 + 256**2) / 2
    assert found["dense_flops"] == pytest.approx(14 * 64 * pairs)
    assert found["useful_flops"] == pytest.approx(14 * 64 * float(aux.index.pairs().sum()))
    assert not recorder.indices and recorder.summary()["place"] is None


def lines(seed: int) -> VerticalSlashIndex:
    generator = torch.Generator().manual_seed(seed)
    slash = [[torch.randperm(8, generator=generator)[:3].tolist() for _ in range(2)]]
    columns = [[torch.randperm(512, generator=generator)[:20].tolist() for _ in range(2)]]
    return VerticalSlashIndex.from_lines(slash, columns, seq_len=512)


def test_the_work_of_layers_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with three layers: together the work of all of them, as one rank alone would count it."""
    layout, group = Layout.striped(512, 2), object()
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda *_: [4, 5])
    summaries = []
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda *_, rank=rank: rank)
        recorder = Recorder()
        for layer in (1, 2, 3):
            recorder.record(layer, lines(layer), layout, 2, group)
        summaries.append(recorder.summary())
    line = merge_ranks(summaries, 1.0)
    work = torch.cat([work_table(lines(layer), layout, 2) for layer in (1, 2, 3)], 1)
    assert line["imbalance_worker"] == pytest.approx(imbalance_worker(work))
    assert line["imbalance_step"] == pytest.approx(imbalance_step(work))
    assert summaries[0]["ring"] == 4 and sum(summaries[0]["work"][0]) > 0 < sum(summaries[1]["work"][0])


def test_row_lists_know_the_balance_of_the_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, group = Layout.zigzag(512, 2), object()
    whole = BlockListIndex.from_lines(lines(0))
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda *_: [0, 1])
    summaries, pairs = [], []
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda *_, rank=rank: rank)
        recorder, part = Recorder(), whole.local(layout, rank)
        recorder.record(1, part, layout, 2, group)
        summaries.append(recorder.summary())
        pairs.append(int(part.pairs().sum()))
    line = merge_ranks(summaries, 1.0)
    assert line["imbalance_worker"] == pytest.approx(2 * max(pairs) / sum(pairs))
    assert line["imbalance_step"] is None
    assert line["density"] == pytest.approx(float(whole.density()))


class Logger:
    """A writer of TensorBoard, and one of Weights & Biases."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}
        self.words: dict[str, str] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name] = value

    def add_text(self, name: str, text: str, step: int) -> None:
        assert name not in self.words
        self.words[name] = text

    def log(self, values: dict[str, Any], step: int) -> None:
        self.scalars |= {name: value for name, value in values.items() if isinstance(value, float)}
        self.words |= {name: value for name, value in values.items() if isinstance(value, str)}


def test_an_interval_is_a_line(tmp_path: Path) -> None:
    """The loss is the mean of the interval's steps; the next interval starts afresh."""
    one_rank(tmp_path)
    try:
        metrics = TrainingMetrics(tmp_path / "m.jsonl", Recorder())
        tensorboard, wandb = Logger(), Logger()
        for loss in (4.0, 2.0):
            metrics.note_step({"lm loss": torch.tensor([loss])})
        metrics.recorder.record(1, lines(1), Layout.contiguous(512, 1), 1)
        for step in (2, 3):
            line = metrics.gather(step, tokens_per_step=1000)
            assert line is not None
            metrics.publish(line, tensorboard, wandb)
            metrics.note_step({"lm loss": torch.tensor(1.0)})
            metrics.recorder.record(1, lines(2), Layout.contiguous(512, 1), 1)
    finally:
        dist.destroy_process_group()
    first, second = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert (first["step"], first["loss"], second["step"], second["loss"]) == (2, 3.0, 3, 1.0)
    assert first["tokens_per_s"] > 0
    assert "step 2 | loss 3.0000" in format_line(first)
    for logger in (tensorboard, wandb):
        assert logger.scalars["mtraining/density_layer/1"] == second["density_by_layer"]["1"]
        assert logger.scalars["mtraining/tokens_per_s"] == second["tokens_per_s"]
        assert logger.words == {"mtraining/layout": "contiguous", "mtraining/ring": "one rank"}
