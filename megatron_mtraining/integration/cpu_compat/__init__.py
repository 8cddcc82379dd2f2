"""Megatron's whole training loop on the CPU, for trying the plugin and for tests. Never active where there is a GPU.

Megatron-LM requires CUDA: it asks for devices, streams, random states and pinned memory by name. This layer makes an
unmodified Megatron run over gloo on CPU tensors. It is separate from the plugin: nothing else imports it, and without
the launcher's option `--mtraining-cpu` none of it is loaded. Its parts:

- `arguments.py`: the Megatron options that CPU training needs, added to the command line or, if contradicted, refused;
- `cuda_stand_in.py`: what `torch.cuda` answers, and `device="cuda"` made to mean the CPU;
- `megatron_patches.py`: the few Megatron functions that insist on a GPU.

What does not work: Transformer Engine, fused kernels, CUDA graphs, NCCL, sequence parallelism with the local RMSNorm.
"""

from megatron_mtraining.integration.cpu_compat.arguments import OPTION, complete_arguments

__all__ = ["OPTION", "activate", "complete_arguments", "consume_option"]


def consume_option(argv: list[str]) -> list[str]:
    """Take `--mtraining-cpu` out of `argv`; if it was there, activate the layer and add the options that it needs.

    Args:
        argv: the command line without the program's name.

    Returns:
        The command line to give to Megatron (a new list; equal to `argv` where the option is absent).

    Raises:
        RuntimeError: a GPU is present.
        ValueError: `argv` contains an option that cannot work on the CPU.
    """
    if OPTION not in argv:
        return list(argv)
    completed = complete_arguments([word for word in argv if word != OPTION])
    activate()
    return completed


def activate() -> None:
    """Make Megatron run on the CPU in this process, once and for all, and say so on rank 0. Idempotent.

    Raises:
        RuntimeError: a GPU is present.
    """
    from megatron_mtraining.integration.cpu_compat import cuda_stand_in, megatron_patches

    if cuda_stand_in.is_installed():
        return
    cuda_stand_in.refuse_gpu()
    megatron_patches.import_megatron()  # what checks for a GPU at import time must see the truth
    cuda_stand_in.install()
    megatron_patches.apply()
