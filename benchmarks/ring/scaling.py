"""Rings over numbers of GPUs: what is started for each number, what the simulator says of it, and the table of all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.problems import Problem
from benchmarks.ring.cases import Row, pattern_index
from benchmarks.ring.prediction import gathered_rows, ring_rows
from benchmarks.ring.run_ranks import runs
from benchmarks.ring.throttle import SlowLinks
from megatron_mtraining.simulator.timeline import Ring

FEW = ("striped, hierarchical", "striped, flat", "zigzag, hierarchical", "zigzag, flat")
"""Cases that are run once more for numbers of connections and over slow links."""

SERIES = {
    "ours, striped": ("ours, one rank", "striped"),
    "ours, zigzag": ("ours, one rank", "zigzag"),
    "ours, striped, hierarchical": ("ours, one rank", "striped, hierarchical"),
    "ours, dense, striped": ("dense, one rank", "dense, striped"),
    "ours, dense, zigzag": ("dense, one rank", "dense, zigzag"),
    "cuDNN dense, gathered keys": ("cuDNN dense, one rank", "cuDNN dense, gathered keys"),
    "Transformer Engine dense, p2p": ("Transformer Engine dense, p2p",),
}
"""Cases that are one way to attend, on one rank and on more."""

Values = dict[str, Any]
NONE = SlowLinks()


def lengths(size: int, constant_global: list[int], constant_local: list[int]) -> list[int]:
    """The lengths that so many ranks run."""
    return sorted({*constant_global, *(local * size for local in constant_local)})


@dataclass(frozen=True)
class Start:
    """One start of ``benchmarks.bench_ring`` under torchrun.

    Attributes:
        size: ranks.
        seq_lens: global lengths.
        inner: numbers of ranks a node.
        slow: artificial slow links.
        few: a few cases alone, without dense attention of any kind.
        connections: ``CUDA_DEVICE_MAX_CONNECTIONS``; ``None``: as it is.
    """

    size: int
    seq_lens: tuple[int, ...]
    inner: tuple[int, ...]
    slow: SlowLinks = NONE
    few: bool = False
    connections: int | None = None

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.size}" + ("" if self.connections is None else f"-{self.connections}-connections")

    def words(self) -> list[str]:
        """Its options."""
        found = ["--seq-lens", *map(str, self.seq_lens), "--inner", *map(str, self.inner), *self.slow.words()]
        return found + (["--no-peer", "--cases", *FEW] if self.few else ["--dense"])

    def predicted(self, heads: tuple[int, int, int], pattern: str) -> Iterator[Row]:
        """What the simulator says of all that it runs; of a few cases over slow links alone: connections are nothing to it, and
        over the links as they are they belong to another start.
        """
        slow = replace(self.slow, ways=("copies",))  # how exchanges are held back is nothing to it either
        for seq_len in self.seq_lens:
            problem = Problem(seq_len, *heads, device="cpu")
            index = pattern_index(problem, pattern)
            for case, ring, throttle in runs(self.size, list(self.inner), slow, not self.few):
                if not self.few or (throttle is not None and case.name in FEW):
                    yield from ring_rows(problem, case, ring, index, throttle)
            if not self.few:
                yield from gathered_rows(problem, Ring(self.size, self.size, self.inner[0]))


def starts(
    sizes: list[int], constant_global: list[int], constant_local: list[int], connections: list[int],
    slow: SlowLinks,
) -> list[Start]:  # fmt: skip
    """All starts: every size; at the largest once more for each number of connections, at the most of them with the slow
    links: a delay must not stand in the way of other streams. Four and more ranks run in nodes of half of them, too.
    """
    found = []
    for size in sizes:
        inner = (size, size // 2) if size >= 4 and size % 2 == 0 else (size,)
        found.append(Start(size, tuple(lengths(size, constant_global, constant_local)), inner))
    most, long = max(sizes), tuple(sorted(constant_global))
    if most > 1:
        node = most // 2 if most % 2 == 0 else 1
        for number in sorted(connections, reverse=True):
            found.append(Start(most, long, (node,), slow if number == max(connections) else NONE, True, number))
    return found


def points(rows: list[Row], names: tuple[str, ...]) -> dict[tuple[int, int], dict[str, Values]]:
    """Rows of a way to attend by ``(ranks, length)`` and pass, over the links and with the connections that are there."""
    found: dict[tuple[int, int], dict[str, Values]] = {}
    for values in rows:
        row: Values = dict(values)
        plain = row["links"] == "as it is" and row.get("connections", "default") == "default"
        # Of dense rings the flat one: its name is the same in nodes.
        nodes = row["inner_size"] != row["cp_size"] and not row["case"].endswith("hierarchical")
        if plain and row["case"] in names and not nodes:
            found.setdefault((row["cp_size"], row["seq_len"]), {})[row["pass"]] = row
    return found


def rate(row: Values, ms: float) -> float:
    """Kept pairs a millisecond and rank, up to a constant factor."""
    return float(row["density"] * row["seq_len"] ** 2 / row["cp_size"] / ms)


def exposed(passes: dict[str, Values], column: str) -> float | None:
    """Of forward and backward together; None where it is not known."""
    parts = [passes[phase].get(column) for phase in ("forward", "backward")]
    return None if None in parts else round(sum(parts), 3)  # type: ignore[arg-type]


def scaled(series: str, constant: str, group: list[dict[str, Values]]) -> Iterator[Row]:
    """Rows of one way to attend at one constant length, over the ranks. Efficiency is that of the rate a rank over the first
    row's: at a constant global length, speed-up over ranks.
    """
    first = group[0]["call"]
    for passes in group:
        call = passes["call"]
        row: Row = {"series": series, "constant": constant, "ranks": call["cp_size"], "seq_len": call["seq_len"],
                    "density": call["density"]}  # fmt: skip
        for prefix in ("", "predicted_"):
            ms = call.get(f"{prefix}ms")
            if ms is None:
                continue
            row[f"{prefix}ms"] = ms
            row[f"{prefix}efficiency"] = round(rate(call, ms) / rate(first, first[f"{prefix}ms"]), 3)
            row[f"{prefix}exposed_ms"] = exposed(passes, f"{prefix}exposed_ms")
        yield row


def table(rows: list[Row], constant_global: list[int], constant_local: list[int]) -> list[Row]:
    """The scaling of every way to attend that was run on two or more numbers of ranks."""
    found: list[Row] = []
    for series, names in SERIES.items():
        known = points(rows, names)
        sizes = sorted({size for size, _ in known})
        chosen = [(f"global {length}", [(size, length) for size in sizes]) for length in constant_global]
        chosen += [(f"local {length}", [(size, length * size) for size in sizes]) for length in constant_local]
        for constant, keys in chosen:
            group = [known[key] for key in keys if "call" in known.get(key, {})]
            if len(group) > 1:
                found += scaled(series, constant, group)
    return found
