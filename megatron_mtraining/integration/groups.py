"""The process groups of the rings, made once at set-up by all ranks.

Megatron's context-parallel group carries keys and values of a flat ring, and its hierarchical groups (if
``--hierarchical-context-parallel-sizes`` is given) those of a hierarchical one. Everything else is made here, right
after
Megatron has made its own groups: made lazily inside attention, pipeline stages would wait for each other for ever.

Communicators made per rank: :func:`groups_to_make`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_mtraining import ring_op
from megatron_mtraining.comm import RingGroups

from .errors import RefusedError
from .options import option_name

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class RingPlan:
    """How the ranks of one context-parallel group form rings.

    Attributes:
        inner_size: ranks of an inner ring; the size of the group for a flat ring.
        reason: one phrase for the log.
    """

    inner_size: int
    reason: str


def groups_to_make(size: int, inner_size: int, megatron_has_them: bool) -> tuple[str, ...]:
    """The fields of :class:`RingGroups` for which groups are made, for ``size`` ranks in inner rings of ``inner_size``.

    Args:
        megatron_has_them: whether Megatron's hierarchical groups carry the keys.
    """
    if size == 1:
        return ()
    if inner_size == size:
        return ("inner_grad",)
    return ("inner_grad", "outer_grad") if megatron_has_them else ("inner", "outer", "inner_grad", "outer_grad")


@dataclass
class _Registry:
    """The rings of this process by the global ranks of their context-parallel group, and the groups made for them."""

    rings: dict[tuple[int, ...], RingGroups] = field(default_factory=dict)
    made: list[dist.ProcessGroup] = field(default_factory=list)


_registry = _Registry()


def host_identity() -> str:
    """What distinguishes this host from others: containers of one machine count as one host."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def plan_rings(
    ring: str, hosts: Sequence[str], hierarchical_sizes: Sequence[int] | None, across_hosts: bool
) -> RingPlan:
    """Decides how one context-parallel group forms rings.

    Args:
        ring: ``auto``, ``flat`` or ``hierarchical``.
        hosts: the host of each rank of the group, in rank order.
        hierarchical_sizes: Megatron's ``--hierarchical-context-parallel-sizes``, inner first, if given.
        across_hosts: whether an inner ring may cross hosts.

    Raises:
        RefusedError: if the ring asked for cannot be formed; names the option and what is valid.
    """
    size = len(hosts)
    if ring == "flat" or size == 1:
        return RingPlan(size, "flat ring asked for" if ring == "flat" else "one rank")
    if hierarchical_sizes:
        return _plan_given(hosts, hierarchical_sizes, across_hosts)
    runs = _runs(hosts)
    if len(runs) == 1:
        if ring == "hierarchical":
            raise RefusedError(
                f"{option_name('ring')} hierarchical: all {size} context-parallel ranks are on one host; use auto or "
                "flat, or give --hierarchical-context-parallel-sizes"
            )
        return RingPlan(size, "all ranks are on one host")
    regular = len(set(runs)) == 1 and len(runs) == len(set(hosts))
    if not regular or runs[0] == 1:
        reason = (
            "one rank on each host" if regular else f"hosts hold {runs} adjacent ranks, which form no equal inner rings"
        )
        if ring == "hierarchical":
            raise RefusedError(f"{option_name('ring')} hierarchical: {reason}; use auto or flat")
        return RingPlan(size, reason)
    return RingPlan(runs[0], f"{len(runs)} hosts with {runs[0]} ranks each")


def _plan_given(hosts: Sequence[str], sizes: Sequence[int], across_hosts: bool) -> RingPlan:
    """The plan of Megatron's hierarchical sizes, level 0 (adjacent ranks) being the inner ring."""
    option = f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}"
    if len(sizes) != 2 or min(sizes) < 1 or sizes[0] * sizes[1] != len(hosts):
        raise RefusedError(
            f"{option}: MTraining attention needs two sizes from 1 up, inner and outer, whose product is {len(hosts)}"
        )
    inner = sizes[0]
    crossing = any(len(set(hosts[first : first + inner])) > 1 for first in range(0, len(hosts), inner))
    if crossing and not across_hosts:
        raise RefusedError(
            f"{option}: an inner ring of {inner} ranks would cross hosts; use inner rings within a host, or allow it "
            f"with {option_name('inner_across_hosts')}"
        )
    return RingPlan(inner if 1 < inner < len(hosts) else len(hosts), option)


