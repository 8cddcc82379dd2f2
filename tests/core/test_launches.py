"""Plans, played with buffers that know what they hold, for every hierarchy up to 8 x 8 and several chunks a launch."""

from dataclasses import dataclass, field

import pytest

from megatron_mtraining.launches import (
    FIRST,
    GRADIENT_GROWTH,
    KEPT,
    KEY_GROWTH,
    OWN,
    Launch,
    Move,
    Plan,
    backward_plan,
    chunks_per_launch,
    forward_plan,
    split,
)
from megatron_mtraining.schedule import backward_schedule, forward_schedule

SIZES = [(inner, outer) for inner in range(1, 9) for outer in range(1, 9)]
CHUNKS = [1, 2, 3, 4, 7, 100]


@dataclass
class Buffer:
    """Slots of a rank: what each holds, and how many transfers under way read or write it."""

    held: dict[int, object] = field(default_factory=dict)
    reading: dict[int, int] = field(default_factory=dict)
    writing: set[int] = field(default_factory=set)

    def read(self, slot: int) -> object:
        assert slot not in self.writing, f"slot {slot} is read before it has arrived"
        return self.held[slot]

    def write(self, slot: int, value: object) -> None:
        assert slot not in self.writing and not self.reading.get(slot), f"slot {slot} is overwritten while in use"
        self.held[slot] = value


class Wire:
    """Moves between the ranks' buffers: values are taken at the posting, and arrive at the wait."""

    def __init__(self, buffers: list[Buffer]) -> None:
        self.buffers = buffers
        self.letters: dict[tuple[object, int, int], list[tuple[int, object]]] = {}
        self.under_way = 0

    def post(self, rank: int, moves: tuple[Move, ...]) -> None:
        mine = self.buffers[rank]
        for move in moves:
            t = move.transfer
            value = mine.read(move.source)
            self.letters.setdefault((t.channel, rank, t.send_to), []).append((t.sent_chunk, value))
            mine.reading[move.source] = mine.reading.get(move.source, 0) + 1
            assert move.target >= 0 or move.target == KEPT
            mine.write(move.target, None)
            mine.writing.add(move.target)
            self.under_way += 1

    def wait(self, rank: int, moves: tuple[Move, ...]) -> None:
        mine = self.buffers[rank]
        for move in moves:
            t = move.transfer
            chunk, value = self.letters[(t.channel, t.receive_from, rank)].pop(0)
            assert chunk == t.received_chunk, f"rank {rank} got {chunk}, expected {t.received_chunk}"
            mine.reading[move.source] -= 1
            mine.writing.remove(move.target)
            mine.held[move.target] = value
            self.under_way -= 1


def slots_of(launch: Launch) -> list[int]:
    return [launch.slot] if launch.slot < 0 else list(range(launch.slot, launch.slot + len(launch.chunks)))


def play(plans: list[Plan], first: list[int]) -> None:
    """Runs plans of all ranks in lockstep, as the executor does; checks what is computed, and where gradients end."""
    size = len(plans)
    keys = [Buffer({FIRST: chunk}) for chunk in first]
    grads = [Buffer() for _ in range(size)]
    key_wire, grad_wire = Wire(keys), Wire(grads)
    inner: list[tuple[Move, ...]] = [()] * size
    outer: list[tuple[Move, ...]] = [()] * size
    inner_grads: list[tuple[Move, ...]] = [()] * size
    outer_grads: list[tuple[Move, ...]] = [()] * size
    for number in range(len(plans[0].launches)):
        launches = [plan.launches[number] for plan in plans]
        for rank, launch in enumerate(launches):
            key_wire.wait(rank, inner[rank])
            inner[rank] = ()
            if launch.awaits_outer:
                key_wire.wait(rank, outer[rank])
                outer[rank] = ()
        for rank, launch in enumerate(launches):
            if launch.outer is not None:
                assert not outer[rank], "an outer transfer is posted while another is under way"
                outer[rank] = (launch.outer,)
                key_wire.post(rank, outer[rank])
            inner[rank] = launch.keys
            key_wire.post(rank, inner[rank])
        for rank, launch in enumerate(launches):
            if launch.slot == OWN or size == 1:
                assert launch.chunks == (rank,)
                held = [rank]
            else:
                held = [keys[rank].read(slot) for slot in slots_of(launch)]
            assert held == list(launch.chunks)
            if plans[0].grad_slots:
                for position, chunk in enumerate(launch.chunks):
                    grads[rank].write(launch.grad_slot + position, (chunk, [rank]))
        if not plans[0].grad_slots:
            continue
        for rank, launch in enumerate(launches):
            grad_wire.wait(rank, inner_grads[rank])
            inner_grads[rank] = ()
            if launch.adds_outer is not None:
                grad_wire.wait(rank, outer_grads[rank])
                outer_grads[rank] = ()
            chunk, members = grads[rank].read(launch.grad_slot)
            for slot in (*launch.adds, *([launch.adds_outer] if launch.adds_outer is not None else [])):
                other, partial = grads[rank].read(slot)
                assert other == chunk
                members = members + partial
            grads[rank].write(launch.grad_slot, (chunk, members))
        for rank, launch in enumerate(launches):
            if launch.outer_grad is not None:
                assert not outer_grads[rank]
                outer_grads[rank] = (launch.outer_grad,)
                grad_wire.post(rank, outer_grads[rank])
            inner_grads[rank] = launch.grads
            grad_wire.post(rank, inner_grads[rank])
    assert key_wire.under_way == 0 and grad_wire.under_way == 0, "a transfer is never waited for"
    for rank, plan in enumerate(plans if plans[0].grad_slots else []):
        chunk, members = grads[rank].read(plan.launches[-1].grad_slot)
        assert chunk == rank and sorted(members) == list(range(size)), f"gradients of chunk {rank} miss a rank"


