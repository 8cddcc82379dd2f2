"""The options of `make train`: defaults, bad values, and the Megatron command line."""

import shlex
from pathlib import Path

import pytest
import train
import train_options
from train_options import OptionError, parse_options


def test_defaults_are_two_nodes_of_two_ranks_at_8192(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    options = parse_options([], gpus=0)
    assert (options.seq, options.nproc, options.inner, options.attention, options.name) == (
        8192,
        4,
        2,
        "mtraining",
        "mtraining",
    )
    command = shlex.join(train_options.training_command(options, "data/text"))
    assert "--attention-backend mtraining" in command
    assert "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2" in command
    assert "--mtraining-cpu" in command
    assert "--group-query-attention" in command
    assert "--position-embedding-type rope" in command


def test_dense_is_the_same_ring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    sparse = train_options.training_command(parse_options(["--name", "x"], gpus=0), "data/text")
    dense = train_options.training_command(parse_options(["--name", "x", "--attention", "dense"], gpus=0), "data/text")
    assert set(dense) - set(sparse) == {"--mtraining-dense"}
    assert {word for word in set(sparse) - set(dense) if word.startswith("--")} == {
        "--mtraining-top-p",
        "--mtraining-max-vertical",
        "--mtraining-max-slash",
    }


@pytest.mark.parametrize(("gpus", "nproc", "inner"), [(0, 4, 2), (1, 1, 1), (2, 2, 2), (4, 4, 2), (8, 8, 4), (3, 3, 3)])
def test_processes_follow_the_gpus(gpus: int, nproc: int, inner: int) -> None:
    options = parse_options(["--seq", str(64 * 3 * 8 * 16)], gpus)
    assert (options.nproc, options.inner) == (nproc, inner)
    arguments = train_options.device_arguments(options)
    assert ("--mtraining-cpu" in arguments) == (gpus == 0)
    assert ("--bf16" in arguments) == (gpus > 0)


@pytest.mark.parametrize(
    ("argv", "gpus", "message"),
    [
        (["--attention", "sparse"], 0, "ATTENTION=sparse: must be one of mtraining, dense"),
        (["--seq", "8000"], 0, "SEQ=8000: must be a multiple of 256 .* e.g. 7936 or 8192"),
        (["--seq", "100"], 0, "SEQ=100: .* e.g. 256"),
        (["--seq", "many"], 0, "SEQ=many: must be a positive integer"),
        (["--steps", "0"], 0, "STEPS=0: must be a positive integer"),
        (["--steps", "\u0663"], 0, "STEPS=\u0663: must be a positive integer"),
        (["--steps", "-3"], 0, "STEPS=-3: must be a positive integer"),
        (["--nproc", "x"], 0, "NPROC=x: must be a positive integer"),
        (["--nproc", "4"], 2, r"NPROC=4: this machine has 2 GPU\(s\)"),
        (["--inner", "3"], 0, "INNER=3: must divide NPROC=4"),
        (["--top-p", "1.5"], 0, r"TOP_P=1.5: must be a number in \(0, 1\]"),
        (["--top-p", "nan"], 0, "TOP_P=nan"),
        (["--name", "../x"], 0, "NAME=../x: must be made of"),
        (["--resume", "--name", "absent"], 0, "RESUME=1: runs/absent/checkpoint holds no checkpoint"),
        (["--resume=1", "--name", "absent"], 0, "RESUME=1: runs/absent/checkpoint holds no checkpoint"),
        (["--resume=no"], 0, "RESUME=no: must be 0 or 1"),
        (["--extra", "--title 'a"], 0, r"EXTRA=--title 'a: must be quoted as for a shell \(No closing quotation\)"),
    ],
)
def test_bad_values_are_one_line_that_names_them(
    argv: list[str], gpus: int, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = [f"{argv[0]}={argv[1]}", *argv[2:]] if argv[0] == "--steps" else argv
    with pytest.raises(OptionError, match=message) as raised:
        parse_options(argv, gpus)
    assert "\n" not in str(raised.value)


def test_nothing_left_to_resume_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "runs" / "mtraining" / "checkpoint"
    checkpoint.mkdir(parents=True)
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("80")
    with pytest.raises(OptionError, match="STEPS=80: the checkpoint of mtraining is at step 80; ask for more"):
        parse_options(["--resume"], gpus=0)
    assert parse_options(["--resume", "--steps", "100"], gpus=0).resume


def test_too_little_text_is_refused_before_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.txt").write_text("too short")
    with pytest.raises(
        OptionError,
        match=r"small.txt: 10 bytes of text, 0 of them kept for validation; both parts must be longer than SEQ=8192",
    ):
        train.prepare_data(parse_options(["--data", "small.txt"], gpus=0))


def test_printed_command_is_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    command = train_options.training_command(parse_options(["--extra", "--seed 7 --title 'a b'"], gpus=0), "data/te xt")
    printed = train_options.printable(command, {"OMP_NUM_THREADS": "1"})
    assert shlex.split(printed.replace("\\\n", "")) == ["OMP_NUM_THREADS=1", *command]
    assert command[-4:] == ["--seed", "7", "--title", "a b"]
    assert max(map(len, printed.splitlines())) < 120


def test_extra_may_be_one_flag() -> None:
    assert parse_options(["--extra=--some-flag"], gpus=0).extra == ("--some-flag",)


def test_resume_0_does_not_resume() -> None:
    assert not parse_options(["--resume=0"], gpus=0).resume


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (None, "stopped before the first checkpoint (one every 50 steps): nothing to go on from"),
        ("50", "stopped; RESUME=1 NAME=mtraining goes on from the checkpoint of step 50"),
        ("80", "stopped after training; the checkpoint of step 80 is in runs/mtraining/checkpoint"),
    ],
)
def test_what_can_be_done_after_ctrl_c(
    saved: str | None, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    options = parse_options([], gpus=0)
    if saved is not None:
        options.checkpoint.mkdir(parents=True)
        (options.checkpoint / "latest_checkpointed_iteration.txt").write_text(saved)
    assert train.stopped(options) == message


def test_an_earlier_run_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    options = parse_options([], gpus=0)
    train.make_run_folder(options)
    (options.folder / "metrics.jsonl").write_text("{}\n")
    train.make_run_folder(options)
    assert not (options.folder / "metrics.jsonl").exists()
    assert len(list(tmp_path.glob("runs/mtraining-*/metrics.jsonl"))) == 1
