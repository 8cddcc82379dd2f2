"""One process with Megatron's groups, on the GPU or, for development, on the CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def single_rank() -> Iterator[torch.device]:
    """Model-parallel groups of this process alone; yields the device. On the CPU Megatron is made to run without a GPU."""
    cuda = torch.cuda.is_available()
    if not cuda:
        from megatron_mtraining.integration import cpu_compat

        cpu_compat.activate()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "nccl" if cuda else "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1
        )
        try:
            parallel_state.initialize_model_parallel()
            if cuda:
                model_parallel_cuda_manual_seed(1)
            yield torch.device("cuda" if cuda else "cpu")
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
