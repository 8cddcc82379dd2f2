"""Which megatron-core the plugin runs on."""

from __future__ import annotations

import re
from importlib.util import find_spec

from .errors import RefusedError

OLDEST = (0, 19)
"""First megatron-core whose hooks the plugin knows: its training arguments and model builders differ before."""

SUPPORTED = ">= 0.19 (tested with 0.19.2)"


def check_megatron_version(version: str | None = None) -> None:
    """Refuses a megatron-core that is too old, or none at all.

    Args:
        version: the version to check; the imported megatron-core's own if left out (a source checkout counts).

    Raises:
        RefusedError: naming the version found and the supported range.
    """
    found = _megatron_version() if version is None else version
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None or tuple(map(int, match.groups())) < OLDEST:
        raise RefusedError(f"megatron-core {found} is not supported: install megatron-core {SUPPORTED}")


def check_training_package() -> None:
    """Refuses a megatron-core without Megatron's training loop: parts of a checkout, or another package of that name.

    Raises:
        RefusedError: naming where megatron.core is.
    """
    if find_spec("megatron.training") is None:
        import megatron.core

        raise RefusedError(
            f"megatron.training was not found beside megatron.core ({next(iter(megatron.core.__path__), '?')}): install "
            f"megatron-core {SUPPORTED}, or put a whole Megatron-LM checkout on PYTHONPATH"
        )


def _megatron_version() -> str:
    """The version of the megatron.core that Python imports, checkout or wheel."""
    try:
        from megatron.core.package_info import __shortversion__
    except ImportError as missing:
        raise RefusedError(f"megatron-core was not found ({missing}): install megatron-core {SUPPORTED}") from missing
    return str(__shortversion__)
