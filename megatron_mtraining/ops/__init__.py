"""The operators: schemas, and the choice of their implementation.

:func:`operators` names the implementation of a call: the torch reference or the native library. There is no fallback from
one to the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import reference
from .schema import NAMESPACE, SCHEMAS, library

ARCHITECTURES = {"auto": 0, "sm80": 80, "sm90": 90}

for _name in SCHEMAS:
    library.impl(_name, getattr(reference, _name), "CPU")


@dataclass(frozen=True)
class Operators:
    """An implementation of the operators of :data:`schema.SCHEMAS`.

    Attributes:
        table: has one function per operator name.
        arch: value of the operators' ``arch`` argument.
    """

    table: Any
    arch: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)


def operators(kernel: str, q: Tensor) -> Operators:
    """The implementation that ``kernel`` (a value of ``MTrainingConfig.kernel``) means for inputs like ``q``.

    Raises:
        RuntimeError: if the native operators are asked for (by name, or by "auto" on a CUDA tensor) and are not there or
            do not take the device, the dtype or the head dimension of ``q``; the message says which.
    """
    if kernel == "reference" or (kernel == "auto" and q.device.type == "cpu"):
        return Operators(reference, 0)
    if q.device.type != "cuda":
        raise RuntimeError(f"kernel={kernel!r} needs CUDA tensors, not {q.device.type}; use kernel='reference'")
    from . import native

    arch = ARCHITECTURES[kernel]
    native.require(q.device, q.dtype, q.shape[-1], arch)
    return Operators(getattr(torch.ops, NAMESPACE), arch)
