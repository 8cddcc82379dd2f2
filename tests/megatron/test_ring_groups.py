"""How context-parallel ranks form rings, and the groups that carry them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch.distributed as dist

from megatron_mtraining.comm import RingGroups
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.documents import Documents
from megatron_mtraining.integration import RefusedError, groups
from megatron_mtraining.integration.groups import plan_rings
from megatron_mtraining.layout import Layout
from megatron_mtraining.ring_op import Context, number_of

from .ranks import run_ranks

ONE, TWO = ["a"] * 4, ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("ring", "hosts", "sizes", "inner"),
    [
        ("auto", ONE, None, 4),
        ("auto", TWO, None, 2),
        ("hierarchical", TWO, None, 2),
        ("flat", TWO, None, 4),
        ("auto", ["a", "b", "c", "d"], None, 4),  # one rank on each host
        ("auto", ["a", "b", "a", "b"], None, 4),  # no neighbours share a host
        ("auto", ["a", "a", "a", "b"], None, 4),  # unequal
        ("auto", ["a", "a", "b", "b", "a", "a"], None, 6),  # a host twice
        ("auto", ONE, [2, 2], 2),
        ("auto", TWO, [2, 2], 2),
        ("flat", TWO, [2, 2], 4),
        ("auto", ONE, [4, 1], 4),
        ("auto", ONE, [1, 4], 4),
        ("auto", ["a"] * 3 + ["b"] * 3, None, 3),
    ],
)
def test_plans(ring, hosts, sizes, inner):
    assert plan_rings(ring, hosts, sizes, False).inner_size == inner


@pytest.mark.parametrize(
    ("ring", "hosts", "sizes", "expected"),
    [
        ("hierarchical", ONE, None, "--mtraining-ring hierarchical: all 4.*one host.*auto"),
        ("hierarchical", ["a", "b", "c", "d"], None, "--mtraining-ring hierarchical: one rank on each host"),
        ("hierarchical", ["a", "a", "a", "b"], None, r"hosts hold \[3, 1\] adjacent ranks"),
        ("auto", ["a", "b", "a", "b"], [2, 2], "--hierarchical-context-parallel-sizes 2 2: .*cross hosts"),
        ("auto", ONE, [2, 2, 1], "needs two sizes"),
        ("auto", ONE, [-2, -2], "sizes -2 -2: .*needs two sizes from 1 up"),
    ],
)
def test_rings_that_cannot_be_formed_are_refused(ring, hosts, sizes, expected):
    with pytest.raises(RefusedError, match=expected):
        plan_rings(ring, hosts, sizes, False)


def test_an_inner_ring_may_cross_hosts_if_asked_to():
    assert plan_rings("auto", ["a", "b", "a", "b"], [2, 2], True).inner_size == 2


def test_a_group_without_rings_is_an_error():
    assert groups.ring_groups(None).cp is None


class _Group:
    """Stands in for a process group."""


def test_attention_does_not_hold_groups_that_were_destroyed():
    group = _Group()
    held = weakref.ref(group)
    number_of(
        Context(
            config=MTrainingConfig(), layout=Layout.contiguous(64, 1), documents=Documents.single(64),
            groups=RingGroups(cp=group), scale=1.0, inner_size=1, column_capacity=64,
        )
    )  # fmt: skip
    del group
    gc.collect()
    assert held() is not None
    groups.destroy_ring_groups()
    gc.collect()
    assert held() is None


def _two_groups(rank):
    """Two context-parallel groups, of which one does not begin at rank 0, on two pretended hosts each."""
    cp_ranks = [[0, 2], [1, 3]]
    cp = [dist.new_group(ranks) for ranks in cp_ranks][rank % 2]
    with pytest.raises(RefusedError, match="no ring groups for the context-parallel ranks"):
        groups.ring_groups(cp)
    plan = groups.create_ring_groups(cp, "auto")
    assert plan.inner_size == 2
    rings = groups.ring_groups(cp)
    assert rings.cp is cp
    assert rings.inner is None
    assert dist.get_process_group_ranks(rings.inner_grad) == cp_ranks[rank % 2]
    assert groups.count_made() == 1
    rebound = [dist.new_group(ranks) for ranks in cp_ranks][rank % 2]
    assert groups.ring_groups(rebound).cp is rebound  # looked up again: never the old group
    groups.destroy_ring_groups()
    with pytest.raises(RefusedError):
        groups.ring_groups(cp)


def _by_host(rank):
    """Four ranks on two pretended hosts: both rings and both gradient rings are made."""
    groups.host_identity = lambda: f"host {rank // 2}"
    cp = dist.new_group([0, 1, 2, 3])
    assert groups.create_ring_groups(cp, "auto").inner_size == 2
    rings = groups.ring_groups(cp)
    inner, outer = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
    for name, expected in (("inner", inner), ("outer", outer), ("inner_grad", inner), ("outer_grad", outer)):
        assert dist.get_process_group_ranks(getattr(rings, name)) == expected
    assert rings.inner_size("auto") == 2
    assert groups.count_made() == len(groups.groups_to_make(4, 2, False)) == 4


def _from_megatron(rank):
    """Megatron's hierarchical groups carry keys; only the gradient rings are made."""
    inner = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    outer = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    cp = dist.new_group([0, 1, 2, 3])
    assert groups.create_ring_groups(cp, "auto", [inner, outer]).inner_size == 2
    rings = groups.ring_groups(cp)
    assert (rings.inner, rings.outer) == (inner, outer)
    assert groups.count_made() == 2


def _crossing(rank):
    """Inner rings that would cross pretended hosts: the same one line on every rank, before any group is made."""
    groups.host_identity = lambda: f"host {rank % 2}"
    inner = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    outer = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    cp = dist.new_group([0, 1, 2, 3])
    made = groups.count_made()
    with pytest.raises(
        RefusedError, match=r"sizes 2 2: an inner ring of 2 ranks would cross hosts.*inner-across-hosts"
    ):
        groups.create_ring_groups(cp, "auto", [inner, outer])
    assert groups.count_made() == made
    assert groups.create_ring_groups(cp, "auto", [inner, outer], across_hosts=True).inner_size == 2
    assert groups.count_made() == made + len(groups.groups_to_make(4, 2, True))
    assert groups.ring_groups(cp).hosts == 2
    # Neighbours on different hosts form no inner rings by themselves, and asking for some is refused.
    assert groups.create_ring_groups(cp, "auto").inner_size == 4
    with pytest.raises(RefusedError, match="--mtraining-ring hierarchical: hosts hold .* form no equal inner rings"):
        groups.create_ring_groups(cp, "hierarchical")
    groups.destroy_ring_groups()


def _forgotten(_):
    groups.destroy_ring_groups()
    assert groups.count_made() == 0


def test_groups_over_processes(tmp_path):
    run_ranks([_two_groups, _from_megatron, _forgotten, _crossing, _by_host], 4, tmp_path)
