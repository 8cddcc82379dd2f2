"""Megatron's compiled dataset helper where megatron-core is installed as a wheel.

At start-up Megatron runs `make` beside the helper's source and exits the process if that fails. The wheel ships the
helper compiled, without the Makefile, so an installed Megatron could never start. Where the Makefile is absent the
call becomes a check that the compiled helper can be imported; elsewhere nothing changes.
"""

import importlib
from pathlib import Path

from .rebind import rebind


def accept_compiled_helpers() -> bool:
    """Replace Megatron's `compile_helpers` by an import check if there is no Makefile; returns whether there is none.

    Bridge imports the function by name, so it is replaced in every module that holds it. Idempotent.
    """
    from megatron.core.datasets import utils as dataset_utils

    if (Path(dataset_utils.__file__).parent / "Makefile").exists():
        return False
    if not hasattr(dataset_utils.compile_helpers, "__wrapped__"):  # not replaced before
        rebind(dataset_utils.__name__, "compile_helpers", check_compiled_helpers)
    return True


def check_compiled_helpers() -> None:
    """Raise ImportError, with what to do, unless Megatron's compiled dataset helper can be imported."""
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError as error:
        raise ImportError(
            "megatron-core is installed without its Makefile, and its compiled dataset helper does not load "
            f"({error}): reinstall megatron-core for this Python and platform"
        ) from error
