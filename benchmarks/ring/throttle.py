"""An artificial slow link between nodes: exchanges that cross a node's border are held back, on the communication side alone.

Ranks of one host have no slow link. This puts a delay in front of every exchange of the rings that crosses the border of a
node (so many adjacent ranks), as long as a link of the configured bandwidth and latency would take, and then lets it go
over the real one. It takes the place of the ring's exchange through :func:`megatron_mtraining.ring_profile.profile_ring`:

    with profile_ring(ThrottledProfile(Throttle(node_size=2, gbs=40))) as profile:
        out = mtraining_attention(...)

On CUDA the delay (``benchmarks.ring.delays``) is on a stream of the channel's own, and NCCL's stream waits for it; the compute
stream does not. On the CPU an exchange counts as arrived no sooner than its delay after it was posted. Sender and receiver hold
back the same exchange by the same time. Each channel has its link to itself, as in the simulator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.ring.delays import WAYS, Delay
from megatron_mtraining.comm import Exchange, GroupExchange, Message
from megatron_mtraining.launches import Launch
from megatron_mtraining.ring_profile import CallProfile, RingProfile
from megatron_mtraining.schedule import Channel
from megatron_mtraining.simulator import Link


@dataclass(frozen=True)
class Throttle:
    """A slow link between nodes.

    Attributes:
        node_size: adjacent ranks of a node.
        gbs: its bandwidth each way in GB/s (10^9 bytes), one link for a rank and channel.
        us: its latency in microseconds.
        way: what holds an exchange back on CUDA, see :data:`benchmarks.ring.delays.WAYS`.

    Raises:
        ValueError: for a bandwidth that is not positive, a negative latency, or an unknown way.
    """

    node_size: int
    gbs: float
    us: float = 0.0
    way: str = "copies"

    def __post_init__(self) -> None:
        if not self.gbs > 0 or not self.us >= 0:
            raise ValueError(f"gbs={self.gbs}, us={self.us}: the bandwidth must be positive, the latency at least 0")
        if self.way not in WAYS:
            raise ValueError(f"way={self.way!r}: must be one of {', '.join(WAYS)}")

    @property
    def label(self) -> str:
        """What rows say of it."""
        return f"artificial, {self.gbs:g} GB/s + {self.us:g} us" + (", by a kernel" if self.way == "kernel" else "")

    def link(self, real: Link) -> Link:
        """What an exchange goes through: the delay, then the link that is there."""
        return Link(self.us / 1e6 + real.latency, 1 / (1 / (self.gbs * 1e9) + 1 / real.bandwidth))

    def seconds(self, rank: int, messages: Sequence[Message]) -> float:
        """The delay of an exchange of a rank; 0 if all of it stays in the node. Both directions pass at once."""

        def far(peer: int) -> bool:
            return peer // self.node_size != rank // self.node_size

        out = sum(sent.nbytes for transfer, sent, _ in messages if far(transfer.send_to))
        back = sum(received.nbytes for transfer, _, received in messages if far(transfer.receive_from))
        return self.us / 1e6 + max(out, back) / (self.gbs * 1e9) if out or back else 0.0


@dataclass(frozen=True)
class SlowLinks:
    """The slow links of a run, one after another; none by default.

    Attributes:
        gbs, us, ways: see :class:`Throttle`.
    """

    gbs: tuple[float, ...] = ()
    us: float = 0.0
    ways: tuple[str, ...] = ("copies",)

    def throttles(self, node_size: int) -> list[Throttle]:
        """Every link, between nodes of so many ranks."""
        return [Throttle(node_size, gbs, self.us, way) for way in self.ways for gbs in self.gbs]

    def words(self) -> list[str]:
        """As options of ``benchmarks.bench_ring``."""
        if not self.gbs:
            return []
        return ["--outer-gbs", *map(str, self.gbs), "--outer-us", str(self.us), "--outer-by", *self.ways]


class Delayed(list[dist.Work]):
    """Transfers under way that have not arrived before ``until`` (of ``time.perf_counter``)."""

    until = 0.0


class ThrottledExchange(GroupExchange):
    """Exchanges of a ring over process groups, those between nodes held back.

    Args:
        plain: the exchange of the product.
        throttle: the slow link.
        delay: holds back a stream; not needed on the CPU.
        streams: streams of the channels, made as they are needed and shared by the passes.
    """

    def __init__(
        self, plain: GroupExchange, throttle: Throttle, delay: Delay | None, streams: dict[Channel, torch.cuda.Stream]
    ) -> None:
        super().__init__(plain.groups)
        self.throttle, self.delay, self.streams = throttle, delay, streams

    def post(self, messages: Sequence[Message]) -> list[dist.Work]:
        """Starts an exchange, behind its delay."""
        seconds = self.throttle.seconds(self.groups.cp_rank, messages)
        if not seconds:
            return super().post(messages)
        if not messages[0][1].is_cuda:
            delayed = Delayed(super().post(messages))
            delayed.until = time.perf_counter() + seconds
            return delayed
        channel = messages[0][0].channel
        if channel not in self.streams:
            # Of high priority: these come from a pool of their own, so no other stream is the same one.
            self.streams[channel] = torch.cuda.Stream(priority=-1)
        stream = self.streams[channel]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert self.delay is not None
            self.delay(seconds, channel)
            return super().post(messages)

    def wait(self, handle: list[dist.Work]) -> None:
        """Waits for an exchange; on CUDA the current stream does."""
        super().wait(handle)
        if isinstance(handle, Delayed):
            time.sleep(max(0.0, handle.until - time.perf_counter()))


class ThrottledProfile(RingProfile):
    """Takes the times of passes whose exchanges between nodes are held back."""

    def __init__(self, throttle: Throttle) -> None:
        super().__init__()
        self.throttle = throttle
        self._delay = Delay(throttle.way) if torch.cuda.is_available() else None
        self._streams: dict[Channel, torch.cuda.Stream] = {}

    def start(
        self, phase: str, cp_rank: int, launches: tuple[Launch, ...], device: torch.device, exchange: Exchange | None
    ) -> CallProfile | None:
        """Begins a pass, with the throttled exchange in the place of the product's."""
        if isinstance(exchange, GroupExchange):
            exchange = ThrottledExchange(exchange, self.throttle, self._delay, self._streams)
        return super().start(phase, cp_rank, launches, device, exchange)
