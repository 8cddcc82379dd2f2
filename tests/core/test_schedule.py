"""Schedules, simulated for every hierarchy up to 8 x 8: nothing here runs attention."""

from collections import defaultdict

import pytest

from megatron_mtraining.schedule import Channel, Place, Step, backward_schedule, forward_schedule

SIZES = [(inner, outer) for inner in range(1, 9) for outer in range(1, 9)]


def play_keys(schedules: list[tuple[Step, ...]], start: list[int]) -> None:
    """Moves chunks as the schedules say; checks that each rank holds the chunk of each step when it computes it."""
    held: list[int | None] = list(start)
    outer_arrives: dict[int, int] = {}
    for number in range(len(schedules[0])):
        arrivals: dict[int, int] = {}
        for rank, steps in enumerate(schedules):
            step = steps[number]
            assert step.chunk in (held[rank], rank), f"rank {rank} computes {step.chunk} but holds {held[rank]}"
            for transfer in (step.inner, step.outer):
                if transfer is None:
                    continue
                assert transfer.sent_chunk == held[rank]
                other = schedules[transfer.send_to][number]
                meets = other.inner if transfer is step.inner else other.outer
                assert meets is not None and meets.receive_from == rank and meets.received_chunk == transfer.sent_chunk
                target = arrivals if transfer is step.inner else outer_arrives
                target[transfer.send_to] = transfer.sent_chunk
        for rank, steps in enumerate(schedules):
            held[rank] = arrivals.get(rank)
            if steps[number].window_end:
                held[rank] = outer_arrives.pop(rank, held[rank])


@pytest.mark.parametrize(("inner", "outer"), SIZES)
def test_forward(inner: int, outer: int) -> None:
    size = inner * outer
    schedules = [forward_schedule(rank, inner, outer) for rank in range(size)]
    for rank, steps in enumerate(schedules):
        assert sorted(step.chunk for step in steps) == list(range(size))
        assert steps[0].chunk == rank
        assert steps[-1].chunk == Place.of(rank, inner, outer).at(1, 1)
        assert sum(step.inner is not None for step in steps) == outer * (inner - 1)
        assert sum(step.outer is not None for step in steps) == outer - 1
    play_keys(schedules, list(range(size)))


@pytest.mark.parametrize(("inner", "outer"), SIZES)
def test_backward(inner: int, outer: int) -> None:
    size = inner * outer
    schedules = [backward_schedule(rank, inner, outer) for rank in range(size)]
    kept = [forward_schedule(rank, inner, outer)[-1].chunk for rank in range(size)]
    for rank, steps in enumerate(schedules):
        forward = [step.chunk for step in forward_schedule(rank, inner, outer)]
        assert [step.chunk for step in steps] == forward[::-1]
        assert steps[-1].chunk == rank
    play_keys(schedules, kept)


@pytest.mark.parametrize(("inner", "outer"), SIZES)
def test_gradients_come_home(inner: int, outer: int) -> None:
    size = inner * outer
    schedules = [backward_schedule(rank, inner, outer) for rank in range(size)]
    inner_mail: dict[int, tuple[int, list[int]]] = {}
    outer_mail: dict[int, tuple[int, list[int]]] = {}
    hops: dict[int, int] = defaultdict(int)
    home: dict[int, list[int]] = {}
    for number in range(size):
        sums = {}
        for rank, steps in enumerate(schedules):
            step = steps[number]
            members = [rank]
            for mail, here in ((inner_mail, not step.window_start), (outer_mail, step.window_end)):
                if here and rank in mail:
                    chunk, partial = mail.pop(rank)
                    assert chunk == step.chunk
                    members += partial
            sums[rank] = members
        for rank, steps in enumerate(schedules):
            step = steps[number]
            assert step.inner_grad is None or step.outer_grad is None
            for transfer, mail in ((step.inner_grad, inner_mail), (step.outer_grad, outer_mail)):
                if transfer is not None:
                    assert transfer.sent_chunk == step.chunk
                    assert transfer.send_to not in mail
                    mail[transfer.send_to] = (step.chunk, sums[rank])
                    hops[step.chunk] += 1
            if number + 1 == size:
                home[rank] = sums[rank]
    assert not inner_mail and not outer_mail
    for rank in range(size):
        assert sorted(home[rank]) == list(range(size)), f"gradients of chunk {rank} miss a rank"
        assert hops[rank] == size - 1


def test_each_channel_keeps_its_neighbours() -> None:
    for rank in range(8):
        for schedule in (forward_schedule(rank, 4, 2), backward_schedule(rank, 4, 2)):
            for step in schedule:
                for transfer in (step.inner, step.inner_grad):
                    assert transfer is None or transfer.send_to // 4 == rank // 4
                for transfer in (step.outer, step.outer_grad):
                    assert transfer is None or transfer.send_to % 4 == rank % 4


def test_channels_are_four() -> None:
    assert len(Channel) == 4
