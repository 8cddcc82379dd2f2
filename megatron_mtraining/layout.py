"""Layouts: how blocks of the sequence are dealt to context-parallel ranks, as tables.

A layout is nothing but ``block_position[rank][local_block] -> global block``; striped (paper, section 3.3), zigzag and
contiguous differ in the values of this table alone, and everything else reads the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from .config import BLOCK, MTrainingConfig


@dataclass(frozen=True)
class Layout:
    """Placement of a sequence on context-parallel ranks.

    Make one with :meth:`striped`, :meth:`zigzag`, :meth:`contiguous` or :meth:`from_config`.

    Attributes:
        kind: name of the placement.
        seq_len: global sequence length, in tokens.
        cp_size: number of ranks.
        stripe_size: tokens that stay together.
        block_position: int32 ``[cp_size, local_blocks]``, the global block of each local block (on the CPU).
    """

    kind: str
    seq_len: int
    cp_size: int
    stripe_size: int
    block_position: Tensor = field(repr=False, compare=False)
    _table_hash: int = field(init=False, repr=False)
    _on_device: dict[tuple[str, torch.device], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        # Layouts are keys of caches; a tensor cannot be compared there, but its contents must be.
        object.__setattr__(self, "_table_hash", hash(tuple(self.block_position.flatten().tolist())))

    @classmethod
    def striped(cls, seq_len: int, cp_size: int, stripe_size: int = BLOCK, rotation: int = 1) -> Layout:
        """Stripe ``t`` of ``stripe_size`` tokens belongs to rank ``t % cp_size``.

        With ``rotation`` the stripes of each round (``cp_size`` of them) are dealt one rank further on than those of the
        round before, within every ``rotation`` adjacent ranks. In a hierarchical ring with inner rings of that size all
        ranks of a node then meet the same distances in a step, which they do not otherwise: those that reach around their
        node meet another residue class (docs/simulator.md, "Rotated stripes").

        Raises:
            ValueError: if ``stripe_size`` is no multiple of 64, ``rotation`` does not divide ``cp_size``, or ``seq_len``
                (with more than one rank) is no multiple of ``stripe_size * cp_size``.
        """
        if stripe_size < BLOCK or stripe_size % BLOCK:
            raise ValueError(f"stripe_size={stripe_size}: must be a multiple of {BLOCK}")
        if cp_size > 1 and (rotation < 1 or cp_size % rotation):
            raise ValueError(f"stripe_rotation={rotation}: must divide cp_size={cp_size}")
        plain = cls._make("striped", seq_len, cp_size, stripe_size, stripe_size)
        return plain if cp_size == 1 or rotation == 1 else plain._rotated(rotation)

    @classmethod
    def zigzag(cls, seq_len: int, cp_size: int) -> Layout:
        """Rank ``r`` holds chunks ``r`` and ``2 * cp_size - 1 - r`` of ``2 * cp_size`` (Megatron's default).

        Raises:
            ValueError: if ``seq_len`` (with more than one rank) is no multiple of ``2 * 64 * cp_size``.
        """
        return cls._make("zigzag", seq_len, cp_size, seq_len // (2 * max(cp_size, 1)), 2 * BLOCK)

    @classmethod
    def contiguous(cls, seq_len: int, cp_size: int) -> Layout:
        """Rank ``r`` holds the ``r``-th of ``cp_size`` equal pieces.

        Raises:
            ValueError: if ``seq_len`` (with more than one rank) is no multiple of ``64 * cp_size``.
        """
        return cls._make("contiguous", seq_len, cp_size, seq_len // max(cp_size, 1), BLOCK)

    @classmethod
    @lru_cache(maxsize=64)
    def from_config(cls, config: MTrainingConfig, seq_len: int, cp_size: int) -> Layout:
        """The layout that ``config.layout`` and ``config.stripe_size`` name; the same object for the same arguments, so that
        its tables stay on the device.
        """
        if config.layout == "striped":
            return cls.striped(seq_len, cp_size, config.stripe_size, config.stripe_rotation)
        made: Layout = getattr(cls, config.layout)(seq_len, cp_size)
        return made

    @classmethod
    def _make(cls, kind: str, seq_len: int, cp_size: int, stripe_size: int, unit: int) -> Layout:
        if cp_size < 1:
            raise ValueError(f"cp_size={cp_size}: must be at least 1")
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len}: must be at least 1")
        if cp_size == 1:
            return cls(kind, seq_len, 1, stripe_size, torch.arange(-(-seq_len // BLOCK), dtype=torch.int32)[None])
        check_multiple(kind, seq_len, cp_size, unit)
        blocks = torch.arange(seq_len // BLOCK, dtype=torch.int32)
        if kind == "striped":
            table = blocks.view(-1, cp_size, stripe_size // BLOCK).transpose(0, 1).reshape(cp_size, -1)
        elif kind == "zigzag":
            halves = blocks.view(2 * cp_size, -1)
            table = torch.cat([halves[:cp_size], halves[cp_size:].flip(0)], dim=1)
        else:
            table = blocks.view(cp_size, -1)
        return cls(kind, seq_len, cp_size, stripe_size, table.contiguous())

    def _rotated(self, rotation: int) -> Layout:
        """The striped layout with round ``m`` dealt ``m`` ranks further on within each ``rotation`` ranks."""
        rounds = self.block_position.view(self.cp_size, -1, self.stripe_size // BLOCK)
        rank = torch.arange(self.cp_size)[:, None]
        number = torch.arange(rounds.shape[1])[None, :]
        giver = rank // rotation * rotation + (rank - number) % rotation
        table = rounds[giver, number].flatten(1)
        return Layout(self.kind, self.seq_len, self.cp_size, self.stripe_size, table.contiguous())

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole sequence, the last one possibly not full."""
        return self.block_position.numel()

    @property
    def local_blocks(self) -> int:
        """Blocks of a rank."""
        return self.block_position.shape[1]

    @property
    def local_seq_len(self) -> int:
        """Tokens of a rank."""
        return self.seq_len // self.cp_size

    def table(self, device: torch.device | str) -> Tensor:
        """``block_position`` on a device; copied there once."""
        return self._cached("blocks", device, lambda: self.block_position)

    def rows(self, ranks: tuple[int, ...], device: torch.device | str) -> Tensor:
        """``block_position`` of some ranks, in their order, on a device; copied there once."""
        if len(ranks) == 1:
            return self.table(device)[ranks[0]][None]
        return self._cached(f"rows {ranks}", device, lambda: self.block_position[list(ranks)])

    def inverse(self, device: torch.device | str) -> Tensor:
        """int32 ``[num_blocks]``: ``rank * local_blocks + local_block`` of each global block, on a device."""
        return self._cached("inverse", device, lambda: torch.argsort(self.block_position.flatten()).to(torch.int32))

    def _cached(self, name: str, device: torch.device | str, make) -> Tensor:  # type: ignore[no-untyped-def]
        key = (name, torch.device(device))
        if key not in self._on_device:
            self._on_device[key] = make().to(device)
        return self._on_device[key]

    def token_position(self, cp_rank: int) -> Tensor:
        """int64 ``[local_seq_len]``: the position in the sequence of each token of a rank (on the CPU)."""
        blocks = self.block_position[cp_rank].long()
        return (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[: self.local_seq_len]

    def shard(self, x: Tensor, cp_rank: int, dim: int = 1) -> Tensor:
        """The part of ``x`` that ``cp_rank`` holds; ``x`` has ``seq_len`` entries along ``dim``.

        Raises:
            ValueError: if ``x`` has another length, or there is no such rank.
        """
        if x.shape[dim] != self.seq_len:
            raise ValueError(f"dimension {dim} of x has {x.shape[dim]} tokens: the layout is for {self.seq_len}")
        if not 0 <= cp_rank < self.cp_size:
            raise ValueError(f"cp_rank={cp_rank}: must be from 0 to {self.cp_size - 1}")
        if self.cp_size == 1:
            return x
        return x.index_select(dim, self.token_position(cp_rank).to(x.device))

    def unshard(self, shards: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The inverse of :meth:`shard`: the parts of all ranks, in rank order, put back into one sequence.

        Raises:
            ValueError: if the number or the lengths of the parts are not those of the layout.
        """
        lengths = [part.shape[dim] for part in shards]
        if lengths != [self.local_seq_len] * self.cp_size:
            raise ValueError(f"parts of {lengths} tokens: must be {self.cp_size} parts of {self.local_seq_len}")
        if self.cp_size == 1:
            return shards[0]
        positions = torch.cat([self.token_position(rank) for rank in range(self.cp_size)])
        return torch.cat(list(shards), dim).index_select(dim, torch.argsort(positions).to(shards[0].device))


def check_multiple(kind: str, seq_len: int, cp_size: int, unit: int) -> None:
    """Refuses a sequence length that ``cp_size`` ranks cannot share in pieces of ``unit`` tokens.

    Raises:
        ValueError: naming the length, the needed multiple and the nearest valid lengths.
    """
    need = unit * cp_size
    if seq_len % need == 0:
        return
    below = seq_len // need * need
    nearest = f"{below} or {below + need}" if below else f"{need}"
    raise ValueError(
        f"seq_len={seq_len}: the {kind} layout over cp_size={cp_size} needs a multiple of {need}; nearest: {nearest}"
    )
