"""The runner of the functional tests: it reads Megatron's files as Megatron does, and its comparison can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import __main__ as runner
from . import golden
from .cases import HERE, load_cases

CASES = load_cases()
LOSS = {step: 10.0 - step / 100 for step in range(1, 51)}
ZEROS = dict.fromkeys(range(1, 51), 4096.0)
BOTH = ("lm loss", "num-zeros")


def test_the_recipe_names_the_cases_and_their_gpus():
    assert {name: case.gpus for name, case in CASES.items()} == {
        "gpt_153m_mtraining_1gpu": 1,
        "gpt_153m_mtraining_cp2": 2,
        "gpt_153m_mtraining_tp2_sp": 2,
    }
    folders = {path.parent.name for path in HERE.rglob("model_config.yaml")}
    assert folders == set(CASES)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_case_uses_the_plugin_and_logs_what_is_compared(name):
    words = CASES[name].arguments(dict.fromkeys(("TENSORBOARD_PATH", "DATA_CACHE_PATH"), "/out"))
    assert words[words.index("--attention-backend") + 1] == "mtraining"
    assert {"--log-num-zeros-in-grad", "--deterministic-mode", "--tensorboard-dir"} <= set(words)
    assert not any("$" in word or word == "True" for word in words)
    assert not CASES[name].approximate
    assert CASES[name].metrics == BOTH


@pytest.mark.parametrize("name", sorted(CASES))
def test_golden_values_are_there_and_complete(name):
    case = CASES[name]
    values = golden.read(case.golden_values)
    assert golden.incomplete(values, case.metrics, case.steps) is None
    assert values["lm loss"][50] < 0.05 * values["lm loss"][1]  # mock data are learned by heart


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("wrong", [None, "lm loss", "num-zeros"])
def test_compare_checks_a_run_against_the_golden_values(name, wrong, tmp_path, capsys):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    values = golden.read(CASES[name].golden_values)
    with SummaryWriter(str(tmp_path)) as writer:
        for metric in BOTH:
            for step, value in values[metric].items():
                writer.add_scalar(metric, value * (1 + 1e-4 * (metric == wrong and step == 33)), step)
    with pytest.raises(SystemExit) as end:
        runner.main(["compare", name, "--tensorboard", str(tmp_path)])
    told = capsys.readouterr().out
    assert end.value.code == int(wrong is not None)
    assert (f"  {wrong}: 1 of 50 steps differ, first step 33" in told) == (wrong is not None)


@pytest.mark.parametrize("command", [["compare", "NAME", "--tensorboard", "."], ["run", "NAME", "--megatron", "HERE"]])
def test_a_case_without_golden_values_ends_before_any_work(command, monkeypatch, tmp_path):
    (tmp_path / runner.SCRIPT).touch()
    monkeypatch.setattr(runner.Case, "golden_values", HERE / "no such file")
    with pytest.raises(SystemExit, match=f"no golden values of {sorted(CASES)[0]}: record them with run --record"):
        runner.main([word.replace("NAME", sorted(CASES)[0]).replace("HERE", str(tmp_path)) for word in command])


@pytest.mark.parametrize("content", ["{", "[]", '{"lm loss": {}}', '{"lm loss": {"values": {"1": "much"}}}'])
def test_what_is_no_file_of_golden_values_is_one_line(tmp_path, content):
    path = tmp_path / "golden.json"
    path.write_text(content)
    with pytest.raises(golden.UnreadableError, match="golden.json: not a file of golden values"):
        golden.read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a file of golden values"),
        (None, "not a file of golden values"),  # a folder
        ({"lm loss": LOSS}, "golden_values_dev_dgx_h200.json: no num-zeros in it"),
        ({"lm loss": {1: 9.99}, "num-zeros": ZEROS}, "h200.json: lm loss ends at step 1 of 50"),
        (
            {"lm loss": LOSS, "num-zeros": {step: ZEROS[step] for step in range(1, 50)}},
            "num-zeros ends at step 49 of 50",
        ),
    ],
    ids=["no json", "folder", "no metric", "one step", "a step less"],
)
@pytest.mark.parametrize("command", [["compare"], ["run", "--megatron", "HERE"]])
def test_values_that_a_run_cannot_be_compared_with_end_before_any_work(command, content, message, tmp_path, events):
    """Not after an hour of training; and a run does not pass because of the few steps that a file has."""
    name = "gpt_153m_mtraining_cp2"
    (tmp_path / runner.SCRIPT).touch()
    path = load_cases(tmp_path)[name].golden_values
    path.parent.mkdir()
    if content is None:
        path.mkdir()
    elif content == "{":
        path.write_text(content)
    else:
        golden.write(content, path)
    words = [word.replace("HERE", str(tmp_path)) for word in command]
    more = ["--tensorboard", str(events)] if command[0] == "compare" else ["--output", str(tmp_path)]
    with pytest.raises(SystemExit, match=message):
        runner.main([*words, name, *more, "--values", str(tmp_path)])
    assert not (tmp_path / name / "log.txt").exists()


@pytest.mark.parametrize(("option", "more"), [("--output", []), ("--values", ["--record"])])
def test_a_folder_that_cannot_be_made_is_one_line(option, more, tmp_path, monkeypatch):
    (tmp_path / runner.SCRIPT).touch()
    monkeypatch.setattr(runner, "command", lambda *_: pytest.fail("trained"))
    words = ["run", "gpt_153m_mtraining_cp2", "--megatron", str(tmp_path), *more]
    with pytest.raises(SystemExit, match=f"^{option} .*{runner.SCRIPT}.*: (Not a directory|File exists)$"):
        runner.main([*words, option, str(tmp_path / runner.SCRIPT)])


def test_every_fifth_step_is_compared():
    """As Megatron's own recording may have it."""
    fifth = {step: value for step, value in LOSS.items() if step == 1 or step % 5 == 0}
    assert golden.cut_off({"lm loss": fifth}, ("lm loss",), 50) is None
    assert golden.compare({"lm loss": fifth}, {"lm loss": LOSS | {7: 1.0}}, ("lm loss",), False) == []
    assert golden.compare({"lm loss": fifth}, {"lm loss": LOSS | {10: 1.0}}, ("lm loss",), False)


