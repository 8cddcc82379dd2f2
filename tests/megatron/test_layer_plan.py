"""Selection by layer and by step, from the options to the config of a call."""

from __future__ import annotations

import shlex

import pytest
import torch

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.index_dump import load_index, main, save_index
from megatron_mtraining.integration import RefusedError, runtime
from megatron_mtraining.integration.layer_plan import LayerPlan, parse_numbers

from ..core.helpers import random_index

BASE = MTrainingConfig(top_p=0.9, max_slash=100)
MTRAINING = ("--attention-backend", "mtraining")


def parsed_plan(parse, options):
    parse(*MTRAINING, *options.split())
    return runtime.current().plan


def test_a_plan_that_says_nothing_changes_nothing(parse):
    plan = parsed_plan(parse, "")
    assert plan == LayerPlan()
    assert plan.config_for(BASE, 0, 0) is BASE
    assert plan.describe() == ""


def test_dense_layers_and_steps(parse):
    plan = parsed_plan(parse, "--num-layers 4 --mtraining-dense-layers 0,2-3 --mtraining-dense-steps 5")
    assert [plan.config_for(BASE, layer, 5).dense for layer in range(4)] == [True, False, True, True]
    assert [plan.config_for(BASE, 1, step).dense for step in (0, 4, 5, 6)] == [True, True, False, False]
    assert plan.config_for(BASE, 1, 5) is BASE
    assert plan.describe() == "layers 0,2-3 dense; all layers dense in the first 5 steps"


def test_top_p_by_layer(parse):
    plan = parsed_plan(parse, "--num-layers 4 --mtraining-layer-top-p 0:0.99,2-3:0.5")
    assert [plan.config_for(BASE, layer, 0).top_p for layer in range(4)] == [0.99, 0.9, 0.5, 0.5]
    assert plan.config_for(BASE, 2, 0).max_slash == 100
    assert plan.config_for(BASE, 2, 0) is plan.config_for(BASE, 3, 7)