@pytest.mark.parametrize(("inner", "outer"), SIZES)
def test_every_plan(inner: int, outer: int) -> None:
    size = inner * outer
    for chunks in CHUNKS:
        forward = [forward_plan(rank, inner, outer, chunks) for rank in range(size)]
        play(forward, list(range(size)))
        backward = [backward_plan(rank, inner, outer, chunks) for rank in range(size)]
        play(backward, [plan.launches[-1].chunks[-1] for plan in forward])
        for plans, schedule in ((forward, forward_schedule), (backward, backward_schedule)):
            for rank, plan in enumerate(plans):
                done = [chunk for launch in plan.launches for chunk in launch.chunks]
                assert done == [step.chunk for step in schedule(rank, inner, outer)]
                check_bounds(plan, chunks, inner, outer)
        for rank, plan in enumerate(backward):
            last = plan.launches[-1]
            assert last.chunks == (rank,) and not last.grads and last.outer_grad is None and not last.keys


def check_bounds(plan: Plan, chunks: int, inner: int, outer: int) -> None:
    """The memory that docs/design.md states, and launches that are neither too large nor all alone."""
    sizes = [len(launch.chunks) for launch in plan.launches]
    largest = max(sizes)
    assert sizes[0] == 1 and largest <= min(chunks, max(inner, 1) + 1)
    assert plan.key_slots <= (4 if outer > 1 else 2) * largest
    assert plan.grad_slots <= (4 * largest + 2 if outer > 1 else 3 * largest)
    if outer == 1 and inner > 1:
        assert all(after <= KEY_GROWTH * before for before, after in zip(sizes, sizes[1:], strict=False))


@pytest.mark.parametrize(("inner", "outer"), SIZES)
def test_one_chunk_a_launch_is_the_ring(inner: int, outer: int) -> None:
    for rank in range(inner * outer):
        for plan, steps in (
            (forward_plan(rank, inner, outer), forward_schedule(rank, inner, outer)),
            (backward_plan(rank, inner, outer), backward_schedule(rank, inner, outer)),
        ):
            for launch, step in zip(plan.launches, steps, strict=True):
                assert [move.transfer for move in launch.keys] == [step.inner] * (step.inner is not None)
                assert (launch.outer and launch.outer.transfer) == step.outer
                assert [move.transfer for move in launch.grads] == [step.inner_grad] * (step.inner_grad is not None)
                assert (launch.outer_grad and launch.outer_grad.transfer) == step.outer_grad


@pytest.mark.parametrize("chunks", [1, 4, 8])
def test_traffic_stays_what_the_ring_sends(chunks: int) -> None:
    for inner, outer in ((8, 1), (8, 4), (4, 2), (2, 4)):
        for rank in range(inner * outer):
            plan, steps = forward_plan(rank, inner, outer, chunks), forward_schedule(rank, inner, outer)
            assert sum(len(x.keys) for x in plan.launches) == sum(s.inner is not None for s in steps)
            back, back_steps = backward_plan(rank, inner, outer, chunks), backward_schedule(rank, inner, outer)
            assert sum(len(x.keys) for x in back.launches) == sum(s.inner is not None for s in back_steps)
            assert sum(len(x.grads) for x in back.launches) == sum(s.inner_grad is not None for s in back_steps)
            for launch in (*plan.launches, *back.launches):
                for move in (*launch.keys, *launch.grads):
                    assert move.transfer.send_to // inner == rank // inner, "an inner transfer leaves the node"
                for move in (launch.outer, launch.outer_grad):
                    assert move is None or move.transfer.send_to % inner == rank % inner


def test_an_outer_transfer_has_a_window_to_hide_it() -> None:
    for chunks in (1, 2, 4, 8):
        for make in (forward_plan, backward_plan):
            launches = make(3, 8, 4, chunks).launches
            outer = [n for n, launch in enumerate(launches) if launch.outer is not None]
            waits = [n for n, launch in enumerate(launches) if launch.awaits_outer]
            for posted, waited in zip(outer, waits, strict=True):
                assert sum(len(launch.chunks) for launch in launches[posted:waited]) >= 7 - (chunks - 1)


def test_memory_of_the_usual_plans() -> None:
    sizes = {(8, 1, 1): (2, 3), (8, 4, 1): (4, 5), (32, 1, 4): (8, 12), (2, 1, 1): (0, 3)}
    for (inner, outer, chunks), (keys, grads) in sizes.items():
        assert forward_plan(0, inner, outer, chunks).key_slots == keys
        assert backward_plan(0, inner, outer, chunks).grad_slots == grads


def test_split_ramps_at_both_ends() -> None:
    assert split(31, 8, 1, 8) == [4, 7, 7, 7, 6]
    assert split(30, 4, 1, 1) == [4, 4, 4, 4, 4, 4, 4, 2]
    for count in range(1, 70):
        for most in range(1, 20):
            for before, after in ((1, most), (1, 1), (most, most)):
                sizes = split(count, most, before, after)
                assert sum(sizes) == count and max(sizes) <= most and min(sizes) > 0
                assert sizes[0] <= KEY_GROWTH * before and sizes[-1] <= GRADIENT_GROWTH * after


def test_short_chunks_are_put_together() -> None:
    assert [chunks_per_launch(n, False) for n in (16384, 65536, 131072, 262144, 100000)] == [8, 2, 1, 1, 2]
    assert [chunks_per_launch(n, True) for n in (16384, 65536, 131072)] == [4, 1, 1]