def test_training_anew_keeps_what_else_is_in_its_folder(tmp_path, monkeypatch):
    """Golden values recorded into the folder of the runs are compared with by the next run there."""
    case = load_cases(tmp_path)["gpt_153m_mtraining_cp2"]
    (tmp_path / runner.SCRIPT).touch()
    golden.write({"lm loss": LOSS, "num-zeros": ZEROS}, case.golden_values)
    old = tmp_path / case.name / "tensorboard" / "events.out.tfevents.1"
    old.parent.mkdir()
    old.touch()
    monkeypatch.setattr(runner, "command", lambda *_: ["true"])
    words = ["run", case.name, "--megatron", str(tmp_path), "--output", str(tmp_path), "--values", str(tmp_path)]
    for record in ([], ["--record"]):
        with pytest.raises(SystemExit, match="tensorboard: no TensorBoard file with scalars"):
            runner.main([*words, *record])
    assert not old.exists() and golden.read(case.golden_values)["lm loss"] == LOSS


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({}, None),
        ({50: float("nan")}, "lm loss has no finite value in 1 of 50 steps, first step 50"),
        (None, "lm loss has no finite value in 50 of 50 steps, first step 1"),
    ],
)
def test_only_complete_runs_are_recorded(change, missing):
    values = {"num-zeros": ZEROS} | ({} if change is None else {"lm loss": LOSS | change})
    assert golden.incomplete(values, BOTH, 50) == missing


