"""Where the ranks of a training run are: on this host, or on several pretended ones (`benchmarks.ring.hosts`).

Of pretended hosts each has the GPUs of this one, so that four ranks fit on two GPUs. What they compute counts; how long it
takes does not. Programs that tell hosts apart by other means than NCCL see one.
"""

from __future__ import annotations

import os
import sys

from .ring.hosts import environment

HOSTS = "BENCHMARK_HOSTS"


def variables(hosts: int) -> dict[str, str]:
    """What the environment of a run on several pretended hosts has; nothing for one."""
    return {HOSTS: str(hosts)} if hosts > 1 else {}


def count() -> int:
    """Pretended hosts of this process' run; 1 if its ranks are on the real one."""
    return int(os.environ.get(HOSTS, "1"))


def place(rank: int, ranks: int) -> dict[str, str]:
    """What torchrun would tell a rank of the run on its host, and what NCCL is to take for that."""
    mine = ranks // count()
    numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank % mine), "LOCAL_WORLD_SIZE": str(mine)}
    return numbers | (environment(rank, mine) if count() > 1 else {})


def agents(ranks: int, port: int, module: tuple[str, ...]) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    """The torchrun agents of a run, one for each host: command, and variables of its own.

    Args:
        ranks: of all hosts together.
        port: where they meet, if there are several.
        module: what every rank runs, with its arguments.
    """
    start = (sys.executable, "-m", "torch.distributed.run")
    hosts, mine = count(), ranks // count()
    if hosts == 1:
        return [((*start, "--standalone", f"--nproc-per-node={ranks}", "-m", *module), {})]
    meet = (f"--nnodes={hosts}", "--master-addr=127.0.0.1", f"--master-port={port}", f"--nproc-per-node={mine}")
    return [
        ((*start, *meet, f"--node-rank={host}", "-m", *module), environment(host * mine, mine)) for host in range(hosts)
    ]
