"""The launcher: scripts run as if Python had started them, with or without the plugin's backend."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mtraining.integration import RefusedError
from megatron_mtraining.launch import check_module

ROOT = Path(__file__).parents[2]

SCRIPT = '''
"""A user's script, in the shape of Megatron's: it imports by name, and its worker processes import it again."""
import json, multiprocessing, os, sys
import helper_beside_the_script
from megatron.core.utils import get_batch_on_this_cp_rank

def work(queue):
    queue.put(["megatron_mtraining" in sys.modules, __name__, os.path.basename(sys.modules["__mp_main__"].__file__)])

if __name__ == "__main__":
    from megatron.core import utils
    from megatron.training import arguments
    arguments.get_device_arch_version = lambda: 10
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=work, args=(queue,))
    worker.start()
    seen = queue.get(timeout=120)
    worker.join()
    before = [utils.get_batch_on_this_cp_rank]  # in a list: globals are rebound
    args = arguments.parse_args()
    arguments.validate_args(args)
    print("RESULT", json.dumps({
        "argv": sys.argv[1:3],
        "worker": seen,
        "backend": args.attention_backend.name,
        "slicer replaced": utils.get_batch_on_this_cp_rank is not before[0],
        "script has it too": get_batch_on_this_cp_rank is utils.get_batch_on_this_cp_rank,
        "helper": helper_beside_the_script.VALUE,
    }))
'''

OPTIONS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --train-iters 2 --lr 1e-3 --transformer-impl local --attention-dropout 0 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --context-parallel-size 4"
)


def launch(*words, **environment):
    command = [sys.executable, "-m", "megatron_mtraining.launch", *map(str, words)]
    base = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
    path = os.pathsep.join([str(ROOT), *sys.path[1:]])
    return subprocess.run(
        command, env=base | {"PYTHONPATH": path, "WORLD_SIZE": "4"} | environment, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper_beside_the_script.py").write_text("VALUE = 42\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("backend", ["mtraining", "flash"])
def test_a_script_runs_unmodified(script, backend):
    done = launch(script, *OPTIONS.split(), "--attention-backend", backend)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))[7:])
    ours = backend == "mtraining"
    assert result == {
        "argv": ["--num-layers", "2"],
        "worker": [False, "__mp_main__", "train.py"],
        "backend": "auto" if ours else backend,
        "slicer replaced": ours,
        "script has it too": True,
        "helper": 42,
    }
    assert ("> megatron_mtraining: layout striped, native" in done.stdout) == ours


def test_a_refusal_is_one_line_and_stops_the_run(script):
    done = launch(script, *OPTIONS.split(), "--attention-backend", "mtraining", "--softmax-type", "learnable")
    assert done.returncode == 1
    assert "RESULT" not in done.stdout
    errors = [line for line in done.stderr.splitlines() if "megatron_mtraining" in line]
    assert len(errors) == 1
    assert errors[0].startswith("megatron_mtraining: error: --softmax-type learnable: not supported")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["missing.py"], "no script 'missing.py'"),
        ([], "usage:"),
        (["-m", "no_such_module"], "megatron_mtraining: error: -m no_such_module: no such module to run; usage:"),
    ],
)
def test_a_missing_script_is_one_line(words, expected):
    done = launch(*words)
    assert done.returncode == 1
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_help_is_the_usage_and_no_error():
    done = launch("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m megatron_mtraining.launch")


@pytest.mark.parametrize("name", ["", ".x", "os.path.x", "json.no_such", "email", "no.such"])
def test_modules_that_cannot_be_run(name):
    """The package email has no __main__."""
    with pytest.raises(RefusedError, match=f"^-m {re.escape(name)}: no such module to run"):
        check_module(name)


def test_modules_that_can_be_run_and_errors_of_their_own(monkeypatch, tmp_path):
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("import something_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check_module("json.tool")
    check_module("pip")
    with pytest.raises(ModuleNotFoundError, match="something_that_is_not_there"):
        check_module("broken_package.train")


MEGATRONS = {
    "too old": ({"core/package_info.py": "__shortversion__ = '0.12.1'", "training/__init__.py": ""}, "0.12.1 is not"),
    "without a version": ({"core/__init__.py": "", "training/__init__.py": ""}, "megatron-core was not found"),
    "without training": ({"core/package_info.py": "__shortversion__ = '0.19.2'"}, "megatron.training was not found"),
}
"""The files of a megatron that is found first, and what is said of it."""


@pytest.mark.parametrize("kind", MEGATRONS)
@pytest.mark.parametrize("command", ["launch", "plan"])
def test_a_wrong_megatron_is_one_line(tmp_path, script, kind, command):
    files, expected = MEGATRONS[kind]
    for name in ("__init__.py", "core/__init__.py"):
        files = {name: ""} | files
    for name, content in files.items():
        path = tmp_path / "checkout" / "megatron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    words = {
        "launch": ["-m", "megatron_mtraining.launch", str(script), "--attention-backend", "mtraining"],
        "plan": ["-m", "megatron_mtraining.cli", "plan", "--model", "qwen2.5-3b", "--seq-length", "8192"],
    }
    path = os.pathsep.join([str(tmp_path / "checkout"), str(ROOT), *sys.path[1:]])
    done = subprocess.run(
        [sys.executable, *words[command]], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.match(rf"megatron.mtraining.*: error: .*{expected}", done.stderr.splitlines()[-1])


def test_importing_the_integration_does_not_import_megatron():
    code = "import sys, megatron_mtraining.integration, megatron_mtraining.launch; print('megatron' in sys.modules)"
    path = os.pathsep.join([str(ROOT), *sys.path[1:]])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "False"
