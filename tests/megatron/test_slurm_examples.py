"""The sbatch scripts, run with stand-ins for SLURM's, pip's and torch's programs; Megatron parses the command they build."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from megatron_mtraining import plan
from megatron_mtraining.integration import runtime

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "examples" / "slurm"
SCRIPTS = ["two_nodes.sbatch", "two_nodes_container.sbatch"]

NOTE = 'printf "%s\\0" "${0##*/}" "$@" >>"$LOG"; printf "\\036" >>"$LOG"\n'
# srun's own options go before the program; what follows is run, as on a node.
SRUN = NOTE + 'while [[ $1 == --* ]]; do [[ $1 == --chdir=* ]] && cd "${1#*=}"; shift; done\n"$@"\n'
PROGRAMS = {
    "srun": SRUN,
    "scontrol": 'echo "node-7"; echo "node-8"\n',
    "pip": NOTE + '[[ $1 != wheel ]] || touch "${@: -2:1}/megatron_mtraining-0.1.0-py3-none-any.whl"\n',
    "torchrun": 'set -- "$PWD" "$PYTHONPATH" "$CUDA_DEVICE_MAX_CONNECTIONS" "$@"\n' + NOTE,
    "python": "exit 1\n",
}


@pytest.fixture
def run(tmp_path):
    """Runs a script as SLURM would, on the first node of two; gives the calls of programs, each a list of words."""

    def run(script, *words, **variables):
        programs, megatron = tmp_path / "venv" / "bin", tmp_path / "Megatron-LM"
        for folder in (programs, megatron, tmp_path / "wheels"):
            folder.mkdir(parents=True, exist_ok=True)
        (megatron / "pretrain_gpt.py").touch()
        for name, text in PROGRAMS.items():
            (programs / name).write_text("#!/bin/bash\n" + text)
            (programs / name).chmod(stat.S_IRWXU)
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}", "LOG": str(tmp_path / "log"), "MEGATRON": str(megatron),
            "VENV": str(tmp_path / "venv"), "WHEELS": str(tmp_path / "wheels"), "IMAGE": "registry#image",
            "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node-[7-8]", "SLURM_JOB_ID": "4711", "SLURM_NNODES": "2",
        }  # fmt: skip
        (tmp_path / "log").write_text("")
        done = subprocess.run(
            ["bash", str(SLURM / script), *words], env=environment | variables, cwd=tmp_path, capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or done.stderr
        return done, [call.split("\0")[:-1] for call in (tmp_path / "log").read_text().split("\036")[:-1]]

    return run


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck(script):
    assert subprocess.run(["bash", "-n", SLURM / script], check=False).returncode == 0
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    checked = subprocess.run(["shellcheck", SLURM / script], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_megatron_takes_the_command(run, parse, tmp_path, script):
    """torchrun starts the launcher with the training script, and its options pass Megatron's parser and validation."""
    done, calls = run(script, "--mtraining-top-p", "0.9")
    assert done.returncode == 0, done.stderr
    [torchrun] = [call for call in calls if call[0] == "torchrun"]
    megatron = str(tmp_path / "Megatron-LM")
    where, agent, launch = torchrun[1:4], torchrun[4 : torchrun.index("-m")], torchrun[torchrun.index("-m") :]
    assert where == [megatron, megatron, "1"]
    agent = dict(zip(agent[::2], agent[1::2], strict=True))
    assert agent == {
        "--nnodes": "2", "--nproc-per-node": "8", "--rdzv-backend": "c10d", "--rdzv-id": "4711",
        "--rdzv-endpoint": "node-7:24711",
    }  # fmt: skip
    assert launch[:3] == ["-m", "megatron_mtraining.launch", f"{megatron}/pretrain_gpt.py"]
    args = parse(*launch[3:], base=[], world_size=16)
    assert (args.context_parallel_size, args.seq_length, args.mtraining_top_p) == (16, 524288, 0.9)
    assert runtime.current().config.top_p == 0.9


def test_the_options_are_those_of_the_model_and_fit():
    words = [
        word
        for line in (SLURM / "qwen2.5-3b-512k.args").read_text().splitlines()
        if line[0] != "#"
        for word in line.split()
    ]
    job, _ = plan.parse(words)
    assert job.model == plan.MODELS["qwen2.5-3b"]
    found = plan.plan(job)
    assert (found["inner_size"], found["hosts"]) == (8, 2)
    assert found["stages"][0]["gib"]["total"] < 0.9 * 80e9 / 2**30


def test_the_container_keeps_its_torch(run):
    """The wheel is built once, on one node; nothing is installed with its dependencies, but pure Python that is missing."""
    done, calls = run("two_nodes_container.sbatch")
    assert done.returncode == 0, done.stderr
    build, start = [call for call in calls if call[0] == "srun"]
    assert "--nodes=1" in build and "--ntasks=1" in build and "--container-image=registry#image" in build
    mounts = next(word for word in start if word.startswith("--container-mounts="))
    assert f"{ROOT}:{ROOT}" in mounts
    pips = [call[1:] for call in calls if call[0] == "pip"]
    assert pips[0] == ["install", "--quiet", "scikit-build-core"]
    assert pips[1][:3] == ["wheel", "--no-deps", "--no-build-isolation"]
    assert all("--no-deps" in words for words in pips[1:])
    assert pips[-1][-1].endswith("megatron_mtraining-0.1.0-py3-none-any.whl")
    done, calls = run("two_nodes_container.sbatch")  # the wheel is there now
    assert done.returncode == 0, done.stderr
    assert [call[0] for call in calls].count("srun") == 1


@pytest.mark.parametrize(
    ("script", "variable"), [(SCRIPTS[0], "VENV"), (SCRIPTS[0], "MEGATRON"), (SCRIPTS[1], "IMAGE")]
)
def test_what_is_missing_is_said(run, script, variable):
    done, calls = run(script, **{variable: ""})
    assert done.returncode != 0 and f"{variable}: set it to" in done.stderr and calls == []


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("variable", ["ARGS", "MEGATRON"])
def test_a_wrong_path_starts_nothing(run, script, variable):
    """Without options Megatron would stop much later, on every rank, for another reason."""
    done, calls = run(script, **{variable: "/nowhere"})
    assert done.returncode == 1 and calls == []
    assert done.stderr.startswith(f"{variable}: ") and "/nowhere" in done.stderr and done.stderr.count("\n") == 1
