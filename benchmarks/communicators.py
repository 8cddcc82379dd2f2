"""Measures the GPU memory that a communicator of the rings takes: groups of all ranks, each used as a ring uses it.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.communicators --out FILE

For each of `--groups` process groups: the free memory of this rank's GPU before the group's first passes and after them (NCCL
connects at first use). A line of JSON per rank goes to FILE.RANK.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist


def ring_pass(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Sends to the next rank and receives from the one before, as the rings do."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(tensor)
    work = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % world),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % world),
        ]
    )
    for handle in work:
        handle.wait()


def taken(group: dist.ProcessGroup, tensor: torch.Tensor, passes: int = 3) -> int:
    """Bytes of this GPU's free memory that the group's first passes take."""
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    for _ in range(passes):
        ring_pass(group, tensor)
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info()
    return before - after


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    tensor = torch.zeros(1 << 20, dtype=torch.bfloat16, device="cuda")
    dist.all_reduce(tensor)  # the default group's communicator, and what NCCL takes once per process
    torch.empty_like(tensor)
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(options.groups)]
    mib = [taken(group, tensor) / 2**20 for group in groups]
    told = {
        "ranks": dist.get_world_size(),
        "gpu": torch.cuda.get_device_name(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "mib_of_each": [round(value, 1) for value in mib],
    }
    options.out.with_name(f"{options.out.name}.{rank}").write_text(json.dumps(told) + "\n")
    if rank == 0:
        print(told)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
