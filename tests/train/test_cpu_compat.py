"""The CPU compatibility layer: what it asks for and refuses, and what torch and Megatron then do."""

import pytest
import torch

from megatron_mtraining.integration import cpu_compat
from megatron_mtraining.integration.cpu_compat import cuda_stand_in
from megatron_mtraining.integration.cpu_compat.arguments import NEEDED, OPTION, complete_arguments

from .conftest import Runner


def test_without_the_option_nothing_is_touched() -> None:
    argv = ["--num-layers", "2", "--transformer-impl", "transformer_engine"]
    assert cpu_compat.consume_option(argv) == argv
    assert not cuda_stand_in.is_installed()
    assert type(torch.cuda.Event).__module__ != cuda_stand_in.__name__


def test_needed_options_are_added_once() -> None:
    given = ["--num-layers", "2", "--num-workers=0", "--no-rope-fusion"]
    completed = complete_arguments(given)
    assert completed[: len(given)] == given
    for needed in NEEDED:
        named = [word for word in completed if word.split("=")[0] == needed.flag]
        assert len(named) == 1, needed.flag
    position = completed.index("--distributed-backend")
    assert completed[position + 1] == "gloo"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--distributed-backend", "nccl"], "--distributed-backend nccl does not work on the CPU"),
        (["--transformer-impl=transformer_engine"], "needs --transformer-impl local"),
        (["--num-workers", "2"], "--num-workers 2 does not work"),
        (["--fp8-format", "hybrid"], "--fp8-format does not work on the CPU"),
        (["--cuda-graph-impl", "local"], "--cuda-graph-impl does not work"),
    ],
)
def test_contradicting_options_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        complete_arguments(argv)


def test_refused_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    with pytest.raises(
        RuntimeError, match=r"--mtraining-cpu is for machines without a GPU, and this one has 2 \(NVIDIA"
    ):
        cpu_compat.consume_option([OPTION])
    assert not cuda_stand_in.is_installed()


def test_stand_in_does_what_is_asked_of_cuda(run_python: Runner) -> None:
    code = """
import torch
from megatron_mtraining.integration import cpu_compat
cpu_compat.activate()
cpu_compat.activate()
assert not torch.cuda.is_available()
x = torch.ones(3, device="cuda", pin_memory=True)
assert x.device.type == "cpu" and torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
assert x.cuda(non_blocking=True) is x and x.to("cuda:0").device.type == "cpu"
assert x.to(torch.device("cuda"), torch.float64).dtype == torch.float64
assert x.type() == "torch.cuda.FloatTensor" and x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
assert x.type(torch.int64).dtype == torch.int64
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begin.record(); torch.randn(100, 100) @ torch.randn(100, 100); end.record(); end.synchronize()
assert begin.elapsed_time(end) > 0
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"
assert torch.compile(lambda y: y + 1)(torch.zeros(1)).item() == 1  # eager: no compiler is asked for

from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
tracker = CudaRNGStatesTracker()
tracker.add("a", 7)
before = torch.get_rng_state()
with tracker.fork("a"):
    first = torch.rand(4, device="cuda")
assert torch.equal(torch.get_rng_state(), before)
with tracker.fork("a"):
    second = torch.rand(4, device="cuda")
assert not torch.equal(first, second) and torch.equal(first, torch.rand(4, generator=torch.Generator().manual_seed(7)))
print("all of it")
"""
    run = run_python("-c", code)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "> megatron_mtraining: no GPU; Megatron runs on the CPU over gloo (--mtraining-cpu)",
        "all of it",
    ]


def test_dataset_helper_of_a_wheel_is_checked_not_built(run_python: Runner) -> None:
    code = """
import importlib
from pathlib import Path
from megatron.core.datasets import utils
from megatron_mtraining.integration.dataset_helpers import accept_compiled_helpers
kept = [utils.compile_helpers]  # in a list: whoever has the function by name gets the other one
has_makefile = (Path(utils.__file__).parent / "Makefile").exists()
assert accept_compiled_helpers() is not has_makefile
assert (utils.compile_helpers is kept[0]) is has_makefile
first = [utils.compile_helpers]
accept_compiled_helpers()
assert utils.compile_helpers is first[0]
utils.compile_helpers()
real = importlib.import_module
def broken(name, *rest):
    if name.endswith("helpers_cpp"):
        raise ImportError("wrong ELF class")
    return real(name, *rest)
importlib.import_module = broken
try:
    has_makefile or utils.compile_helpers()
except ImportError as error:
    assert "reinstall megatron-core" in str(error) and "wrong ELF class" in str(error)
else:
    assert has_makefile
"""
    run = run_python("-c", code)
    assert run.returncode == 0, run.stderr
