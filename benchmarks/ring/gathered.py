"""Dense context parallelism by gathering: every rank gets all keys, and attends densely with one library call a piece.

The placement is zigzag, Megatron's. A rank's two chunks are each a rectangle (earlier keys) and a triangle (own keys);
merging the two, which a real implementation has to do, is left out here, in its favour.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.timing import measure
from megatron_mtraining.simulator import Links, Shape


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """cuDNN's attention on CUDA, torch's on the CPU; ``[batch, seq, heads, dim]``, key heads not expanded."""
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    backends = [SDPBackend.CUDNN_ATTENTION] if q.is_cuda else [SDPBackend.MATH]
    with sdpa_kernel(backends):
        return torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=causal, enable_gqa=True
        )


class GatheredDense:
    """The passes of one rank.

    Args:
        q: the rank's queries, its two zigzag chunks (one rank: everything), ``[batch, rows, heads, dim]``.
        k, v: all keys and values in the order of the sequence.
        dout: as q.
        rank, cp_size: the rank and how many there are.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rank: int, cp_size: int) -> None:
        self.leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        self.numbers = (rank, 2 * cp_size - 1 - rank) if cp_size > 1 else (0,)
        self.dout = dout.transpose(1, 2)
        self.outs: list[Tensor] = []

    def forward(self) -> None:
        """All pieces; their graph serves the backward passes."""
        self.outs = []
        q, k, v = self.leaves
        rows = q.shape[1] // len(self.numbers)
        for place, number in enumerate(self.numbers):
            queries = q[:, place * rows : (place + 1) * rows]
            own, earlier = slice(number * rows, (number + 1) * rows), slice(0, number * rows)
            self.outs.append(attend(queries, k[:, own], v[:, own], True))
            if number:
                self.outs.append(attend(queries, k[:, earlier], v[:, earlier], False))

    def upstream(self) -> list[Tensor]:
        """The gradient of each piece's output."""
        rows = self.leaves[0].shape[1] // len(self.numbers)
        parts = [self.dout[:, :, place * rows : (place + 1) * rows] for place in range(len(self.numbers))]
        return [part for part, number in zip(parts, self.numbers, strict=True) for _ in range(1 + (number > 0))]

    def backward(self) -> tuple[Tensor, ...]:
        """dq and the rank's part of dk and dv of the last forward pass."""
        return torch.autograd.grad(self.outs, self.leaves, self.upstream(), retain_graph=True)


def local_tensors(tensors: tuple[Tensor, ...], rank: int, cp_size: int) -> tuple[Tensor, ...]:
    """q, k, v, dout of one rank from whole ones: its zigzag rows, all keys."""
    q, k, v, dout = tensors
    if cp_size == 1:
        return tensors
    rows = q.shape[1] // (2 * cp_size)
    mine = [slice(n * rows, (n + 1) * rows) for n in (rank, 2 * cp_size - 1 - rank)]
    q, dout = (torch.cat([x[:, part] for part in mine], 1) for x in (q, dout))
    return q, k, v, dout


def gather_ms(shape: Shape, cp_size: int, node_size: int, links: Links) -> tuple[float, float]:
    """``(forward, backward)``: gathering K and V, and reducing and scattering their gradients in the same type, in ms.

    A ring over all ranks: as many chunks pass every link as there are other ranks; the slowest link paces it.
    """
    link = links.inter if cp_size > node_size else links.intra
    hops = (cp_size - 1) * (link.latency + shape.chunk_bytes(cp_size) / link.bandwidth)
    return hops * 1e3, hops * 1e3


def measured(tensors: tuple[Tensor, ...], cp_size: int, budget_ms: float = 1500.0) -> dict[str, float]:
    """Compute time of one rank's passes in ms: every rank has the same pairs."""
    passes = GatheredDense(*local_tensors(tensors, cp_size // 2, cp_size), rank=cp_size // 2, cp_size=cp_size)
    found: dict[str, float] = {}
    runs: tuple[tuple[str, Callable[[], object]], ...] = (("forward", passes.forward), ("backward", passes.backward))
    for phase, run in runs:
        long = tensors[0].shape[1] / cp_size > 131072
        found[phase] = measure(run, repeats=3, budget_ms=budget_ms, warm_up=not long).ms
    return found


class GatheredRanks:
    """The same on real ranks: the gathering of K and V, and the reduction of their gradients, included."""

    def __init__(self, tensors: tuple[Tensor, ...], group: dist.ProcessGroup) -> None:
        self.group, self.size, rank = group, dist.get_world_size(group), dist.get_rank(group)
        q, k, v, dout = local_tensors(tensors, rank, self.size)
        rows = tensors[0].shape[1] // max(1, 2 * self.size)
        # What the rank holds of K and V: its two chunks (one rank: both halves).
        mine = (rank, 2 * self.size - 1 - rank)
        self.local = [torch.cat([x[:, n * rows : (n + 1) * rows] for n in mine], 1) for x in (k, v)]
        self.passes = GatheredDense(q, k, v, dout, rank, self.size)

    def forward(self) -> None:
        """Gathers and attends."""
        if self.size > 1:
            for whole, local in zip(self.passes.leaves[1:], self.local, strict=True):
                gathered = local.new_empty((2 * self.size, *local.shape[:1], local.shape[1] // 2, *local.shape[2:]))
                halves = torch.stack(local.chunk(2, 1))
                dist.all_gather_into_tensor(gathered, halves, group=self.group)
                order = [2 * r if r < self.size else 2 * (2 * self.size - 1 - r) + 1 for r in range(2 * self.size)]
                with torch.no_grad():
                    whole.copy_(torch.cat([gathered[place] for place in order], 1))
        self.passes.forward()

    def backward(self) -> list[Tensor]:
        """Attends and returns dq and the rank's own dk and dv."""
        dq, *whole = self.passes.backward()
        if self.size == 1:
            return [dq, *whole]
        found = [dq]
        for grad in whole:
            chunks = grad.chunk(2 * self.size, 1)
            order = [n for r in range(self.size) for n in (r, 2 * self.size - 1 - r)]
            sent = torch.stack([chunks[n] for n in order])
            received = sent.new_empty((2, *sent.shape[1:]))
            dist.reduce_scatter_tensor(received, sent, group=self.group)
            found.append(torch.cat(list(received), 1))
        return found
