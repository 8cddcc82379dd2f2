"""Rings over real process groups: bit for bit what one process playing all ranks computes.

On NCCL: two and four ranks on as many GPUs; with two or three GPUs four ranks on two pretended hosts
(``benchmarks.ring.hosts``).
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from .distributed_worker import CASES, SKIPPED, arguments

ROOT = Path(__file__).parents[2]
SECONDS = 480
Place = tuple[int, int]
"""Ranks, and the hosts pretended to NCCL (0: none)."""

ON_NCCL = {"2-gpus": (2, 0), "4-gpus": (4, 0), "4-ranks-on-2-pretended-hosts": (4, 2)}


def start(place: Place, folder: Path, cases: Sequence[str] = (), **variables: str | None) -> list[dict[str, str]]:
    """Runs the cases, or all, in a process a rank; each rank's outcomes. A variable that is None is taken away."""
    world, pretended = place
    arguments = [sys.executable, "-m", "tests.core.distributed_worker"]
    more = ["--pretend-hosts", str(pretended)] if pretended else []
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    logs = [(folder / f"log.{rank}").open("w") for rank in range(world)]
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank), str(world), str(folder / "store"), str(folder / "report"), *more, *cases],
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
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Place, list[dict[str, str]]]:
    """Outcomes by ranks and pretended hosts, run on first use."""

    class Lazy(dict[Place, list[dict[str, str]]]):
        def __missing__(self, place: Place) -> list[dict[str, str]]:
            self[place] = start(place, tmp_path_factory.mktemp(f"ranks{place[0]}-{place[1]}"))
            return self[place]

    return Lazy()


def check(outcomes: dict[Place, list[dict[str, str]]], place: Place, name: str) -> None:
    for rank, outcome in enumerate(outcomes[place]):
        result = outcome.get(name, "did not end: it waited, or an earlier case failed")
        if result.startswith(SKIPPED):
            pytest.skip(result.removeprefix(SKIPPED))
        assert result == "passed", f"rank {rank} of {place[0]}:\n{result}"


def require_gpus(place: Place) -> None:
    """Skips where there are not enough GPUs, and pretended hosts where there are enough without them."""
    world, pretended = place
    found, needed = torch.cuda.device_count(), world // max(pretended, 1)
    if found < needed:
        pytest.skip(f"needs {needed} GPUs")
    if pretended and found >= world:
        pytest.skip(f"there are {found} GPUs: {world} ranks run without pretended hosts")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 4, pytest.param(8, marks=pytest.mark.full)])
def test_ranks(outcomes: dict[Place, list[dict[str, str]]], world: int, name: str) -> None:
    check(outcomes, (world, 0), name)


def test_the_worker_takes_cases_behind_its_option() -> None:
    options = arguments("1 4 store report --pretend-hosts 2 flat documents".split())
    assert (options.rank, options.world, options.pretend_hosts, options.cases) == (1, 4, 2, ["flat", "documents"])
    assert arguments("1 4 store report".split()).cases == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", ON_NCCL.values(), ids=ON_NCCL.keys())
def test_ranks_on_nccl(outcomes: dict[Place, list[dict[str, str]]], place: Place, name: str) -> None:
    require_gpus(place)
    check(outcomes, place, name)


@pytest.mark.gpu
@pytest.mark.parametrize("connections", ["1", "8", "32", None])
@pytest.mark.parametrize("place", [(2, 0), (4, 0)], ids=["2-gpus", "4-gpus"])
def test_bits_do_not_depend_on_the_number_of_connections(  # N1
    tmp_path: Path, place: Place, connections: str | None
) -> None:
    """``CUDA_DEVICE_MAX_CONNECTIONS`` orders kernels of different streams: every setting gives what one process computes."""
    require_gpus(place)
    names = ["flat", "several_chunks_a_launch", "late_ranks_and_many_passes"]
    for rank, outcome in enumerate(start(place, tmp_path, names, CUDA_DEVICE_MAX_CONNECTIONS=connections)):
        assert outcome == dict.fromkeys(names, "passed"), f"rank {rank}: {outcome}"
