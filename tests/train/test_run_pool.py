"""The benchmarks' pool of runs: a timed run starts up beside others and trains alone; a forked run is its client's."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import megatron_single, preloaded, run_pool

ROOT = Path(__file__).parents[2]
FORK = multiprocessing.get_context("fork")


def script(path: Path, name: str, gate: Path | None = None, seconds: float = 0.3) -> run_pool.Run:
    """A run that notes when it began and ended its work in `path`."""
    wait = "" if gate is None else f"touch {gate}.ready; until [ -e {gate} ]; do sleep 0.01; done; "
    work = f"{wait}echo {name} begins >> {path}; sleep {seconds}; echo {name} ends >> {path}"
    return run_pool.Run(name, "single" if gate is None else "gated", ("sh", "-c", work), gate=gate)


def test_gated_runs_work_alone_and_what_follows_waits(tmp_path):
    notes = tmp_path / "notes"
    runs = [
        script(notes, "first", seconds=0.6),
        script(notes, "timed", tmp_path / "one"),
        script(notes, "again", tmp_path / "two"),
        script(notes, "last"),
    ]
    statuses = {}
    run_pool.run_all(runs, tmp_path / "logs", lambda result: statuses.update({result["name"]: result["status"]}))
    assert notes.read_text().split("\n")[:-1] == [
        f"{name} {what}" for name in ("first", "timed", "again", "last") for what in ("begins", "ends")
    ]
    assert set(statuses.values()) == {0}


def test_a_run_waits_for_another_only_if_that_is_run_too(tmp_path):
    notes = tmp_path / "notes"
    after = dataclasses.replace(script(notes, "second"), after="first")
    for runs in ([after, script(notes, "first", seconds=0.6)], [after]):
        run_pool.run_all(runs, tmp_path / "logs", lambda result: None)
    lines = [f"{name} {what}" for name in ("first", "second", "second") for what in ("begins", "ends")]
    assert notes.read_text().split("\n")[:-1] == lines


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server that has loaded nothing, and runs Python files instead of training scripts."""
    address = str(tmp_path / "socket")
    monkeypatch.setattr(preloaded, "preload", lambda checkout: None)
    monkeypatch.setattr(preloaded, "_train", lambda arguments: exec(Path(arguments[0]).read_text()) or 7)
    process = FORK.Process(target=preloaded.serve, args=(address, tmp_path), daemon=True)
    process.start()
    while not os.path.exists(address):
        time.sleep(0.01)
    yield address
    process.terminate()
    process.join()


def client(address: str, program: Path, ranks: int = 1, **variables: str) -> subprocess.Popen[str]:
    """A run, as the pool starts it."""
    command = (sys.executable, "-m", "benchmarks.preloaded", "run", address, str(ranks), str(program))
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | variables, cwd=ROOT)


def test_a_forked_run_has_its_clients_output_environment_and_status(server, tmp_path):
    program = tmp_path / "program.py"
    words = "os.environ['WORD'], os.environ['RANK'], os.getcwd()"
    program.write_text(f"os.write(1, (' '.join(({words})) + '\\n').encode())")  # sys.stdout is pytest's here
    run = client(server, program, WORD="this")
    assert run.communicate(timeout=20)[0] == f"this 0 {ROOT}\n"
    assert run.returncode == 7


def test_ranks_share_a_rendezvous_and_have_numbers_of_their_own(server, tmp_path):
    program = tmp_path / "program.py"
    mine, both = tmp_path / "rank", [str(tmp_path / "rank0"), str(tmp_path / "rank1")]
    program.write_text(
        "words = [os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_PORT')]\n"
        "os.write(1, (' '.join(words) + '\\n').encode())\n"
        f"Path({str(mine)!r} + os.environ['RANK']).touch()\n"
        f"while not (os.path.exists({both[0]!r}) and os.path.exists({both[1]!r})): time.sleep(0.01)"
    )
    run = client(server, program, 2)
    first, second = sorted(line.split() for line in run.communicate(timeout=60)[0].splitlines())
    assert run.returncode == 7  # what the stand-in for training returns
    assert (first[:3], second[:3]) == (["0", "0", "2"], ["1", "1", "2"])
    assert first[3] == second[3]


