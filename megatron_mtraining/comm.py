"""Communication: process groups of a ring, collectives as data, and the exchanges of a ring."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .schedule import Channel, Transfer

Result = TypeVar("Result")


@dataclass(frozen=True)
class AllReduce:
    """Sum or maximum of a tensor over the context-parallel ranks. The tensor may be overwritten by the result."""

    tensor: Tensor
    op: str = "sum"


@dataclass(frozen=True)
class AllGather:
    """The tensors of all ranks (at least one dimension), stacked in rank order along a new first dimension."""

    tensor: Tensor


@dataclass(frozen=True)
class Broadcast:
    """The tensor of one rank (its number in the group), on all of them; the others' are overwritten."""

    tensor: Tensor
    source: int


Collective = AllReduce | AllGather | Broadcast
"""A collective that a computation waits for: it yields this and is sent the result."""


def drive[Result](steps: Generator[Collective, Tensor, Result], group: dist.ProcessGroup | None) -> Result:
    """Runs a computation that yields collectives, on a process group (``None``: a single rank)."""
    try:
        request = next(steps)
        while True:
            request = steps.send(_perform(request, group))
    except StopIteration as stop:
        result: Result = stop.value
        return result


def _perform(request: Collective, group: dist.ProcessGroup | None) -> Tensor:
    if group is None or dist.get_world_size(group) == 1:
        return request.tensor[None] if isinstance(request, AllGather) else request.tensor
    tensor = request.tensor.contiguous()
    if isinstance(request, AllReduce):
        dist.all_reduce(tensor, dist.ReduceOp.SUM if request.op == "sum" else dist.ReduceOp.MAX, group)
        return tensor
    if isinstance(request, Broadcast):
        dist.broadcast(tensor, group=group, group_src=request.source)
        return tensor
    gathered = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    dist.all_gather_into_tensor(gathered.flatten(0, 1), tensor, group)
    return gathered


_compared: WeakKeyDictionary[dist.ProcessGroup, set[tuple[object, ...]]] = WeakKeyDictionary()


