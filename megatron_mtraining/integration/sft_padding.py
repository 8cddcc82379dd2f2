"""Padding in Megatron's packed fine-tuning data, so that conversations begin where attention can tell them apart."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

from megatron_mtraining.config import BLOCK

from .rebind import replace_method


def separate_padding(sample: dict[str, Any], pad: int, granule: int) -> dict[str, Any]:
    """Makes a document of its own of the padding at the end of a packed sample.

    Megatron's ``SFTDataset`` counts it to the last document, whose last rows, which choose the lines that are kept, would
    be padding.

    Args:
        sample: of ``SFTDataset``; changed in place.
        pad: the padding token, of tokens and labels.
        granule: documents begin at its multiples.
    """
    is_real = (sample["tokens"] != pad) | (sample["labels"] != pad)
    length = is_real.numel()
    # The last label of a conversation has no token of its own in the sample, so real tokens end one later at most.
    end = -(-int(is_real.nonzero().max() + 1) // granule) * granule if is_real.any() else 0
    bounds = sample["cu_seqlens"]
    last = int((bounds < length).sum())
    if not int(bounds[last - 1]) < end < length:
        return sample
    bounds = bounds.clone()
    bounds[last] = end
    bounds[last + 1 :] = length
    sample["cu_seqlens"], sample["max_seqlen"] = bounds, bounds.diff().max()
    return sample


def pad_documents(cp_size: int) -> list[Callable[[], None]]:
    """Lets Megatron's ``SFTDataset`` begin conversations at multiples of 64 tokens, which attention needs.

    It pads them to multiples of ``2 * context_parallel_size`` of its config, and not at all on one rank.

    Args:
        cp_size: context-parallel ranks; padding also stays a multiple of what Megatron's own layout needs.

    Returns:
        Functions that undo it.
    """
    from megatron.training.datasets.sft_dataset import SFTDataset

    granule = math.lcm(BLOCK, 2 * cp_size)

    def padded(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self.config = copy.copy(self.config)
            self.config.context_parallel_size = granule // 2

        return __init__

    def separated(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __getitem__(self: Any, index: int) -> dict[str, Any]:
            return separate_padding(original(self, index), self.config.tokenizer.pad, granule)

        return __getitem__

    return [replace_method(SFTDataset, "__init__", padded), replace_method(SFTDataset, "__getitem__", separated)]