@pytest.fixture
def events(tmp_path):
    """TensorBoard files of a run of 50 steps."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "events")) as writer:
        for step, loss in LOSS.items():
            writer.add_scalar("lm loss", loss, step)
            writer.add_scalar("num-zeros", ZEROS[step], step)
    return tmp_path / "events"


@pytest.mark.parametrize(("change", "status"), [({}, 0), ({7: 9.9300}, 0), ({7: 9.9301}, 1)])
def test_compare_with_values_of_ones_own(tmp_path, events, change, status, capsys):
    name = "gpt_153m_mtraining_cp2"
    path = load_cases(tmp_path)[name].golden_values
    assert path == tmp_path / name / "golden_values_dev_dgx_h200.json"
    golden.write({"lm loss": LOSS | change, "num-zeros": ZEROS}, path)
    with pytest.raises(SystemExit) as end:
        runner.main(["compare", name, "--tensorboard", str(events), "--values", str(tmp_path)])
    assert end.value.code == status
    assert f"{name}: {'FAILED' if status else 'passed'}" in capsys.readouterr().out


def test_compare_without_a_run_is_one_line(tmp_path):
    name = "gpt_153m_mtraining_cp2"
    golden.write({"lm loss": LOSS, "num-zeros": ZEROS}, load_cases(tmp_path)[name].golden_values)
    with pytest.raises(SystemExit, match="no TensorBoard file with scalars"):
        runner.main(["compare", name, "--tensorboard", str(tmp_path / "none"), "--values", str(tmp_path)])


@pytest.mark.parametrize("record", [[], ["--record"]])
def test_run_takes_all_cases_if_none_is_named_and_refuses_others(record, monkeypatch, tmp_path, capsys):
    (tmp_path / runner.SCRIPT).touch()
    started = []
    monkeypatch.setattr(
        runner, "run", lambda case, options, expected: started.append((case.name, expected and expected["lm loss"][50]))
    )
    with pytest.raises(SystemExit) as end:
        runner.main(["run", "--megatron", str(tmp_path), *record])
    last = {name: None if record else golden.read(CASES[name].golden_values)["lm loss"][50] for name in CASES}
    assert (end.value.code, started) == (1, sorted(last.items()))  # `run` said that none passed
    with pytest.raises(SystemExit):
        runner.main(["run", "nothing", "--megatron", str(tmp_path)])
    assert f"no case nothing; there are {', '.join(sorted(CASES))}" in capsys.readouterr().err


def test_equal_values_pass():
    values = {"lm loss": LOSS, "num-zeros": ZEROS}
    assert golden.compare(values, values, BOTH, approximate=False) == []


@pytest.mark.parametrize(
    ("change", "approximate", "fails"),
    [
        ({7: 9.93001}, False, True),
        ({7: 9.93001}, True, False),
        ({7: 20.0}, True, False),  # one step in a hundred, at least one
        ({7: 20.0, 8: 20.0}, True, True),
        ({7: float("nan"), 8: float("nan")}, True, True),
    ],
)
def test_a_changed_loss_is_seen(change, approximate, fails):
    failures = golden.compare({"lm loss": LOSS}, {"lm loss": LOSS | change}, ("lm loss",), approximate)
    assert bool(failures) == fails
    if fails:
        assert failures[0].startswith("lm loss:")
        assert "step 7" in failures[0]


def test_a_missing_step_and_a_missing_metric_fail():
    short = {step: value for step, value in LOSS.items() if step < 50}
    assert golden.compare({"lm loss": LOSS}, {"lm loss": short}, ("lm loss",), approximate=False)
    assert golden.compare({"lm loss": LOSS}, {}, ("lm loss",), False) == ["lm loss: not in the run"]


def test_time_is_the_median_of_the_steady_steps():
    slow_start = dict.fromkeys(range(2, 51), 1.0) | {2: 60.0}
    assert golden.steady_steps(slow_start) == list(range(30, 46))
    golden_times, times = {"iteration-time": slow_start}, {"iteration-time": dict.fromkeys(range(2, 51), 1.04)}
    assert golden.compare(golden_times, times, ("iteration-time",), False) == []
    times = {"iteration-time": dict.fromkeys(range(2, 51), 1.06)}
    assert golden.compare(golden_times, times, ("iteration-time",), False)


def test_written_values_have_megatrons_structure(tmp_path):
    path = tmp_path / "golden.json"
    golden.write({"lm loss": LOSS}, path)
    metric = json.loads(path.read_text())["lm loss"]
    assert list(metric) == ["start_step", "end_step", "step_interval", "values"]
    assert (metric["start_step"], metric["end_step"], metric["step_interval"]) == (1, 50, 1)
    assert metric["values"]["1"] == 9.99
    assert golden.read(path) == {"lm loss": LOSS}


def test_tensorboard_files_are_read_and_rounded(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    for step in (1, 2, 51):
        writer.add_scalar("lm loss", 1.23456789 * step, step)
        writer.add_scalar("learning-rate", 1.0, step)
    writer.close()
    assert golden.read_tensorboard(tmp_path, 50) == {"lm loss": {1: 1.23457, 2: 2.46914}}
    with pytest.raises(FileNotFoundError, match="no TensorBoard file"):
        golden.read_tensorboard(tmp_path / "nothing", 50)


def test_a_folder_without_megatron_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"--megatron .*: no pretrain_gpt.py there"):
        runner.main(["run", "gpt_153m_mtraining_cp2", "--megatron", str(tmp_path), "--output", str(tmp_path / "out")])


def test_the_command_starts_the_script_as_megatrons_runner_does():
    case = CASES["gpt_153m_mtraining_cp2"]
    plain = runner.command(case, Path("/m/pretrain_gpt.py"), Path("/o"), plain=True)
    launched = runner.command(case, Path("/m/pretrain_gpt.py"), Path("/o"), plain=False)
    assert plain[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert plain[5] == "/m/pretrain_gpt.py"
    assert launched[5:8] == ["-m", "megatron_mtraining.launch", "/m/pretrain_gpt.py"]
    assert plain[-2:] == ["--exit-interval", "50"]
