"""Moving a sharded sequence from one layout to another, with one all-to-all, differentiably."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_mtraining.config import BLOCK
from megatron_mtraining.layout import Layout


@dataclass(frozen=True)
class Route:
    """What one rank sends and receives to get from one layout to another.

    Attributes:
        send_order: int64 ``[local_blocks]``, its blocks in the source layout, grouped by the rank they go to.
        send_counts: blocks for each rank.
        receive_order: int64 ``[local_blocks]``, for each block in the target layout, where it is among those received.
        receive_counts: blocks from each rank.
    """

    send_order: Tensor
    send_counts: tuple[int, ...]
    receive_order: Tensor
    receive_counts: tuple[int, ...]


def plan_route(source: Layout, target: Layout, cp_rank: int) -> Route:
    """The route of ``cp_rank``'s blocks from ``source`` to ``target``.

    Blocks travel in the order in which the sender holds them, so that both ends know the order without talking.

    Raises:
        ValueError: if the layouts are not of the same sequence over the same ranks.
    """
    if (source.seq_len, source.cp_size) != (target.seq_len, target.cp_size):
        raise ValueError(f"{source} and {target} are layouts of different sequences")
    new_owner = target.inverse("cpu").long() // target.local_blocks
    mine = source.block_position[cp_rank].long()
    wanted = target.block_position[cp_rank].long()
    arrivals = [
        blocks[new_owner[blocks] == cp_rank]
        for blocks in (source.block_position[rank].long() for rank in range(source.cp_size))
    ]
    arrived = torch.cat(arrivals)
    place = torch.empty(source.num_blocks, dtype=torch.int64)
    place[arrived] = torch.arange(arrived.numel())
    return Route(
        send_order=torch.argsort(new_owner[mine], stable=True),
        send_counts=tuple(torch.bincount(new_owner[mine], minlength=source.cp_size).tolist()),
        receive_order=place[wanted],
        receive_counts=tuple(len(blocks) for blocks in arrivals),
    )


@lru_cache(maxsize=64)
def _route_on_device(source: Layout, target: Layout, cp_rank: int, device: torch.device) -> Route:
    route = plan_route(source, target, cp_rank)
    return Route(route.send_order.to(device), route.send_counts, route.receive_order.to(device), route.receive_counts)


def _exchange(x: Tensor, source: Layout, target: Layout, group: torch.distributed.ProcessGroup) -> Tensor:
    """``x [local_seq, ...]`` in the source layout -> the same shape in the target layout."""
    route = _route_on_device(source, target, group.rank(), x.device)
    blocks = x.reshape(source.local_blocks, BLOCK, *x.shape[1:])
    sent = blocks.index_select(0, route.send_order)
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(
        received, sent, list(route.receive_counts), list(route.send_counts), group=group
    )
    return received.index_select(0, route.receive_order).reshape(x.shape)


class _Convert(torch.autograd.Function):
    """Forward moves from ``source`` to ``target``, backward the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Layout, target: Layout, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.route = (source, target, group)
        return _exchange(x, source, target, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        source, target, group = ctx.route
        return _exchange(grad.contiguous(), target, source, group), None, None, None


def convert(x: Tensor, source: Layout, target: Layout, group: torch.distributed.ProcessGroup) -> Tensor:
    """Moves a sharded sequence to another layout.

    Args:
        x: ``[local_seq, ...]``, this rank's part in ``source``.
        source: the layout of ``x``.
        target: the layout of the result.
        group: the context-parallel group; every rank must call.

    Returns:
        This rank's part in ``target``, same shape and dtype.
    """
    return _Convert.apply(x, source, target, group)


def convert_qkv(
    q: Tensor, k: Tensor, v: Tensor, source: Layout, target: Layout, group: torch.distributed.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`convert` for queries, keys and values in one all-to-all.

    Args:
        q: ``[local_seq, batch, heads, head_dim]``.
        k: ``[local_seq, batch, kv_heads, head_dim]``.
        v: like ``k``.
        source: the layout of the inputs.
        target: the layout of the results.
        group: the context-parallel group.

    Returns:
        q, k and v in ``target``; views into one tensor.
    """
    packed = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], dim=2)
    parts = convert(packed, source, target, group).split([x.shape[2] * x.shape[3] for x in (q, k, v)], dim=2)
    moved = [part.unflatten(2, x.shape[2:]) for part, x in zip(parts, (q, k, v), strict=True)]
    return moved[0], moved[1], moved[2]
