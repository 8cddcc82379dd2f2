"""Running a check in several processes of one gloo group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist


def _enter(rank: int, world_size: int, store: str, checks: Sequence[Callable[[int], None]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    for check in checks:
        check(rank)
        dist.barrier()
    dist.destroy_process_group()


def run_ranks(checks: Sequence[Callable[[int], None]], world_size: int, folder: Path) -> None:
    """Runs every check, a module-level function of the rank, in ``world_size`` processes; failures are raised here."""
    torch.multiprocessing.spawn(_enter, (world_size, str(folder / "store"), checks), nprocs=world_size)
