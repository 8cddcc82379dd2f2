"""Pretended hosts: more ranks than GPUs on NCCL, for correctness.

NCCL refuses two ranks on one GPU of one host, and takes them for ranks of two hosts if each process says another host's name
(``NCCL_HOSTID``). Four ranks on two GPUs are then two hosts of two: ranks of a pretended host talk over NVLink, those of
different ones over NCCL's socket transport on the loopback device. Two processes share each GPU by time slices and every
exchange waits for both slices, so times of such a run mean nothing.
"""

from __future__ import annotations

OPTIONS = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
}
"""What keeps NCCL to sockets between hosts, and away from NVLink's multicast."""


def local_size(world: int, hosts: int, gpus: int) -> int:
    """Ranks of a pretended host.

    Raises:
        ValueError: if the ranks are not as many for every host, or a host has more of them than there are GPUs.
    """
    if hosts < 2 or world % hosts:
        raise ValueError(f"{hosts} pretended hosts: must be at least 2 and divide the {world} ranks")
    if world // hosts > gpus:
        raise ValueError(f"{world} ranks on {hosts} pretended hosts: needs {world // hosts} GPUs, there are {gpus}")
    return world // hosts


def environment(rank: int, local: int) -> dict[str, str]:
    """Variables of a rank's process; ``local`` ranks a host. To be set before NCCL makes its first communicator."""
    return {**OPTIONS, "NCCL_HOSTID": f"pretended-host-{rank // local}"}


def label(hosts: int) -> str:
    """What rows of such a run say."""
    return f"{hosts} pretended hosts sharing GPUs: no times"
