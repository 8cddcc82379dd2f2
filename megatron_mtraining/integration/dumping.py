"""Writing the indices of chosen layers and iterations to files, for debugging."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.index import VerticalSlashIndex
from megatron_mtraining.index_dump import save_index

from .errors import RefusedError
from .layer_plan import layers_of, parse_numbers
from .options import option_name, require_lines


@dataclass
class IndexDump:
    """Which indices go to which folder.

    Attributes:
        folder: where the files go.
        iterations: those of Megatron's log, from 1.
        layers: from 0; None: all.
    """

    folder: Path
    iterations: frozenset[int]
    layers: frozenset[int] | None = None
    _written: set[tuple[int, int]] = field(default_factory=set)

    def __call__(
        self, index: VerticalSlashIndex, iteration: int, layer: int, cp_group: torch.distributed.ProcessGroup | None
    ) -> None:
        """Writes an index, on the first rank of its context-parallel group and for the first call of an iteration.

        Waits for the device, but only where a file is written.
        """
        if iteration not in self.iterations or (self.layers is not None and layer not in self.layers):
            return
        if (iteration, layer) in self._written or (cp_group is not None and cp_group.rank() != 0):
            return
        self._written.add((iteration, layer))
        tp, dp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()
        path = self.folder / f"iteration{iteration:07d}_layer{layer:03d}_tp{tp}_dp{dp}.pt"
        save_index(path, index, iteration=iteration, layer=layer, tensor_parallel_rank=tp, data_parallel_rank=dp)


def read_dump_options(args: Any, config: MTrainingConfig) -> IndexDump | None:
    """The dump that the options describe, if any.

    Raises:
        RefusedError: for a value that is not valid; names the option, the value and the valid ones.
    """
    folder, steps, layers = args.mtraining_dump_index, args.mtraining_dump_steps, args.mtraining_dump_layers
    iterations = parse_numbers(option_name("dump_steps"), steps, 1, None)
    numbers = None
    if layers is not None:
        numbers = frozenset(parse_numbers(option_name("dump_layers"), layers, 0, layers_of(args) - 1))
    if folder is None:
        if numbers is not None or iterations != [1]:
            raise RefusedError(f"{option_name('dump_layers')} and {option_name('dump_steps')} need a folder: give "
                               f"{option_name('dump_index')} DIR")  # fmt: skip
        return None
    if not folder:
        raise RefusedError(f"{option_name('dump_index')} '': must name a folder")
    require_lines(option_name("dump_index"), config)
    return IndexDump(Path(folder), frozenset(iterations), numbers)


def dump_from_args(args: Any, config: MTrainingConfig) -> IndexDump | None:
    """:func:`read_dump_options`; makes the folder.

    Raises:
        RefusedError: as there, and if the folder cannot be made or written.
    """
    dump = read_dump_options(args, config)
    if dump is not None:
        option = f"{option_name('dump_index')} {dump.folder}"
        try:
            dump.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RefusedError(f"{option}: cannot make the folder ({error.strerror})") from error
        if not os.access(dump.folder, os.W_OK | os.X_OK):
            raise RefusedError(f"{option}: cannot write into the folder")
    return dump