def test_a_rank_that_fails_ends_the_others(server, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("time.sleep(0.2 if os.environ['RANK'] == '1' else 60)")
    run = client(server, program, 2)
    run.communicate(timeout=20)
    assert run.returncode == 7


def test_an_exception_is_status_1(server, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("raise OSError('no')")
    run = client(server, program)
    run.communicate(timeout=20)
    assert run.returncode == 1


def test_a_forked_run_ends_with_its_client(server, tmp_path):
    program = tmp_path / "program.py"
    alive = tmp_path / "alive"
    program.write_text(f"open({str(alive)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    run = client(server, program)
    while not (alive.exists() and alive.read_text()):
        time.sleep(0.01)
    pid = int(alive.read_text())
    run.kill()
    run.communicate()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_without_a_server_a_process_of_its_own_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(preloaded, "PATIENCE", 0.1)
    assert preloaded.run(str(tmp_path / "none"), 1, ["no_such_script.py"]) == 1


@pytest.mark.parametrize(
    ("name", "log", "before", "after"),
    [
        ("cuda_graph_refused", "megatron_mtraining: error: --cuda-graph-impl local: not supported", 1, 0),
        ("cuda_graph_refused", "some other error", 1, 1),
        ("cuda_graph_refused", "megatron_mtraining: error: --cuda-graph-impl local: not supported", 0, 1),
        ("moe", "iteration 1/ 5 | elapsed time per iteration (ms): 1.0 | lm loss: 2.0E+00 |", 0, 0),
        ("moe", "iteration 1/ 5 | elapsed time per iteration (ms): 1.0 | lm loss: nan |", 0, 1),
        ("moe", "'--exit-on-missing-checkpoint' set ... exiting.", 0, 1),
        ("evaluation", "iteration 1/ 5 | elapsed time per iteration (ms): 1.0 | lm loss: 2.0E+00 |", 0, 1),
        ("evaluation_longer", "validation loss at iteration 5 on validation set | lm loss value: 3.1E+00 |", 0, 0),
    ],
)
def test_the_outcome_is_what_a_run_was_to_show(name, log, before, after, tmp_path):
    path = tmp_path / f"{name}.log"
    path.write_text(f"{log}\n")
    result = run_pool.outcome(run_pool.Run(name, "small", ("true",)), path, before, 1.0)
    assert megatron_single.judge(result, tmp_path)["status"] == after


def test_every_run_that_waits_for_another_names_one_of_the_list():
    names = list(megatron_single.CHECKS)
    for name, other in megatron_single.AFTER.items():
        assert names.index(other) < names.index(name)
    named = {*megatron_single.OLDER, *megatron_single.VARIABLES, *megatron_single.REFUSED, *megatron_single.PLAIN}
    assert named <= set(names)


class Cuda:
    """Stands for ``torch.cuda``."""

    def __init__(self, there: bool) -> None:
        self.is_available = lambda: there
        self.get_device_name = self.get_device_capability = self.get_device_properties = self.touch

    def touch(self, *_: object) -> None:
        raise AssertionError("CUDA is touched")


def test_while_loading_the_device_is_described_by_another_process(monkeypatch):
    monkeypatch.setattr(preloaded, "_describe_device", described)
    cuda = Cuda(there=True)
    with preloaded.device_described(cuda):
        assert cuda.get_device_name(0) == "some GPU"
        assert cuda.get_device_capability() == (9, 0)
        assert cuda.get_device_properties(device=0).pid != os.getpid()
    for name in ("get_device_name", "get_device_capability", "get_device_properties"):
        with pytest.raises(AssertionError, match="CUDA is touched"):
            getattr(cuda, name)(0)


def described():
    return "some GPU", (9, 0), {"pid": os.getpid()}


def test_without_a_gpu_nothing_is_described():
    with preloaded.device_described(Cuda(there=False)):
        pass


def test_the_client_loads_no_torch():
    code = "import sys, benchmarks.preloaded; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
