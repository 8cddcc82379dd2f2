"""Plans: the steps of a ring put together into launches, with what moves before and after each, and where it lies.

A ring of many ranks has short steps, and every launch of an operator costs time of its own. A launch works off the chunks
of several consecutive steps of :mod:`megatron_mtraining.schedule`; the next launch's chunks travel meanwhile. Whatever a
transfer sends is at hand when it is posted, so all of a launch's transfers on one channel are one exchange, posted before
the compute that hides it:

- Keys. A rank sends the *last* chunk of a launch to the ranks that work on it in the next launch, ``1, 2, ...`` places
  further on, and so receives the next launch's chunks from as many places back. With one chunk a launch this is the ring.
- Window starts come over the outer ring, one exchange per window, with a whole window to hide it. A window start ends its
  launch: from there the next launch's chunks are taken.
- Gradients. After a launch a rank sends its partial of each chunk to the rank that works on that chunk *first* in the next
  launch, which adds it after that launch. In backward a window end begins its launch, so that its sum is complete there, and
  goes on over the outer ring. The last launch is the rank's own chunk alone: nothing is sent after it.

Plans are pure data, equal in shape on all ranks; :mod:`megatron_mtraining.ring` runs them, the tests simulate them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from .schedule import Channel, Place, Step, Transfer, backward_schedule, forward_schedule

FIRST = -1
"""Slot of the chunk that a pass begins with: the rank's own, packed (forward), or the kept one (backward)."""

OWN = -2
"""Slot of the rank's own chunk at the end of backward: it has not travelled."""

KEPT = -3
"""Slot of the chunk held last in forward, if its launch has no other: it is received in its own allocation."""

KEY_GROWTH = 4
"""A launch's keys travel during the launch before: it has at most so many times as many chunks as that one."""

GRADIENT_GROWTH = 2
"""A launch's gradients, twice the bytes, travel during the launch after: it has at most so many times as many chunks."""


@dataclass(frozen=True)
class Move:
    """A transfer, the slot that is sent and the slot that is received into."""

    transfer: Transfer
    source: int
    target: int


FORWARD_KEYS = 131072
"""Keys that a forward launch should work off: less of them cost more in launches than they save in memory."""

BACKWARD_KEYS = 65536
"""The same for backward, whose launches cost relatively less and whose buffers, of gradients, are larger."""


