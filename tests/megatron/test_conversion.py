"""Routes between layouts: every block reaches the rank and the place that the other layout gives it."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_mtraining import Layout
from megatron_mtraining.integration.conversion import Placement, convert, convert_qkv, plan_route

from .ranks import run_ranks

SEQ = 2048


def layouts(cp_size):
    return [
        Layout.striped(SEQ, cp_size),
        Layout.striped(SEQ, cp_size, 128),
        Layout.zigzag(SEQ, cp_size),
        Layout.contiguous(SEQ, cp_size),
    ]


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_routes_between_all_layouts(cp_size):
    for source, target in itertools.product(layouts(cp_size), repeat=2):
        routes = [plan_route(Placement.of(source), Placement.of(target), rank) for rank in range(cp_size)]
        sent = [
            source.block_position[rank][route.send_order].split(route.send_counts) for rank, route in enumerate(routes)
        ]
        for rank, route in enumerate(routes):
            assert tuple(len(blocks[rank]) for blocks in sent) == route.receive_counts
            received = torch.cat([blocks[rank] for blocks in sent])
            assert torch.equal(received[route.receive_order], target.block_position[rank])


def test_layouts_of_different_sequences_are_refused():
    with pytest.raises(ValueError, match="different sequences"):
        plan_route(Placement.of(Layout.zigzag(1024, 2)), Placement.of(Layout.striped(2048, 2)), 0)


def _there_and_back(rank):
    """Values arrive where they belong, and gradients come back the same way, for unequal head dimensions too."""
    group = torch.distributed.group.WORLD
    source, target = Layout.zigzag(SEQ, 4), Layout.striped(SEQ, 4)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(SEQ, 2, heads, dim, generator=generator) for heads, dim in ((4, 8), (2, 8), (2, 6))]
    weights = [torch.randn(x.shape, generator=generator) for x in whole]
    mine = [source.shard(x, rank, dim=0).requires_grad_() for x in whole]
    moved = convert_qkv(*mine, Placement.of(source), Placement.of(target), group)
    for got, x in zip(moved, whole, strict=True):
        assert torch.equal(got, target.shard(x, rank, dim=0))
    sum((got * target.shard(w, rank, dim=0)).sum() for got, w in zip(moved, weights, strict=True)).backward()
    for x, w in zip(mine, weights, strict=True):
        assert torch.equal(x.grad, source.shard(w, rank, dim=0))
    back = convert(moved[0].flatten(2), Placement.of(target), Placement.of(source), group)
    assert torch.equal(back, mine[0].flatten(2))


def test_conversion_over_processes(tmp_path):
    run_ranks([_there_and_back], 4, tmp_path)
