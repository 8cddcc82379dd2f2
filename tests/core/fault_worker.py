"""One rank of the fault tests: ``python -m tests.core.fault_worker RANK WORLD STORE_FILE FAULT SECONDS BACKEND``.

Rank 1 has the fault; the others say what they saw of it in their last line. On NCCL
the watchdog of torch ends the process instead.
"""

import datetime
import os
import resource
import signal
import sys
import time

import torch
import torch.distributed as dist

from megatron_mtraining import Layout, MTrainingConfig, mtraining_attention

PASSES = 2000
GROWTH = 64 * 2**20  # bytes; a leaked chunk a pass would be far more


def attend(seed: int = 0) -> list[torch.Tensor]:
    """Forward and backward over the ring: two passes. Returns the output and the gradients."""
    on_gpu = dist.get_backend() == "nccl"
    seq_len, head_dim = (1024, 64) if on_gpu else (256, 16)
    layout = Layout.striped(seq_len, dist.get_world_size())
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(1, seq_len, heads, head_dim, generator=generator) for heads in (2, 1, 1)]
    if on_gpu:
        leaves = [x.bfloat16().cuda() for x in leaves]
    leaves = [layout.shard(x, dist.get_rank()).requires_grad_() for x in leaves]
    out = mtraining_attention(*leaves, config=MTrainingConfig(top_p=0.8), layout=layout, cp_group=dist.group.WORLD)
    results = [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
    if on_gpu:
        torch.cuda.synchronize()  # a fault is met here, not in a later pass
    return results


def memory() -> int:
    """Most bytes this process has had, on its GPU if it uses one."""
    if dist.get_backend() == "nccl":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def many_passes() -> None:
    """The same bits in every pass, and no memory left behind."""
    first = attend()
    for _ in range(20):
        attend()
    before = memory()
    for _ in range(PASSES // 2):
        last = attend()
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
    grown = memory() - before
    assert grown < GROWTH, f"{grown:,} bytes more after {PASSES} passes"
    print(f"SEEN {PASSES} passes", flush=True)


def main() -> None:
    store, fault, backend = sys.argv[3], sys.argv[4], sys.argv[6]
    rank, world, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[5])
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=seconds)
    )
    if fault == "none":
        many_passes()
        return
    attend()
    began = time.monotonic()
    if rank == 1 and fault == "sleeps":
        time.sleep(40 * seconds)  # longer than torch waits on NCCL; the test ends this rank
    elif rank == 1 and fault == "is_killed":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        attend()
    except RuntimeError as error:
        print(f"SEEN after {time.monotonic() - began:.1f} s: {error}".splitlines()[0], flush=True)
        os._exit(3)  # a group that failed cannot be destroyed in order


if __name__ == "__main__":
    main()
