"""Times of ring passes: what each launch computed, what it waited for, and how long the transfers took.

    with profile_ring() as profile:
        out = mtraining_attention(...)
        out.backward(dout)
    for times in profile.read():
        print(times.phase, times.exposed_ms, times.hidden)

Off unless asked for. While it is on nothing waits for the device: times are events on its streams (host clock on the CPU)
and are read with :meth:`RingProfile.read`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .comm import Exchange, GroupExchange, Message
from .launches import Launch

POINTS = ("begin", "arrived", "computed", "summed", "end")
"""What a launch passes: its start, its keys are there, it has computed, its partial gradients are there, its end."""

Stamp = torch.cuda.Event | float


@dataclass(frozen=True)
class LaunchTimes:
    """One launch; times in ms from the start of the pass.

    Forward has no partial gradients: but for the last launch, which gives its buffers back, ``end == summed == computed``.

    Attributes:
        chunks: ``kv_owner`` of each chunk.
    """

    chunks: tuple[int, ...]
    begin: float
    arrived: float
    computed: float
    summed: float
    end: float

    @property
    def compute_ms(self) -> float:
        """Time in which the device worked."""
        return self.computed - self.arrived + self.end - self.summed

    @property
    def stall_ms(self) -> float:
        """Time in which it waited for a transfer: the exposed communication."""
        return self.arrived - self.begin + self.summed - self.computed


@dataclass(frozen=True)
class TransferTimes:
    """One exchange of one channel; times in ms from the start of the pass.

    Attributes:
        channel: value of :class:`megatron_mtraining.schedule.Channel`.
        launch: number of the launch that posted it.
        sent_bytes: what this rank sent.
        begin: when the compute stream came to the posting.
        end: when everything had been sent and received.
    """

    channel: str
    launch: int
    sent_bytes: int
    begin: float
    end: float


@dataclass(frozen=True)
class PassTimes:
    """One ring pass of one rank."""

    phase: str
    cp_rank: int
    launches: tuple[LaunchTimes, ...]
    transfers: tuple[TransferTimes, ...]

    @property
    def total_ms(self) -> float:
        """From the first launch to the last one's end."""
        return self.launches[-1].end - self.launches[0].begin

    @property
    def compute_ms(self) -> float:
        """Time in which the device worked."""
        return sum(launch.compute_ms for launch in self.launches)

    @property
    def exposed_ms(self) -> float:
        """Time in which it waited for transfers."""
        return sum(launch.stall_ms for launch in self.launches)

    @property
    def transfer_ms(self) -> float:
        """Time in which at least one transfer was under way (waiting for a slower peer included)."""
        covered, until = 0.0, float("-inf")
        for begin, end in sorted((t.begin, t.end) for t in self.transfers):
            covered += max(0.0, end - max(begin, until))
            until = max(until, end)
        return covered

    @property
    def hidden(self) -> float:
        """Share of the transfer time that passed behind compute; 1 without transfers."""
        return 1 - min(self.exposed_ms / self.transfer_ms, 1.0) if self.transfer_ms > 0 else 1.0

    @property
    def tail_ms(self) -> float:
        """Wait after the last compute: 0 where nothing is exposed at the tail of backward but an earlier hop's rest."""
        return self.launches[-1].summed - self.launches[-1].computed

    def comm_over_compute(self) -> list[float]:
        """Per launch: duration of the transfers that it posted over its compute time."""
        durations = [0.0] * len(self.launches)
        for transfer in self.transfers:
            durations[transfer.launch] += transfer.end - transfer.begin
        return [d / max(x.compute_ms, 1e-9) for d, x in zip(durations, self.launches, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """For a line of JSON; :meth:`from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PassTimes:
        """The inverse of :meth:`to_json`."""
        launches = tuple(LaunchTimes(**{**item, "chunks": tuple(item["chunks"])}) for item in data["launches"])
        return cls(data["phase"], data["cp_rank"], launches, tuple(TransferTimes(**t) for t in data["transfers"]))


@dataclass
class _Posted:
    """An exchange under way, and who waits for it (CPU only)."""

    handle: Any
    messages: Sequence[Message]
    launch: int
    begin: Stamp
    end: torch.cuda.Event | Future[float] | None


@dataclass
class CallProfile:
    """Takes the times of one pass: marks of the ring, and the exchanges that go through it.

    Attributes:
        exchange: carries the transfers.
    """

    phase: str
    cp_rank: int
    launches: tuple[Launch, ...]
    device: torch.device
    exchange: Exchange | None
    waiters: ThreadPoolExecutor
    marks: dict[tuple[int, str], Stamp] = field(default_factory=dict)
    posted: list[_Posted] = field(default_factory=list)
    number: int = -1

    def mark(self, point: str) -> None:
        """Takes the time of a point of :data:`POINTS`; ``begin`` starts the next launch."""
        self.number += point == "begin"
        self.marks[self.number, point] = self._stamp()

    def _stamp(self) -> Stamp:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def post(self, messages: Sequence[Message]) -> _Posted:
        """Starts an exchange and has its end noted: by an event on a stream of its own, or by a thread on the CPU."""
        assert self.exchange is not None
        begin = self._stamp()
        handle: Any = self.exchange.post(messages)
        end: torch.cuda.Event | Future[float] | None = None
        if not isinstance(self.exchange, GroupExchange):
            return _Posted(handle, messages, self.number, begin, end)  # copies within one process are no transfers
        if self.device.type == "cuda":
            end = torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(torch.cuda.Stream(self.device)):
                self.exchange.wait(handle)
                end.record()
        else:
            end = self.waiters.submit(self._wait_on_host, handle)
        self.posted.append(_Posted(handle, messages, self.number, begin, end))
        return self.posted[-1]

    def _wait_on_host(self, handle: Any) -> float:
        assert self.exchange is not None
        self.exchange.wait(handle)
        return time.perf_counter()

    def wait(self, handle: _Posted) -> None:
        """Waits for an exchange that :meth:`post` started."""
        assert self.exchange is not None
        if isinstance(handle.end, Future):
            handle.end.result()
        else:
            self.exchange.wait(handle.handle)

    def read(self) -> PassTimes:
        """The times; waits for the device."""
        origin = self.marks[0, "begin"]
        launches = []
        for number, launch in enumerate(self.launches):
            at = {p: _ms(origin, self.marks[number, p]) for p in POINTS if (number, p) in self.marks}
            at.setdefault("summed", at["computed"])
            at.setdefault("end", at["summed"])
            launches.append(LaunchTimes(launch.chunks, *(at[p] for p in POINTS)))
        transfers = [
            TransferTimes(
                t.messages[0][0].channel.value,
                t.launch,
                sum(sent.numel() * sent.element_size() for _, sent, _ in t.messages),
                _ms(origin, t.begin),
                _ms(origin, t.end.result() if isinstance(t.end, Future) else t.end),
            )
            for t in self.posted
            if t.end is not None
        ]
        return PassTimes(self.phase, self.cp_rank, tuple(launches), tuple(transfers))


def _ms(origin: Stamp, stamp: Stamp) -> float:
    if isinstance(origin, torch.cuda.Event) and isinstance(stamp, torch.cuda.Event):
        stamp.synchronize()
        return float(origin.elapsed_time(stamp))
    assert isinstance(origin, float) and isinstance(stamp, float)
    return (stamp - origin) * 1e3


class RingProfile:
    """The passes of this process since :func:`profile_ring` began.

    Args:
        most: passes of each phase whose times are taken; the later ones run as if nobody looked. No limit if not given.

    Attributes:
        ranks: global ranks of the newest pass, in context-parallel order; empty if none went over process groups.
        call_type: what takes the times of a pass.
    """

    call_type: type[CallProfile] = CallProfile

    def __init__(self, most: int | None = None) -> None:
        self.ranks: tuple[int, ...] = ()
        self._most = most
        self._passes: list[CallProfile] = []
        self._waiters = ThreadPoolExecutor(max_workers=4, thread_name_prefix="ring-profile")

    def start(
        self, phase: str, cp_rank: int, launches: tuple[Launch, ...], device: torch.device, exchange: Exchange | None
    ) -> CallProfile | None:
        """Begins a pass; the ring's marks and exchanges go to what this returns. None: its times are not taken."""
        if self._most is not None and sum(call.phase == phase for call in self._passes) >= self._most:
            return None
        if isinstance(exchange, GroupExchange):
            self.ranks = tuple(exchange.ranks)
        self._passes.append(self.call_type(phase, cp_rank, launches, device, exchange, self._waiters))
        return self._passes[-1]

    def read(self) -> list[PassTimes]:
        """The times of all passes so far, and forgets them. Waits for the device."""
        found = [call.read() for call in self._passes]
        self._passes.clear()
        return found


_active: RingProfile | None = None


def active_profile() -> RingProfile | None:
    """The profile that passes report to, if there is one."""
    return _active


@contextmanager
def profile_ring(profile: RingProfile | None = None) -> Iterator[RingProfile]:
    """Takes the times of all ring passes of this process within the block (one block at a time)."""
    global _active
    before, _active = _active, profile or RingProfile()
    try:
        yield _active
    finally:
        _active = before
