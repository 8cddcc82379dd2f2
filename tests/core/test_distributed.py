"""Rings over real process groups: bit for bit what one process playing all ranks computes."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from .distributed_worker import CASES

ROOT = Path(__file__).parents[2]
SECONDS = 480


def start(world: int, folder: Path, cases: Sequence[str] = (), **variables: str | None) -> list[dict[str, str]]:
    """Runs the cases, or all, in ``world`` processes; each rank's outcomes. A variable that is None is taken away."""
    arguments = [sys.executable, "-m", "tests.core.distributed_worker"]
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    logs = [(folder / f"log.{rank}").open("w") for rank in range(world)]
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank), str(world), str(folder / "store"), str(folder / "report"), *cases],
            cwd=ROOT, env=environment, stdout=logs[rank], stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        for process in ranks:
            process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in ranks:
            process.kill()
    return [dict(map(json.loads, (folder / f"report.{rank}").read_text().splitlines())) for rank in range(world)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, str]]]:
    """Outcomes by number of processes, run on first use."""
    found: dict[int, list[dict[str, str]]] = {}

    class Lazy(dict):
        def __missing__(self, world: int) -> list[dict[str, str]]:
            self[world] = start(world, tmp_path_factory.mktemp(f"ranks{world}"))
            return self[world]

    return Lazy(found)


def check(outcomes: dict[int, list[dict[str, str]]], world: int, name: str) -> None:
    for rank, outcome in enumerate(outcomes[world]):
        result = outcome.get(name, "did not end: it waited, or an earlier case failed")
        assert result == "passed", f"rank {rank} of {world}:\n{result}"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 4, pytest.param(8, marks=pytest.mark.full)])
def test_ranks(outcomes: dict[int, list[dict[str, str]]], world: int, name: str) -> None:
    check(outcomes, world, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_on_nccl(outcomes: dict[int, list[dict[str, str]]], world: int, name: str) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    check(outcomes, world, name)


@pytest.mark.gpu
@pytest.mark.parametrize("connections", ["1", "8", "32", None])
def test_bits_do_not_depend_on_the_number_of_connections(tmp_path: Path, connections: str | None) -> None:  # N1
    """``CUDA_DEVICE_MAX_CONNECTIONS`` orders kernels of different streams: every setting gives what one process computes."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    names = ["flat", "several_chunks_a_launch", "late_ranks_and_many_passes"]
    for rank, outcome in enumerate(start(2, tmp_path, names, CUDA_DEVICE_MAX_CONNECTIONS=connections)):
        assert outcome == dict.fromkeys(names, "passed"), f"rank {rank}: {outcome}"
