"""Moving a sharded sequence from one layout to another, with one all-to-all, differentiably."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_mtraining.config import BLOCK
from megatron_mtraining.layout import Layout


@dataclass(frozen=True, eq=False)
class Placement:
    """Where a sequence lies, in units of any number of tokens (a :class:`Layout` has units of 64).

    Attributes:
        unit: tokens of a unit.
        table: int64 ``[cp_size, local_units]``, the number in the sequence of each rank's units (on the CPU).
    """

    unit: int
    table: Tensor

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, layout: Layout) -> Placement:
        """That of a layout; the same object for equal ones."""
        return cls(BLOCK, layout.block_position.long())

    @property
    def seq_len(self) -> int:
        """Tokens of the whole sequence."""
        return self.unit * self.table.numel()

    def in_units(self, unit: int) -> Tensor:
        """The table for smaller units, of which each of its own is a whole number."""
        times = self.unit // unit
        return (self.table[..., None] * times + torch.arange(times)).flatten(1)

    def is_same(self, other: Placement) -> bool:
        """Whether every token lies in the same place."""
        unit = math.gcd(self.unit, other.unit)
        return self.table.shape[0] == other.table.shape[0] and torch.equal(self.in_units(unit), other.in_units(unit))


@dataclass(frozen=True)
class Route:
    """What one rank sends and receives to get from one layout to another.

    Attributes:
        unit: tokens that travel together.
        send_order: int64 ``[local_units]``, its units in the source layout, grouped by the rank they go to.
        send_counts: units for each rank.
        receive_order: int64 ``[local_units]``, for each unit in the target layout, where it is among those received.
        receive_counts: units from each rank.
    """

    unit: int
    send_order: Tensor
    send_counts: tuple[int, ...]
    receive_order: Tensor
    receive_counts: tuple[int, ...]


def plan_route(source: Placement, target: Placement, cp_rank: int) -> Route:
    """The route of ``cp_rank``'s units from ``source`` to ``target``.

    Units travel in the order in which the sender holds them, so that both ends know the order without talking.

    Raises:
        ValueError: if the placements are not of the same sequence over the same ranks.
    """
    cp_size = source.table.shape[0]
    if source.seq_len != target.seq_len or cp_size != target.table.shape[0]:
        raise ValueError(
            f"placements of different sequences: {source.seq_len} tokens on {cp_size} ranks and {target.seq_len} tokens on "
            f"{target.table.shape[0]} ranks"
        )
    unit = math.gcd(source.unit, target.unit)
    held, wanted = source.in_units(unit), target.in_units(unit)
    new_owner = torch.empty(held.numel(), dtype=torch.int64)
    new_owner[wanted.flatten()] = torch.arange(cp_size).repeat_interleave(wanted.shape[1])
    mine = held[cp_rank]
    arrivals = [units[new_owner[units] == cp_rank] for units in held]
    arrived = torch.cat(arrivals)
    place = torch.empty(held.numel(), dtype=torch.int64)
    place[arrived] = torch.arange(arrived.numel())
    return Route(
        unit=unit,
        send_order=torch.argsort(new_owner[mine], stable=True),
        send_counts=tuple(torch.bincount(new_owner[mine], minlength=cp_size).tolist()),
        receive_order=place[wanted[cp_rank]],
        receive_counts=tuple(len(units) for units in arrivals),
    )


@lru_cache(maxsize=64)
def _route_on_device(source: Placement, target: Placement, cp_rank: int, device: torch.device) -> Route:
    route = plan_route(source, target, cp_rank)
    return Route(
        route.unit,
        route.send_order.to(device),
        route.send_counts,
        route.receive_order.to(device),
        route.receive_counts,
    )


def _exchange(x: Tensor, source: Placement, target: Placement, group: torch.distributed.ProcessGroup) -> Tensor:
    """``x [local_seq, ...]`` in the source placement -> the same shape in the target placement."""
    route = _route_on_device(source, target, group.rank(), x.device)
    units = x.reshape(-1, route.unit, *x.shape[1:])
    sent = units.index_select(0, route.send_order)
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(
        received, sent, list(route.receive_counts), list(route.send_counts), group=group
    )
    return received.index_select(0, route.receive_order).reshape(x.shape)


class _Convert(torch.autograd.Function):
    """Forward moves from ``source`` to ``target``, backward the other way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, source: Placement, target: Placement, group: torch.distributed.ProcessGroup
    ) -> Tensor:
        ctx.route = (source, target, group)
        return _exchange(x, source, target, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        source, target, group = ctx.route
        return _exchange(grad.contiguous(), target, source, group), None, None, None


def convert(x: Tensor, source: Placement, target: Placement, group: torch.distributed.ProcessGroup) -> Tensor:
    """Moves a sharded sequence to another placement.

    Args:
        x: ``[local_seq, ...]``, this rank's part in ``source``.
        source: where ``x`` lies.
        target: where the result shall lie.
        group: the context-parallel group; every rank must call.

    Returns:
        This rank's part in ``target``, same shape and dtype.
    """
    return _Convert.apply(x, source, target, group)


def convert_qkv(
    q: Tensor, k: Tensor, v: Tensor, source: Placement, target: Placement, group: torch.distributed.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`convert` for queries, keys and values in one all-to-all.

    Args:
        q: ``[local_seq, batch, heads, head_dim]``.
        k: ``[local_seq, batch, kv_heads, head_dim]``.
        v: like ``k``.
        source: where the inputs lie.
        target: where the results shall lie.
        group: the context-parallel group.

    Returns:
        q, k and v in ``target``; views into one tensor.
    """
    packed = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], dim=2)
    parts = convert(packed, source, target, group).split([x.shape[2] * x.shape[3] for x in (q, k, v)], dim=2)
    moved = [part.unflatten(2, x.shape[2:]) for part, x in zip(parts, (q, k, v), strict=True)]
    return moved[0], moved[1], moved[2]
