"""Metrics in Megatron's own log line, TensorBoard and Weights & Biases, and ring profiles, from a real run of 4 processes."""

from __future__ import annotations

import json
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_mtraining.index_dump import load_index
from megatron_mtraining.integration import training_log
from megatron_mtraining.integration.errors import RefusedError
from megatron_mtraining.integration.training_log import TrainingLog
from megatron_mtraining.integration.training_metrics import SCALARS, TrainingMetrics
from megatron_mtraining.metrics import Recorder
from megatron_mtraining.report import newest_passes, page, read_lines
from megatron_mtraining.ring_profile import PassTimes

from .test_training import HIERARCHICAL, ROPE, run_scenarios

WANDB = '''
"""Stands in for the wandb module, which Megatron uses as its writer."""

import json
import os

class config:
    update = staticmethod(lambda *_, **__: None)

def init(**settings):
    global _path
    _path = os.path.join(settings["dir"], "logged.jsonl")

def finish(**_):
    pass

def log(values, step):
    with open(_path, "a") as file:
        file.write(json.dumps([step, {name: v if isinstance(v, str) else float(v) for name, v in values.items()}]) + "\\n")
'''

RUN = (
    f"{ROPE} --mtraining-top-p 0.7 --global-batch-size 2 --train-iters 4 --log-interval 2 {HIERARCHICAL} "
    "--mtraining-metrics FOLDER/run/metrics.jsonl --mtraining-profile-steps 3 --tensorboard-dir FOLDER/tensorboard "
    "--wandb-project p --wandb-exp-name e --wandb-save-dir FOLDER/wandb "
    "--mtraining-dump-index FOLDER/dump --mtraining-dump-steps 4"
)
SILENT = f"{ROPE} {HIERARCHICAL} --mtraining-log none --tensorboard-dir FOLDER/silent"
LOGGED = [1, 2, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logged")
    (folder / "modules").mkdir()
    (folder / "modules" / "wandb.py").write_text(WANDB)
    run_scenarios({"logged": RUN, "silent": SILENT}, folder, [str(folder / "modules")])
    return folder


@pytest.fixture(scope="module")
def lines(folder):
    return read_lines(folder / "run" / "metrics.jsonl")


def test_the_lines_are_those_of_megatrons_log(folder, lines):
    """The first step and every --log-interval; the numbers are on Megatron's own line, and on no other."""
    assert [line["step"] for line in lines] == LOGGED
    log = (folder / "log").read_text()
    own = [line for line in log.splitlines() if re.search(r"iteration +\d+/ +4 \|", line)]
    assert len(own) == len(LOGGED)
    for text, line in zip(own, lines, strict=True):
        layers = line["density_by_layer"].values()
        assert f"| density: {line['density']:.4f} (layers {min(layers):.4f} to {max(layers):.4f}) |" in text
        assert f"| recall: {line['recall']:.4f} (lowest {line['recall_lowest']:.4f}) |" in text
        assert f"| imbalance worker: {line['imbalance_worker']:.3f} step: {line['imbalance_step']:.3f} |" in text
        assert f"| index: {100 * line['index_share_of_attention']:.1f} % of attention |" in text
        # Not `endswith`: another rank's line may follow before this one's end of line is written.
        assert "dense-equivalent | striped, hierarchical ring of 2 x 2 |" in text
    assert log.count("density: ") == len(LOGGED)


def test_the_numbers_are_those_of_the_index(lines, folder):
    """Of the last step, whose indices were dumped: the first of its two micro-batches, so about those of the second."""
    last = lines[-1]
    indices = [load_index(path)[0] for path in sorted((folder / "dump").iterdir())]
    assert list(last["density_by_layer"]) == ["0", "1"]
    for index, density in zip(indices, last["density_by_layer"].values(), strict=True):
        assert density == pytest.approx(float(index.density()), rel=0.1)
    layout = torch.load(folder / "logged.0.pt", weights_only=False)
    assert len(layout["indices"]) == 4 * 2 * 2  # steps, micro-batches, layers: recording calls attention no more often
    assert 0.7 <= last["recall"] < 1 and last["recall_lowest"] <= last["recall"]
    assert set(last["recall_by_layer"]) == {"0", "1"}
    assert 1 <= last["imbalance_worker"] <= last["imbalance_step"] < 2
    assert last["dense_equivalent_tflops"] * last["density"] == pytest.approx(last["useful_tflops"])
    assert 0 < last["index_share_of_attention"] < 1


def test_tensorboard_has_the_lines(folder, lines):
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    for name in SCALARS:
        scalars = events.Scalars(f"mtraining/{name}")
        assert [event.step for event in scalars] == LOGGED
        assert [event.value for event in scalars] == pytest.approx([line[name] for line in lines], rel=1e-6)
    for kind in ("density", "recall"):
        for layer in ("0", "1"):
            scalars = events.Scalars(f"mtraining/{kind}_layer/{layer}")
            expected = [line[f"{kind}_by_layer"][layer] for line in lines]
            assert [event.value for event in scalars] == pytest.approx(expected, rel=1e-6)
    text = events.Tensors("mtraining/ring/text_summary")
    assert len(text) == 1 and text[0].tensor_proto.string_val[0] == b"hierarchical ring of 2 x 2"


def test_wandb_has_the_lines(folder, lines):
    logged = [
        (step, {name: value for name, value in values.items() if name.startswith("mtraining/")})
        for step, values in map(json.loads, (folder / "wandb" / "logged.jsonl").read_text().splitlines())
    ]
    ours = [(step, values) for step, values in logged if values]
    assert [step for step, _ in ours] == LOGGED
    for (_, values), line in zip(ours, lines, strict=True):
        assert all(values[f"mtraining/{name}"] == line[name] for name in SCALARS)
        assert values["mtraining/recall_layer/1"] == line["recall_by_layer"]["1"]
    assert ours[0][1]["mtraining/layout"] == "striped" and "mtraining/layout" not in ours[1][1]


def test_the_profile_of_a_step(folder):
    """Every pass of the step, on every rank: two layers, two micro-batches; transfers on all four channels."""
    found = read_lines(folder / "run" / "ring.jsonl")
    assert {line["step"] for line in found} == {3}
    keys = {(line["cp_rank"], line["phase"], line["call"]) for line in found}
    assert keys == {(rank, phase, call) for rank in range(4) for phase in ("forward", "backward") for call in range(4)}
    assert len(found) == len(keys)
    for passes in newest_passes(found).values():
        assert [times.cp_rank for times in passes] == [0, 1, 2, 3]
        assert all(len(times.launches) > 1 and times.transfers and times.compute_ms > 0 for times in passes)
    channels = {transfer.channel for line in found for transfer in PassTimes.from_json(line).transfers}
    assert channels == {"inner", "outer", "inner_grad", "outer_grad"}
    text = page(folder / "run")
    assert "Ring, forward" in text and "Ring, backward" in text


def test_nothing_is_logged_where_it_is_switched_off(folder):
    events = EventAccumulator(str(folder / "silent")).Reload()
    assert not [tag for tag in events.Tags()["scalars"] if tag.startswith("mtraining/")]


def test_steps_that_are_not_logged_record_nothing(parse):
    """So nothing of them can wait for the device: the recorder is armed in logged steps alone, and not in evaluation."""
    args = parse("--attention-backend", "mtraining", "--log-interval", "3", validate=False)
    from megatron.training import global_vars

    armed = {}
    log = TrainingLog(TrainingMetrics(None, Recorder(armed=False)), True, None)
    global_vars.set_args(args)
    try:
        args.curr_iteration = 0
        log.train(lambda: None)
        for step in range(1, 8):
            args.curr_iteration = step - 1
            log.train_step(lambda step=step: armed.update({step: log.metrics.recorder.armed}))
            log.metrics.recorder.armed = False
    finally:
        global_vars.unset_global_variables()
    assert [step for step, on in armed.items() if on] == [1, 3, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mtraining-profile-steps", "3"], r"--mtraining-profile-steps 3: .*give --mtraining-metrics FILE"),
        (
            ["--mtraining-profile-steps", "0", "--mtraining-metrics", "FOLDER/m"],
            r"--mtraining-profile-steps 0: must be numbers .* from 1 up",
        ),
        (["--mtraining-metrics", "FOLDER/file/m"], r"--mtraining-metrics FOLDER/file/m: cannot write it"),
    ],
)
def test_bad_options_are_refused(parse, tmp_path, options, message):
    (tmp_path / "file").write_text("")
    words = [word.replace("FOLDER", str(tmp_path)) for word in options]
    with pytest.raises(RefusedError, match=message.replace("FOLDER", re.escape(str(tmp_path)))):
        parse("--attention-backend", "mtraining", *words)


def test_a_version_that_prints_otherwise_gets_a_line_of_its_own(capsys):
    line = {
        **dict.fromkeys(SCALARS), "step": 5, "loss": 1.0, "tokens_per_s": 2.0, "density": 0.25,
        "density_by_layer": {"1": 0.25}, "recall_by_layer": {}, "layout": "striped", "ring": "one rank",
    }  # fmt: skip
    with training_log._LogLine(line):
        pass
    assert "> megatron_mtraining: step 5 | loss 1.0000 | 2 tokens/s | density: 0.2500" in capsys.readouterr().out
