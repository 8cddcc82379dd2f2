"""Dense attention for static-batch inference, where queries are fewer than keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_inference_attention(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float | None) -> Tensor:
    """Causal attention of the last queries of a sequence over all its keys.

    Args:
        query: ``[q_len, batch, heads, head_dim]``, the last ``q_len`` positions.
        key: ``[k_len, batch, kv_heads, head_dim]``, ``k_len >= q_len``.
        value: like ``key``.
        softmax_scale: scale of the logits; ``1 / sqrt(head_dim)`` if None.

    Returns:
        ``[q_len, batch, heads * head_dim]``.

    Raises:
        ValueError: if there are fewer keys than queries.
    """
    q_len, k_len = query.shape[0], key.shape[0]
    if k_len < q_len:
        raise ValueError(f"{q_len} queries and {k_len} keys: the queries are the last positions of the keys")
    mask = None
    if 1 < q_len < k_len:
        mask = torch.ones(q_len, k_len, dtype=torch.bool, device=query.device).tril(k_len - q_len)
    out = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        attn_mask=mask,
        is_causal=q_len == k_len,
        scale=softmax_scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.permute(2, 0, 1, 3).flatten(2)
