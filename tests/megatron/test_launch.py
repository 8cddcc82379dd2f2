"""The launcher: scripts run as if Python had started them, with or without the plugin's backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("words", "expected"), [(["missing.py"], "no script 'missing.py'"), ([], "usage:")])
def test_a_missing_script_is_one_line(words, expected):
    done = launch(*words)
    assert done.returncode == 1
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_help_is_the_usage_and_no_error():
    done = launch("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m megatron_mtraining.launch")


def test_importing_the_integration_does_not_import_megatron():
    code = "import sys, megatron_mtraining.integration, megatron_mtraining.launch; print('megatron' in sys.modules)"
    path = os.pathsep.join([str(ROOT), *sys.path[1:]])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "False"