def require_equal_shapes(tensors: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Compares the shapes of tensors over the ranks of a group: once for each set of shapes, with one small collective that
    the host waits for; later calls with the same shapes do nothing.

    The ranks must come to it with new shapes together. One whose shapes were compared before does not take part, so a rank
    that alone changes its shape in a later call is not found.

    Raises:
        ValueError: on every rank, with the shapes of all, if they differ.
    """
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    known = _compared.setdefault(group, set())
    key = tuple(shapes.items())
    if key in known:
        return
    numbers = [number for shape in shapes.values() for number in (len(shape), *(shape + (0,) * 4)[:4])]
    device = next(iter(tensors.values())).device
    mine = torch.tensor([numbers], dtype=torch.int64, device=device)
    everyone = mine.new_empty((dist.get_world_size(group), len(numbers)))
    dist.all_gather_into_tensor(everyone, mine, group)
    found = everyone.tolist()
    for place, name in enumerate(shapes):
        of_ranks = [rank[5 * place + 1 : 5 * place + 1 + min(rank[5 * place], 4)] for rank in found]
        if any(shape != of_ranks[0] for shape in of_ranks):
            raise ValueError(
                f"{name} has the shapes {of_ranks} on the context-parallel ranks: must be equal (pad "
                "the sequence to a multiple of what Layout names, and deal it with Layout.shard)"
            )
    known.add(key)


def combine(requests: list[Collective]) -> list[Tensor]:
    """The results of one collective, given the requests of all ranks in rank order, in one process."""
    first = requests[0]
    if isinstance(first, Broadcast):
        return [requests[first.source].tensor] * len(requests)
    stacked = torch.stack([request.tensor for request in requests])
    if isinstance(first, AllGather):
        return [stacked] * len(requests)
    # The dtype is named because autocast would change it.
    reduced = stacked.sum(0, dtype=stacked.dtype) if first.op == "sum" else stacked.amax(0)
    return [reduced.clone() for _ in requests]


@dataclass(frozen=True)
class RingGroups:
    """The process groups of a context-parallel ring.

    Inner and outer traffic, and keys and their gradients, want a communicator each: exchanges on one NCCL communicator
    share one stream, so a short inner hop would queue behind a long outer one (docs/design.md, "Rings"). Groups that are not
    given fall back to sharing the next wider one, which is correct but overlaps less.

    Attributes:
        cp: all context-parallel ranks, for the collectives of index estimation; ``None`` for a single rank.
        inner, outer: the groups of a hierarchical ring (ranks of a node; same place in every node), both or neither.
        inner_grad, outer_grad: the same ranks again, for dK and dV.
        hosts: hosts that the ranks lie on, where that is known; rings need not follow them.
    """

    cp: dist.ProcessGroup | None = None
    inner: dist.ProcessGroup | None = None
    outer: dist.ProcessGroup | None = None
    inner_grad: dist.ProcessGroup | None = None
    outer_grad: dist.ProcessGroup | None = None
    hosts: int = 1

    @property
    def nodes(self) -> int:
        """Nodes between which transfers are slow: outer ranks, or hosts."""
        return self.hosts if self.outer is None else dist.get_world_size(self.outer)

    @property
    def cp_size(self) -> int:
        """Number of context-parallel ranks."""
        return 1 if self.cp is None else dist.get_world_size(self.cp)

    @property
    def cp_rank(self) -> int:
        """This process's context-parallel rank."""
        return 0 if self.cp is None else dist.get_rank(self.cp)

    def inner_size(self, ring: str) -> int:
        """Ranks of an inner ring for ``MTrainingConfig.ring``; ``cp_size`` for a flat ring.

        Raises:
            ValueError: if groups are missing for what is given or asked for, this process is not in one of them, or they do
                not split the CP group into adjacent ranks (inner) and strided ranks (outer).
        """
        if (self.inner is None) != (self.outer is None):
            raise ValueError("inner_group and outer_group: give both or neither")
        if self.inner is not None and self.cp is None:
            raise ValueError("inner_group and outer_group without cp_group: give the group of all their ranks too")
        for name, group in (("cp_group", self.cp), ("inner_group", self.inner), ("outer_group", self.outer)):
            if group is not None and dist.get_rank(group) < 0:
                raise ValueError(f"{name}: this process (global rank {dist.get_rank()}) does not belong to it")
        if ring == "hierarchical" and self.inner is None:
            raise ValueError("ring='hierarchical' needs cp_group, inner_group and outer_group")
        if self.inner is None or self.outer is None or ring == "flat":
            return self.cp_size
        self._check_split(self.inner, self.outer)
        return dist.get_world_size(self.inner)

    def _check_split(self, inner: dist.ProcessGroup, outer: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(self.cp)
        size = dist.get_world_size(inner)
        place, node = self.cp_rank % size, self.cp_rank // size
        expected_inner, expected_outer = ranks[node * size : (node + 1) * size], ranks[place::size]
        for name, group, expected in (("inner", inner, expected_inner), ("outer", outer, expected_outer)):
            if dist.get_process_group_ranks(group) != expected:
                raise ValueError(
                    f"{name}_group has global ranks {dist.get_process_group_ranks(group)}: for cp_group {ranks} and "
                    f"{size} ranks per inner ring it must have {expected}"
                )

    def channel(self, channel: Channel) -> dist.ProcessGroup:
        """The group that carries a channel."""
        wider = {
            Channel.INNER: (self.inner, self.cp),
            Channel.OUTER: (self.outer, self.cp),
            Channel.INNER_GRAD: (self.inner_grad, self.inner, self.cp),
            Channel.OUTER_GRAD: (self.outer_grad, self.outer, self.cp),
        }
        return next(group for group in wider[channel] if group is not None)


Message = tuple[Transfer, Tensor, Tensor]
"""A transfer, what is sent and what is received into."""


class GroupExchange:
    """Exchanges of a ring over process groups: one batch of sends and receives per launch and channel."""

    def __init__(self, groups: RingGroups) -> None:
        self.groups = groups
        self.ranks = [] if groups.cp is None else dist.get_process_group_ranks(groups.cp)

    def post(self, messages: Sequence[Message]) -> list[dist.Work]:
        """Starts transfers of one channel as one exchange: what is sent must not change, nor what is received into be used,
        until :meth:`wait`.

        Peers are CP ranks in the schedule and global ranks here: a CP group need not begin at rank 0.
        """
        group = self.groups.channel(messages[0][0].channel)
        # Receives first: gloo would queue the word that a receive is ready behind what is sent to the same rank.
        operations = [dist.P2POp(dist.irecv, receive, self.ranks[t.receive_from], group) for t, _, receive in messages]
        operations += [dist.P2POp(dist.isend, send, self.ranks[t.send_to], group) for t, send, _ in messages]
        return dist.batch_isend_irecv(operations)

    def wait(self, handle: list[dist.Work]) -> None:
        """Waits for a transfer (on CUDA the current stream waits, not the host)."""
        for work in handle:
            work.wait()


class VirtualExchange:
    """Exchanges between ranks that are played one after another in one process (see :mod:`megatron_mtraining.testing`).

    All ranks post a launch's transfers before any of them waits for one, so a wait finds its sender's message.
    """

    def __init__(self, mailbox: dict[tuple[Channel, int, int], list[tuple[int, Tensor]]], rank: int) -> None:
        self.mailbox = mailbox
        self.rank = rank

    def post(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Leaves the messages for their receivers."""
        for transfer, send, _ in messages:
            letters = self.mailbox.setdefault((transfer.channel, self.rank, transfer.send_to), [])
            # A copy: the sender may wait, and then reuse its buffer, before the receiver does.
            letters.append((transfer.sent_chunk, send.clone()))
        return messages

    def wait(self, handle: Sequence[Message]) -> None:
        """Takes the oldest message of each sender."""
        for transfer, _, receive in handle:
            chunk, sent = self.mailbox[(transfer.channel, transfer.receive_from, self.rank)].pop(0)
            if chunk != transfer.received_chunk:
                raise RuntimeError(f"rank {self.rank} expected chunk {transfer.received_chunk}, got {chunk}")
            receive.copy_(sent)


Exchange = GroupExchange | VirtualExchange