def _runs(hosts: Sequence[str]) -> list[int]:
    """Lengths of the runs of equal neighbours."""
    runs = [1]
    for before, after in pairwise(hosts):
        if before == after:
            runs[-1] += 1
        else:
            runs.append(1)
    return runs


def create_ring_groups(
    cp_group: dist.ProcessGroup,
    ring: str,
    hierarchical: Sequence[dist.ProcessGroup] | None = None,
    across_hosts: bool = False,
    timeout: timedelta | None = None,
) -> RingPlan:
    """Makes the extra groups of every context-parallel group of the world. Collective: every rank of the world must
    call.

    Args:
        cp_group: this rank's context-parallel group.
        ring: ``MTrainingConfig.ring``.
        hierarchical: Megatron's hierarchical groups of this rank, inner first, if it made them.
        across_hosts: whether an inner ring may cross hosts.
        timeout: of the groups' operations; the backend's default if left out.

    Returns:
        The plan of this rank's group.

    Raises:
        RefusedError: if the ring asked for cannot be formed (on every rank of the group concerned).
    """
    mine = tuple(dist.get_process_group_ranks(cp_group))
    sizes = [dist.get_world_size(group) for group in hierarchical] if hierarchical else None
    everyone: list[tuple[tuple[int, ...], str]] = [(mine, "")] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, host_identity()))
    host_of = [host for _, host in everyone]
    plans = {
        ranks: plan_rings(ring, [host_of[rank] for rank in ranks], sizes, across_hosts)
        for ranks in sorted({ranks for ranks, _ in everyone})
    }
    make = partial(_new_group, backend=dist.get_backend(cp_group), timeout=timeout)
    for ranks, plan in plans.items():
        rings = _make(ranks, plan, make, None if ranks != mine else hierarchical, bool(sizes))
        if ranks == mine:
            _registry.rings[mine] = replace(rings, cp=cp_group, hosts=len({host_of[rank] for rank in mine}))
    return plans[mine]


def _make(
    ranks: tuple[int, ...],
    plan: RingPlan,
    make: Callable[[Sequence[Sequence[int]]], dist.ProcessGroup | None],
    hierarchical: Sequence[dist.ProcessGroup] | None,
    megatron_has_them: bool,
) -> RingGroups:
    """Makes the extra groups of one context-parallel group; ranks outside it take part and keep nothing."""
    inner_ranks = [ranks[first : first + plan.inner_size] for first in range(0, len(ranks), plan.inner_size)]
    outer_ranks = [ranks[place :: plan.inner_size] for place in range(plan.inner_size)]
    made: dict[str, Any] = {
        name: make(inner_ranks if name.startswith("inner") else outer_ranks)
        for name in groups_to_make(len(ranks), plan.inner_size, megatron_has_them)
    }
    if plan.inner_size < len(ranks) and hierarchical:
        made |= {"inner": hierarchical[0], "outer": hierarchical[1]}
    return RingGroups(**made)


def _new_group(
    rank_lists: Sequence[Sequence[int]], backend: str, timeout: timedelta | None
) -> dist.ProcessGroup | None:
    """A group for each list of ranks, made by the whole world; returns the one that this rank belongs to."""
    mine = None
    for ranks in rank_lists:
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        if dist.get_rank() in ranks:
            mine = group
            _registry.made.append(group)
    return mine


def ring_groups(cp_group: dist.ProcessGroup | None) -> RingGroups:
    """The ring groups of a context-parallel group, looked up at each call: evaluation may rebind the group.

    Raises:
        RefusedError: if none were made for it.
    """
    if cp_group is None:
        return RingGroups()
    ranks = tuple(dist.get_process_group_ranks(cp_group))
    if ranks not in _registry.rings:
        raise RefusedError(
            f"no ring groups for the context-parallel ranks {list(ranks)}: call "
            "megatron_mtraining.integration.create_ring_groups on every rank after making the group"
        )
    rings = _registry.rings[ranks]
    return rings if rings.cp is cp_group else replace(rings, cp=cp_group)


def destroy_ring_groups() -> None:
    """Destroys the groups made here and forgets all of them, and what attention remembers of its calls over them; called
    before Megatron destroys its own.
    """
    ring_op.forget_contexts()
    for group in _registry.made:
        if dist.is_initialized():
            dist.destroy_process_group(group)
    _registry.made.clear()
    _registry.rings.clear()


def count_made() -> int:
    """Communicators made here that this rank belongs to."""
    return len(_registry.made)