def chunks_per_launch(local_seq_len: int, backward: bool) -> int:
    """The choice for chunks of a length where none is given: enough to make up the keys of a good launch."""
    return max(1, -(-(BACKWARD_KEYS if backward else FORWARD_KEYS) // local_seq_len))


@dataclass(frozen=True)
class Launch:
    """The chunks that are worked off at once.

    Attributes:
        first_step: number of the first step of the schedule.
        chunks: ``kv_owner`` of each chunk, in the order of the steps.
        slot: first of the consecutive slots of the key buffer that hold the chunks; :data:`FIRST`, :data:`OWN`, :data:`KEPT`.
        keys: inner moves posted before the compute, as one exchange, waited for before the next launch, whose chunks they
            bring (all but one that comes over the outer ring).
        outer: outer move posted before the compute; brings the next window's first chunk.
        awaits_outer: whether the last chunk comes over the outer ring: that move is waited for before this launch.
        grad_slot: first of the consecutive slots of the gradient buffer that this launch's dK|dV are written to; backward.
        adds: slots of the gradient buffer that the previous launch's ``grads`` arrive in: added to the gradient of the
            first chunk after the compute.
        adds_outer: the same for what arrives over the outer ring at a window's end.
        grads: inner gradient moves posted after the compute, as one exchange.
        outer_grad: outer gradient move posted after the compute, at a window's end.
    """

    first_step: int
    chunks: tuple[int, ...]
    slot: int = FIRST
    keys: tuple[Move, ...] = ()
    outer: Move | None = None
    awaits_outer: bool = False
    grad_slot: int = 0
    adds: tuple[int, ...] = ()
    adds_outer: int | None = None
    grads: tuple[Move, ...] = ()
    outer_grad: Move | None = None


@dataclass(frozen=True)
class Plan:
    """The launches of one rank and the sizes of its buffers, in chunks.

    Attributes:
        launches: in order.
        key_slots: slots of the key buffer (``FIRST``, ``OWN`` and ``KEPT`` not counted).
        grad_slots: slots of the gradient buffer.
    """

    launches: tuple[Launch, ...]
    key_slots: int
    grad_slots: int = 0


@dataclass(frozen=True)
class _Need:
    """Consecutive slots that are in use from one time to another, both included."""

    count: int
    begin: int
    end: int


def _place(needs: dict[Any, _Need]) -> tuple[dict[Any, int], int]:
    """First slot of each need, the largest placed first, each at the lowest place that is free throughout; and the size."""
    first: dict[Any, int] = {}
    size = 0
    for key, need in sorted(needs.items(), key=lambda item: -item[1].count):
        busy = sorted(
            (first[other], first[other] + needs[other].count)
            for other in first
            if needs[other].begin <= need.end and need.begin <= needs[other].end
        )
        start = 0
        for low, high in busy:
            if start + need.count <= low:
                break
            start = max(start, high)
        first[key] = start
        size = max(size, start + need.count)
    return first, size


def split(count: int, most: int, before: int, after: int) -> list[int]:
    """``count`` steps as launches of at most ``most``, near equal but for the ramps at both ends.

    Args:
        before: chunks of the launch before, which hides these launches' keys.
        after: chunks of the launch after, which hides the gradients of these; a large number where there are none.
    """
    left, right = [before], [after]
    while count > 0:
        up, down = KEY_GROWTH * left[-1], GRADIENT_GROWTH * right[-1]
        if min(up, down) >= most:
            break
        size = min(up, down, count)
        (left if up <= down else right).append(size)
        count -= size
    pieces = -(-count // most)
    middle = [count // pieces + (i < count % pieces) for i in range(pieces)]
    return left[1:] + middle + right[:0:-1]


def launch_sizes(steps: Sequence[Step], most: int, backward: bool) -> list[int]:
    """Number of steps of each launch: at most ``most``, cut where windows start and, in backward, where they end."""
    runs = [0]
    for step in steps:
        if backward and step.window_end and runs[-1]:
            runs.append(0)
        runs[-1] += 1
        if step.window_start:
            runs.append(0)
    runs = [run for run in runs if run]
    sizes: list[int] = []
    for number, run in enumerate(runs):
        last = number + 1 == len(runs)
        after = min(runs[number + 1], most) if backward and not last else most
        sizes += split(run, most, sizes[-1] if sizes else most, after)
    return sizes


@lru_cache(maxsize=1024)
def forward_plan(rank: int, inner_size: int, outer_size: int, chunks_per_launch: int = 1) -> Plan:
    """The forward pass of a rank. At most ``chunks_per_launch`` chunks a launch; the first is the rank's own alone."""
    steps = forward_schedule(rank, inner_size, outer_size)
    launches, size = _with_keys(_cut(steps, chunks_per_launch, False), steps, Place.of(rank, inner_size, outer_size), 1)
    return Plan(tuple(launches), size)


@lru_cache(maxsize=1024)
def backward_plan(rank: int, inner_size: int, outer_size: int, chunks_per_launch: int = 1) -> Plan:
    """The backward pass of a rank: from the kept chunk alone to its own alone."""
    steps = backward_schedule(rank, inner_size, outer_size)
    place = Place.of(rank, inner_size, outer_size)
    launches, key_slots = _with_keys(_cut(steps, chunks_per_launch, True), steps, place, -1)
    launches, grad_slots = _with_grads(launches, steps, place)
    return Plan(tuple(launches), key_slots, grad_slots)


def _cut(steps: Sequence[Step], most: int, backward: bool) -> list[Launch]:
    launches, first = [], 0
    for size in launch_sizes(steps, most, backward):
        launches.append(Launch(first, tuple(step.chunk for step in steps[first : first + size])))
        first += size
    return launches


def _end(launch: Launch) -> int:
    """Number of the step after the launch's last."""
    return launch.first_step + len(launch.chunks)


def _with_keys(launches: list[Launch], steps: Sequence[Step], place: Place, direction: int) -> tuple[list[Launch], int]:
    """Adds the key moves and slots; ``direction`` 1: keys are sent to higher ranks (forward), -1: to lower ones."""
    rank, last = place.at(0, 0), len(launches) - 1
    starts = [number for number, launch in enumerate(launches) if steps[_end(launch) - 1].window_start]
    following, previous = dict(pairwise(starts)), {after: before for before, after in pairwise(starts)}
    special = {0: FIRST}
    if last and launches[last].chunks == (rank,):
        special[last] = OWN
    elif last and direction > 0 and len(launches[last].chunks) == 1:
        special[last] = KEPT
    # Held from the launch that posts the first receive until it is computed and its last chunk sent on.
    needs = {
        number: _Need(
            len(launch.chunks), previous.get(number, number - 1), max(number, following.get(number, number + 1) - 1)
        )
        for number, launch in enumerate(launches)
        if number not in special
    }
    first, size = _place(needs)
    placed = [
        replace(launch, slot=(first | special)[number], awaits_outer=number in previous and special.get(number) != OWN)
        for number, launch in enumerate(launches)
    ]
    return [_post_keys(placed, n, following.get(n), steps, place, direction) for n in range(len(placed))], size


def _slot(launch: Launch, position: int) -> int:
    """Slot of one of a launch's chunks."""
    return launch.slot if launch.slot < 0 else launch.slot + position


def _post_keys(
    launches: list[Launch], number: int, next_start: int | None, steps: Sequence[Step], place: Place, direction: int
) -> Launch:
    """The launch with its moves: all send its last chunk."""
    launch = launches[number]
    sent, source = launch.chunks[-1], _slot(launch, len(launch.chunks) - 1)
    keys, outer = [], None
    if number + 1 < len(launches) and launches[number + 1].slot != OWN:
        target = launches[number + 1]
        for position, step in enumerate(steps[target.first_step : _end(target)]):
            if step.window_start:
                continue
            distance = direction * (position + 1)
            transfer = Transfer(Channel.INNER, place.at(distance, 0), place.at(-distance, 0), sent, step.chunk)
            keys.append(Move(transfer, source, _slot(target, position)))
    if next_start is not None and launches[next_start].slot != OWN:
        target = launches[next_start]
        transfer = Transfer(Channel.OUTER, place.at(0, direction), place.at(0, -direction), sent, target.chunks[-1])
        outer = Move(transfer, source, _slot(target, len(target.chunks) - 1))
    return replace(launch, keys=tuple(keys), outer=outer)


def _with_grads(launches: list[Launch], steps: Sequence[Step], place: Place) -> tuple[list[Launch], int]:
    """Adds the gradient moves and slots. Time ``2 * n`` is the compute of launch ``n``, ``2 * n + 1`` its posting."""
    ends = dict(pairwise(n for n, launch in enumerate(launches) if steps[launch.first_step].window_end))
    # Partials that go round the inner ring: all but that of a window's end, the first of its launch.
    inner = [range(int(steps[launch.first_step].window_end), len(launch.chunks)) for launch in launches[:-1]]
    needs: dict[Any, _Need] = {}
    for number, launch in enumerate(launches):
        sent_until = ends.get(number, min(number + 1, len(launches) - 1))
        needs["own", number] = _Need(len(launch.chunks), 2 * number, 2 * sent_until)
        if number in ends:
            needs["outer", number] = _Need(1, 2 * number + 1, 2 * ends[number])
    for number, positions in enumerate(inner):
        needs["inner", number] = _Need(len(positions), 2 * number + 1, 2 * number + 2)
    first, size = _place({key: need for key, need in needs.items() if need.count})
    found = list(launches)
    for number, launch in enumerate(launches):
        own = first["own", number]
        found[number] = replace(found[number], grad_slot=own)
        if number < len(inner) and inner[number]:
            target = first["inner", number]
            moves = [
                Move(_inner_grad(launches, number, position, place), own + position, target + i)
                for i, position in enumerate(inner[number])
            ]
            found[number] = replace(found[number], grads=tuple(moves))
            found[number + 1] = replace(found[number + 1], adds=tuple(move.target for move in moves))
        if number in ends:
            sent, received = launch.chunks[0], launches[ends[number]].chunks[0]
            transfer = Transfer(Channel.OUTER_GRAD, place.at(0, -1), place.at(0, 1), sent, received)
            arrived = first["outer", number]
            found[number] = replace(found[number], outer_grad=Move(transfer, own, arrived))
            found[ends[number]] = replace(found[ends[number]], adds_outer=arrived)
    return found, size


def _inner_grad(launches: list[Launch], number: int, position: int, place: Place) -> Transfer:
    """Sends one partial of a launch to the rank that begins its next launch with that chunk."""
    distance = len(launches[number].chunks) - position
    sent, received = launches[number].chunks[position], launches[number + 1].chunks[0]
    return Transfer(Channel.INNER_GRAD, place.at(-distance, 0), place.at(distance, 0), sent, received)
