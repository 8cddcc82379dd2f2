"""Dealing the batch and the rotary embedding to the context-parallel ranks in the attention's layout.

Megatron slices both in zigzag, in functions that other modules import by name. Both are replaced together, by
functions that read one :class:`Layout`: if only one were, positions would silently be wrong.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from . import runtime
from .errors import RefusedError
from .packed_rotary import FUSED_PACKED_ROTARY, PACKED_ROTARY, ROPE, rotate_packed, rotate_packed_fused
from .rebind import Rebinding, rebind

BATCH_SLICER = ("megatron.core.utils", "get_batch_on_this_cp_rank")
ROTARY_SLICER = (ROPE, "get_pos_emb_on_this_cp_rank")

ROTARY_CLASSES = (
    ("megatron.core.models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding"),
    ("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding", "YarnRotaryEmbedding"),
)
"""Classes whose ``forward`` keeps sliced embeddings in an ``lru_cache``."""

METADATA_KEYS = frozenset(
    {"cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group", "dataset_id"}
)
"""Entries of a batch that have no sequence dimension."""


def deal_batch(
    batch: dict[str, Any],
    is_hybrid_cp: bool = False,
    cp_group: torch.distributed.ProcessGroup | None = None,
    hybrid_cp_group_func: Any = None,
    use_per_sequence_balancing: bool = False,
) -> dict[str, Any]:
    """Replaces Megatron's ``get_batch_on_this_cp_rank``: keeps this rank's tokens, in the attention's layout.

    Args:
        batch: tensors ``[batch, seq_len, ...]`` by name; entries that are None and metadata pass as they are.
        is_hybrid_cp: must be false.
        cp_group: the context-parallel group; Megatron's own if left out.
        hybrid_cp_group_func: not used.
        use_per_sequence_balancing: not used: packed sequences are dealt over their whole length, whatever documents they
            hold.

    Returns:
        The same dictionary, with tensors ``[batch, seq_len / cp_size, ...]``.

    Raises:
        RefusedError: for hybrid context parallelism, an attention mask, or a sequence length that does not fit the layout.
    """
    if cp_group is None:
        from megatron.core import parallel_state

        cp_group = parallel_state.get_context_parallel_group()
    if cp_group.size() == 1:
        return batch
    if is_hybrid_cp:
        raise RefusedError("--hybrid-context-parallel: groups that change from batch to batch are not built")
    if batch.get("attention_mask") is not None:
        raise RefusedError(
            "attention_mask: a mask in the batch is not supported; use --no-create-attention-mask-in-dataloader"
        )
    state = runtime.current()
    for key, value in batch.items():
        if key in METADATA_KEYS or value is None:
            continue
        layout = state.attention_layout(value.shape[1], cp_group.size())
        batch[key] = layout.shard(value, cp_group.rank(), dim=1)
        state.dealt["batch"].add(layout.seq_len)
    return batch


def deal_rotary(pos_emb: Tensor, seq_dim: int, cp_group: torch.distributed.ProcessGroup) -> Tensor:
    """Replaces Megatron's ``get_pos_emb_on_this_cp_rank``: the embedding of this rank's positions.

    Args:
        pos_emb: embedding of every position, ``seq_len`` entries along ``seq_dim``.
        seq_dim: the sequence dimension.
        cp_group: the context-parallel group.

    Raises:
        ValueError: if there is no group.
        RefusedError: if the sequence length does not fit the layout.
    """
    if cp_group is None:
        raise ValueError("cp_group must be given to deal the position embedding")
    state = runtime.current()
    layout = state.attention_layout(pos_emb.shape[seq_dim], cp_group.size())
    state.dealt["rotary"].add(layout.seq_len)
    return layout.shard(pos_emb, cp_group.rank(), dim=seq_dim)


def deal_natively() -> list[Rebinding]:
    """Puts these functions and those of packed sequences in the place of Megatron's, wherever it imported them.

    Also drops cached slices of rotary embeddings.
    """
    done = [
        rebind(*BATCH_SLICER, deal_batch),
        rebind(*ROTARY_SLICER, deal_rotary),
        rebind(*PACKED_ROTARY, rotate_packed),
    ]
    if getattr(importlib.import_module(ROPE), FUSED_PACKED_ROTARY[1]) is not None:  # None without Transformer Engine
        done.append(rebind(*FUSED_PACKED_ROTARY, rotate_packed_fused))
    drop_cached_rotary()
    return done


def drop_cached_rotary() -> None:
    """Empties the caches of rotary embeddings, which hold slices in the layout that was in use when they were made."""
    for module_name, class_name in ROTARY_CLASSES:
        getattr(importlib.import_module(module_name), class_name).forward.cache_clear()
