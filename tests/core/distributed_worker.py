"""One rank of the distributed tests: ``torchrun``-like start, all cases in one process, one line of JSON a case.

    python -m tests.core.distributed_worker RANK WORLD STORE_FILE REPORT_FILE [--pretend-hosts HOSTS] [case ...]

On a machine with enough GPUs the same cases run on NCCL; with pretended hosts on a GPU for each rank of a host.
"""

import argparse
import json
import os
import random
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.ring import hosts
from megatron_mtraining import (
    Documents,
    Layout,
    MTrainingConfig,
    VerticalSlashIndex,
    estimate_index,
    mtraining_attention,
)
from megatron_mtraining.ring_profile import profile_ring
from megatron_mtraining.testing import estimate_virtual, run_virtual

SKIPPED = "skipped: "
"""What an outcome begins with where there are too few ranks for a case."""
CASES: dict[str, Callable[[], None]] = {}
SPARSE = MTrainingConfig(top_p=0.7)


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Registers a case under its function's name."""
    CASES[function.__name__] = function
    return function


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def dtype() -> torch.dtype:
    """fp64 on the reference; the CUDA kernels take bf16."""
    return torch.bfloat16 if device().type == "cuda" else torch.float64


def whole(seq_len: int = 1024, seed: int = 0, batch: int = 1) -> list[torch.Tensor]:
    """q, k, v and the gradient of out for the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, seq_len, heads, 64) for heads in (4, 2, 2, 4)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype()).to(device()) for s in shapes]


def random_lines(seq_len: int) -> VerticalSlashIndex:
    random.seed(seq_len)
    n = seq_len // 64
    slash = [[random.sample(range(n), 3) for _ in range(4)]]
    vertical = [[random.sample(range(seq_len), 50) for _ in range(4)]]
    return VerticalSlashIndex.from_lines(slash, vertical, seq_len=seq_len, device=device())


def check(layout: Layout, cp_group=None, inner=None, outer=None, seed: int = 0, seq_len: int = 1024, **options) -> None:
    """Output and gradients of this rank against all ranks played in one process: the same bits."""
    group = cp_group or dist.group.WORLD
    rank = dist.get_rank(group)
    tensors = whole(seq_len, seed)
    leaves = [layout.shard(x, rank).requires_grad_() for x in tensors[:3]]
    out, aux = mtraining_attention(
        *leaves, layout=layout, cp_group=group, inner_group=inner, outer_group=outer, return_aux=True, **options
    )
    found = [out, *torch.autograd.grad(out, leaves, layout.shard(tensors[3], rank))]
    whole_leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    expected_out, expected_aux = run_virtual(
        *whole_leaves,
        layout=layout,
        inner_size=dist.get_world_size(inner) if inner else None,
        return_aux=True,
        **options,
    )
    assert torch.equal(aux.index.slash_words, expected_aux.index.slash_words), "slash lines differ"
    assert torch.equal(aux.index.column_words, expected_aux.index.column_words), "columns differ"
    expected = [expected_out, *torch.autograd.grad(expected_out, whole_leaves, tensors[3])]
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert torch.equal(x, layout.shard(y, rank)), f"{name} differs from the ring played in one process"


def layouts(cp_size: int, seq_len: int = 1024) -> list[Layout]:
    return [Layout.striped(seq_len, cp_size), Layout.zigzag(seq_len, cp_size), Layout.contiguous(seq_len, cp_size)]


def split(sizes: list[list[int]]) -> dist.ProcessGroup:
    """The group of this rank among groups that all ranks make."""
    groups = [dist.new_group(ranks) for ranks in sizes]
    return next(g for g, ranks in zip(groups, sizes, strict=True) if dist.get_rank() in ranks)


def hierarchy(ranks: list[int], inner: int) -> tuple[list[list[int]], list[list[int]]]:
    return [ranks[i : i + inner] for i in range(0, len(ranks), inner)], [ranks[i::inner] for i in range(inner)]


@case
def flat() -> None:
    for layout in layouts(dist.get_world_size()):
        check(layout, config=SPARSE)
        check(layout, index=random_lines(1024))
    check(layouts(dist.get_world_size())[0], config=MTrainingConfig(top_p=1, max_vertical=None))


@case
def hierarchical() -> None:
    ranks = list(range(dist.get_world_size()))
    for inner_size in [i for i in (1, 2, len(ranks)) if len(ranks) % i == 0]:
        inner_ranks, outer_ranks = hierarchy(ranks, inner_size)
        inner, outer = split(inner_ranks), split(outer_ranks)
        for layout in layouts(len(ranks)):
            check(layout, inner=inner, outer=outer, config=SPARSE)
        check(layouts(len(ranks))[0], inner=inner, outer=outer, index=random_lines(1024))


@case
def groups_that_do_not_begin_at_rank_0() -> None:  # H4
    world = dist.get_world_size()
    half = world // 2
    for groups in ([list(range(half)), list(range(half, world))], [list(range(0, world, 2)), list(range(1, world, 2))]):
        group = split(groups)
        replica = next(i for i, ranks in enumerate(groups) if dist.get_rank() in ranks)
        for layout in layouts(half):
            check(layout, group, seed=replica, config=SPARSE)


@case
def hierarchies_inside_replicas() -> None:  # H4
    world = dist.get_world_size()
    if world < 8:
        raise TooFewRanks("needs 8 ranks")
    replicas = [list(range(0, world, 2)), list(range(1, world, 2))]
    group = split(replicas)
    inner = split([ranks for replica in replicas for ranks in hierarchy(replica, 2)[0]])
    outer = split([ranks for replica in replicas for ranks in hierarchy(replica, 2)[1]])
    check(layouts(world // 2)[0], group, inner, outer, seed=dist.get_rank() % 2, config=SPARSE)


@case
def columns_in_pieces() -> None:
    for config in (
        MTrainingConfig(top_p=0.7, max_compact_columns=64),
        MTrainingConfig(top_p=0.7, vertical_backward="gather"),
    ):
        check(layouts(dist.get_world_size())[0], config=config)


@case
def several_chunks_a_launch() -> None:
    world = dist.get_world_size()
    inner_ranks, outer_ranks = hierarchy(list(range(world)), max(world // 2, 1))
    inner, outer = split(inner_ranks), split(outer_ranks)
    for chunks in (2, 8):
        config = MTrainingConfig(top_p=0.7, chunks_per_launch=chunks)
        check(layouts(world)[0], config=config)
        check(layouts(world)[0], inner=inner, outer=outer, config=config)


@case
def profiled_passes() -> None:
    world = dist.get_world_size()
    with profile_ring() as profile:
        check(layouts(world)[0], config=SPARSE)
    mine = [times for times in profile.read() if times.transfers and times.cp_rank == dist.get_rank()]
    for phase in ("forward", "backward"):
        times = next(t for t in mine if t.phase == phase)
        assert 1 < len(times.launches) <= world and all(t.end >= t.begin for t in times.transfers)
        assert times.exposed_ms >= 0 and 0 <= times.hidden <= 1 and times.compute_ms > 0
        assert abs(times.compute_ms + times.exposed_ms - times.total_ms) < 0.05 * times.total_ms + 1


@case
def documents() -> None:
    packed = Documents.from_cu_seqlens([0, 300, 700], 1024, [0, 320, 1024])
    check(layouts(dist.get_world_size())[0], config=SPARSE, documents=packed)


@case
def estimation_in_bf16() -> None:
    q, k = (x.bfloat16() for x in whole()[:2])
    for layout in layouts(dist.get_world_size()):
        rank = dist.get_rank()
        index = estimate_index(layout.shard(q, rank), layout.shard(k, rank), layout=layout, cp_group=dist.group.WORLD)
        alone = estimate_virtual(q, k, layout=layout, config=MTrainingConfig())
        assert torch.equal(index.column_words, alone.column_words) and torch.equal(index.slash_words, alone.slash_words)


@case
def late_ranks_and_many_passes() -> None:  # H2, H3
    layout, rank = Layout.striped(512, dist.get_world_size()), dist.get_rank()
    inner_ranks, outer_ranks = hierarchy(list(range(dist.get_world_size())), max(dist.get_world_size() // 2, 1))
    inner, outer = split(inner_ranks), split(outer_ranks)
    tensors = whole(512)
    leaves = [layout.shard(x, rank).requires_grad_() for x in tensors[:3]]
    first = None
    for number in range(20):
        if number % 5 == rank % 5:
            time.sleep(0.01 * rank)
        out = mtraining_attention(
            *leaves, config=SPARSE, layout=layout, cp_group=dist.group.WORLD, inner_group=inner, outer_group=outer
        )
        grads = torch.autograd.grad(out, leaves, layout.shard(tensors[3], rank))
        first = first or [out, *grads]
        assert all(torch.equal(a, b) for a, b in zip(first, [out, *grads], strict=True)), f"pass {number} differs"


@case
def wrong_groups_are_refused() -> None:
    world = dist.get_world_size()
    inner_ranks, outer_ranks = hierarchy(list(range(world)), 2)
    inner, outer = split(inner_ranks), split(outer_ranks)
    layout, rank = layouts(world)[0], dist.get_rank()
    q, k, v = (layout.shard(x, rank) for x in whole()[:3])
    options = {"layout": layout, "cp_group": dist.group.WORLD, "config": SPARSE}
    wrong = [
        ({"inner_group": inner}, "give both or neither"),
        ({"inner_group": inner, "outer_group": outer, "cp_group": None, "layout": None}, "without cp_group"),
        ({"cp_group": None, "layout": None, "config": MTrainingConfig(ring="hierarchical")}, "needs cp_group"),
        ({"config": MTrainingConfig(ring="hierarchical")}, "needs cp_group, inner_group and outer_group"),
    ]
    if world > 2 and inner_ranks != outer_ranks:
        wrong.append(({"inner_group": outer, "outer_group": inner}, "must have"))
    half = dist.new_group(list(range(world // 2)))
    if rank >= world // 2:
        wrong.append(({"cp_group": half}, f"global rank {rank}"))
    for extra, message in wrong:
        try:
            mtraining_attention(q, k, v, **{**options, **extra})
        except ValueError as error:
            assert message in str(error), str(error)
        else:
            raise AssertionError(f"{message}: not refused")


@case
def unequal_shapes_are_refused_on_every_rank() -> None:
    """Without a layout; one rank has more tokens, or another number of heads or dimensions. Nothing is left hanging."""
    rank, world = dist.get_rank(), dist.get_world_size()
    longer = [256 + 64 * (r == world - 1) for r in range(world)]
    odd = [256 - 56 * (r == 0) for r in range(world)]

    def tensors(length: int, heads: int = 4) -> list[torch.Tensor]:
        return [torch.randn(1, length, h, 64, dtype=torch.float32, device=device()).to(dtype()) for h in (heads, 2, 2)]

    wrong = [
        (tensors(longer[rank]), f"q has the shapes {[[1, n, 4, 64] for n in longer]} on the context-parallel ranks"),
        (tensors(odd[rank]), f"q has the shapes {[[1, n, 4, 64] for n in odd]}"),
        (
            tensors(256, 4 - 2 * (rank == 0)),
            f"q has the shapes {[[1, 256, 4 - 2 * (r == 0), 64] for r in range(world)]}",
        ),
        ([x[0] if rank == 1 else x for x in tensors(256)], "[256, 4, 64]"),
        ([tensors(256)[0], *tensors(longer[rank])[1:]], f"k has the shapes {[[1, n, 2, 64] for n in longer]}"),
    ]
    for (q, k, v), message in wrong:
        for call in (mtraining_attention, estimate_index):
            try:
                call(q, k, *([v] if call is mtraining_attention else []), cp_group=dist.group.WORLD, config=SPARSE)
            except ValueError as error:
                assert message in str(error), str(error)
            else:
                raise AssertionError(f"{message}: not refused")
    gathers: list[int] = []
    gather = dist.all_gather_into_tensor
    dist.all_gather_into_tensor = lambda out, x, group: (gathers.append(x.numel()), gather(out, x, group))
    try:
        for _ in range(2):
            mtraining_attention(*tensors(256), cp_group=dist.group.WORLD, config=SPARSE)
    finally:
        dist.all_gather_into_tensor = gather
    assert gathers.count(15) == 1, f"compared {gathers.count(15)} times"


class TooFewRanks(Exception):
    """A case that so few ranks cannot run; raised by every rank."""


def join(options: argparse.Namespace) -> None:
    """Joins the ranks: over NCCL where there are GPUs for them, else over gloo."""
    rank, world, devices = options.rank, options.world, torch.cuda.device_count()
    local = world
    if options.pretend_hosts:
        local = hosts.local_size(world, options.pretend_hosts, devices)
        os.environ.update(hosts.environment(rank, local) | os.environ)  # given ones win, to try others
    on_gpu = devices >= local
    if on_gpu:
        torch.cuda.set_device(rank % local)
    store = dist.FileStore(options.store, world)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("store")
    parser.add_argument("report")
    parser.add_argument("cases", nargs="*", help="default: all")
    parser.add_argument("--pretend-hosts", type=int, default=0, help="hosts that NCCL is to take the ranks for")
    return parser.parse_intermixed_args(words)  # the cases may stand behind an option


def main() -> None:
    """Runs the cases and writes their outcome."""
    options = arguments()
    torch.set_num_threads(1)
    join(options)
    with Path(f"{options.report}.{options.rank}").open("w") as file:
        for name in options.cases or CASES:
            outcome, began = "passed", time.perf_counter()
            try:
                CASES[name]()
            except TooFewRanks as error:
                outcome = f"{SKIPPED}{error}"
            except Exception:
                outcome = traceback.format_exc()
            file.write(json.dumps([name, outcome]) + "\n")
            file.flush()
            print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
            if outcome != "passed" and not outcome.startswith(SKIPPED):
                break  # the other ranks may wait for this one for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