def test_a_schedule_depends_on_the_number_of_steps_alone(parse):
    plan = parsed_plan(parse, "--mtraining-top-p-schedule 1:0.9:10 --mtraining-layer-top-p 1:0.7")
    assert [plan.config_for(BASE, 0, step).top_p for step in (0, 1, 5, 9, 10, 1000)] == [1, 0.99, 0.95, 0.91, 0.9, 0.9]
    assert plan.config_for(BASE, 1, 0).top_p == 0.7
    slow = LayerPlan(top_p_schedule=(1.0, 0.5, 10**6))
    assert len({slow.config_for(BASE, 0, step).top_p for step in range(0, 10**6, 97)}) == 501


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--mtraining-dense-layers 0-2", "--mtraining-dense-layers 0-2: must be numbers and ranges .*from 0 to 1"),
        ("--mtraining-dense-layers 1-0", "--mtraining-dense-layers 1-0: must be"),
        ("--mtraining-dense-layers first", "--mtraining-dense-layers first: must be"),
        ("--mtraining-dense-layers ''", "--mtraining-dense-layers : must be numbers and ranges"),
        ("--mtraining-layer-top-p ''", "--mtraining-layer-top-p : must be LAYERS:TOP_P pairs"),
        ("--mtraining-top-p-schedule ''", "--mtraining-top-p-schedule : must be FIRST:LAST:STEPS"),
        ("--mtraining-top-p-schedule 1:0.9:²", "must be FIRST:LAST:STEPS"),
        ("--mtraining-dump-index ''", "--mtraining-dump-index '': must name a folder"),
        ("--mtraining-dump-index /tmp --mtraining-dump-steps 1-99999999", "--mtraining-dump-steps 1-99999999: must be"),
        (
            "--hybrid-layer-pattern *-*-/*- --spec a b --mtraining-dense-layers 1,3",
            r"--mtraining-dense-layers 1,3: none of these layers of .*-pattern \*-\*-/\*- has attention; 0,2,4 have",
        ),
        (
            "--hybrid-layer-pattern *-*- --spec a b --mtraining-layer-top-p 1:0.9",
            "--mtraining-layer-top-p 1:0.9: none of these layers",
        ),
        ("--mtraining-dense-steps -1", "--mtraining-dense-steps -1: must be a number of steps"),
        ("--mtraining-layer-top-p 0.9", "--mtraining-layer-top-p 0.9: must be LAYERS:TOP_P pairs"),
        (
            "--mtraining-layer-top-p 0:1.5",
            r"--mtraining-layer-top-p 0:1.5: a top-p must be a number in \(0, 1\], not '1.5'",
        ),
        ("--mtraining-layer-top-p 0:x", "not 'x'"),
        ("--mtraining-layer-top-p 0-1:0.9,1:0.8", "layer 1 is named twice"),
        ("--mtraining-layer-top-p 7:0.9", "--mtraining-layer-top-p 7: must be .*from 0 to 1"),
        ("--mtraining-top-p-schedule 1:0.9", "--mtraining-top-p-schedule 1:0.9: must be FIRST:LAST:STEPS"),
        ("--mtraining-top-p-schedule 1:0.9:0", "must be FIRST:LAST:STEPS"),
        ("--mtraining-top-p-schedule 1:0:5", r"a top-p must be a number in \(0, 1\], not '0'"),
        ("--mtraining-dense-layers 1 --mtraining-layer-top-p 1:0.9", "layer 1 also has --mtraining-layer-top-p"),
        ("--mtraining-dense --mtraining-dense-steps 3", "--mtraining-dense-steps: --mtraining-dense makes every layer"),
        (
            "--mtraining-slash-top-p 0.8 --mtraining-top-p-schedule 1:0.9:5",
            "--mtraining-slash-top-p 0.8 would not follow",
        ),
        (
            "--mtraining-index-policy moba --mtraining-layer-top-p 0:0.9",
            "--mtraining-layer-top-p: --mtraining-index-policy moba has no top-p",
        ),
        (
            "--mtraining-index-policy fixed --mtraining-top-p-schedule 1:0.95:5",
            "--mtraining-top-p-schedule: --mtraining-index-policy fixed has no top-p",
        ),
        ("--mtraining-top-p 0.8 --mtraining-top-p-schedule 1:0.9:5", "ends at 0.9, --mtraining-top-p is 0.8"),
        ("--mtraining-guard-recall 1.5", r"--mtraining-guard-recall 1.5: must be a number in \(0, 1\]"),
        ("--mtraining-guard-density 0", "--mtraining-guard-density 0.0: must be a positive number"),
        ("--mtraining-guard-action stop", "--mtraining-guard-action stop: needs a bound"),
        ("--mtraining-guard-recall 0.9 --mtraining-dense", "--mtraining-dense: there is no index for the guard"),
        (
            "--mtraining-guard-recall 0.9 --mtraining-index-policy moba",
            "--mtraining-guard-recall: .*moba chooses row by row",
        ),
        (
            "--mtraining-dump-index /tmp --mtraining-index-policy moba",
            "--mtraining-dump-index: .*moba chooses row by row",
        ),
        ("--mtraining-dump-steps 3", "need a folder: give --mtraining-dump-index DIR"),
        ("--mtraining-dump-index /proc/none --mtraining-dump-steps 0", "--mtraining-dump-steps 0: must be .*from 1 up"),
        ("--mtraining-dump-index /proc/none", "--mtraining-dump-index /proc/none: cannot make the folder"),
        ("--mtraining-dump-index /tmp --mtraining-dump-layers 9", "--mtraining-dump-layers 9: must be .*from 0 to 1"),
    ],
)
def test_what_is_not_valid_is_one_line_before_any_work(parse, options, expected):
    with pytest.raises(RefusedError, match=expected) as refused:
        parse(*MTRAINING, *shlex.split(options))
    assert "\n" not in str(refused.value)
    assert not runtime.is_set_up()


def test_without_the_backend_they_are_said_to_have_no_effect(parse, capsys):
    parse("--mtraining-dense-layers", "0", "--mtraining-guard-recall", "0.9")
    assert "--mtraining-dense-layers, --mtraining-guard-recall has no effect without" in capsys.readouterr().out


def test_layers_of_multi_token_prediction_follow_those_of_the_decoder(parse):
    plan = parsed_plan(parse, "--num-layers 2 --mtp-num-layers 1 --mtraining-dense-layers 2")
    assert plan.dense_layers == {2}


def test_a_hybrid_models_prediction_counts_all_layers_of_its_pattern(parse):
    """As its decoder does: layers 4 to 7 are two depths of attention and MLP."""
    options = "--hybrid-layer-pattern *-*-/*-/*- --spec a b --mtraining-dense-layers"
    assert parsed_plan(parse, f"{options} 4,6").dense_layers == {4, 6}
    assert parsed_plan(parse, f"{options} 0-7").dense_layers == set(range(8))
    with pytest.raises(RefusedError, match="from 0 to 7"):
        parse(*MTRAINING, *options.split(), "8")


def test_numbers():
    assert parse_numbers("--x", "3, 5-6", 0, None) == [3, 5, 6]


def test_an_index_is_read_back_as_it_was_written(tmp_path, capsys):
    index = random_index(512, 4, batch=2)
    path = tmp_path / "index.pt"
    save_index(path, index, layer=3, note="here")
    found, about = load_index(path)
    assert about == {"layer": 3, "note": "here"}
    assert found.documents == index.documents
    assert torch.equal(found.slash_words, index.slash_words)
    assert torch.equal(found.column_words, index.column_words)
    main([str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * 4
    assert f"{int(index.column_bits()[0, 0].sum())} columns" in lines[1]
    torch.save({"format": 0}, path)
    with pytest.raises(SystemExit, match="not an index of format 1"):
        main([str(path)])
