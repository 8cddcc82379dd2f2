"""Pretends that the ranks of a run are on several hosts, each with the GPUs of this one.

NCCL refuses two ranks of a host on one GPU, and tells hosts apart by a name that `NCCL_HOSTID` replaces (seen with 2.28.9).
With a name for each half of the ranks, four ranks fit on two GPUs: NVLink within a pretended host, sockets on the loopback
between them. What they compute counts; how long it takes does not, since the processes on a GPU take turns. Programs that
tell hosts apart by other means than NCCL see one.
"""

from __future__ import annotations

import os
import sys

HOSTS = "BENCHMARK_HOSTS"


def variables(hosts: int) -> dict[str, str]:
    """What the environment of a run on several pretended hosts has; nothing for one."""
    if hosts == 1:
        return {}
    loopback = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    across = {"NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0"}  # NVLink never joins two real hosts of this kind
    return {HOSTS: str(hosts), **loopback, **across}


def count() -> int:
    """Pretended hosts of this process' run."""
    return int(os.environ.get(HOSTS, "1"))


def name_of(host: int) -> dict[str, str]:
    """What NCCL is to take for the host of a rank; nothing on one host, which has a name of its own."""
    return {"NCCL_HOSTID": f"pretended-{host}"} if count() > 1 else {}


def place(rank: int, ranks: int) -> dict[str, str]:
    """What torchrun would tell a rank of the run on its host."""
    mine = ranks // count()
    return {"RANK": str(rank), "LOCAL_RANK": str(rank % mine), "LOCAL_WORLD_SIZE": str(mine), **name_of(rank // mine)}


def agents(ranks: int, port: int, module: tuple[str, ...]) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    """The torchrun agents of a run, one for each host: command, and variables of its own.

    Args:
        ranks: of all hosts together.
        port: where they meet, if there are several.
        module: what every rank runs, with its arguments.
    """
    start = (sys.executable, "-m", "torch.distributed.run")
    hosts = count()
    if hosts == 1:
        return [((*start, "--standalone", f"--nproc-per-node={ranks}", "-m", *module), {})]
    meet = (
        f"--nnodes={hosts}",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
        f"--nproc-per-node={ranks // hosts}",
    )
    return [((*start, *meet, f"--node-rank={host}", "-m", *module), name_of(host)) for host in range(hosts)]
