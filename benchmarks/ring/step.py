"""A training step put together from measured parts: attention of every layer, the rest of a layer, output layer and loss.

Everything is recomputed once (full recomputation). Left out: optimizer, reduction of gradients, pipeline, host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_mtraining.simulator.memory import Model

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class LayerTimes:
    """Milliseconds by local tokens, from the rows of ``benchmarks.bench_layer``; between them by straight lines."""

    rows: Rows

    def of(self, part: str, tokens: float) -> float:
        """A part's time for so many local tokens.

        Raises:
            ValueError: outside of what was measured, but for the output layer, which is made in equal pieces.
        """
        found = sorted((row["tokens"], row["ms"]) for row in self.rows if row["part"] == part)
        if part == "output layer and loss":
            return float(found[0][1] * tokens / found[0][0])
        x, y = zip(*found, strict=True)
        if not x[0] <= tokens <= x[-1]:
            raise ValueError(f"{part} of {tokens:g} tokens: measured from {x[0]} to {x[-1]}")
        return float(np.interp(tokens, x, y))


@dataclass(frozen=True)
class Attention:
    """Milliseconds of one layer's attention on the slowest rank: index, forward and backward, waiting included."""

    index: float
    forward: float
    backward: float


def step_ms(model: Model, layer: LayerTimes, attention: Attention, local_tokens: float) -> float:
    """A step of one sequence on the ranks that share it, in ms."""
    forward = layer.of("layer forward", local_tokens) + attention.index + attention.forward
    backward = layer.of("layer backward", local_tokens) + attention.backward
    return model.layers * (2 * forward + backward) + layer.of("output layer and loss", local_tokens)


def attention_of(rows: Rows, case: str, seq_len: int, index_ms: float = 0.0) -> Attention | None:
    """A case of a result file: measured (``ms``) or played with the simulator's links; ``None`` if it is not there.

    Args:
        index_ms: taken where the rows have no time of the index.
    """
    found = {row["pass"]: row for row in rows if row["case"] == case and row["seq_len"] == seq_len}
    if not {"forward", "backward"} <= set(found):
        return None
    times = {name: row.get("ms", row.get("simulated_ms")) for name, row in found.items()}
    return Attention(times.get("index", index_ms), times["forward"], times["backward"])
