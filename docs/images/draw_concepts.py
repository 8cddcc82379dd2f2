"""Draws the pictures of docs/concepts.md from the package's own index, layouts, work tables and schedules.

python docs/images/draw_concepts.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import ListedColormap

from megatron_mtraining import Layout, MTrainingConfig, VerticalSlashIndex, estimate_index
from megatron_mtraining.metrics import imbalance_degrees, work_table
from megatron_mtraining.schedule import Step, backward_schedule, forward_schedule

FOLDER = Path(__file__).parent
COLORS = ["#3b6fb6", "#7aa6d9", "#e07b39", "#f2b48a", "#4a9d5b", "#93c9a0", "#b0509a", "#d69bc8"]
SEQ, BLOCK, DIM = 4096, 64, 64
POOL = 8


PERIODS = (1010, 730, 1370, 1910)
"""Tokens between the lines of each head: no multiples of the block, as in real heads."""


def heads(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k ``[1, SEQ, 4, DIM]`` of heads as trained models have them: near keys, some distances, a few tokens."""
    generator = torch.Generator().manual_seed(seed)
    position = torch.arange(SEQ, dtype=torch.float32)[:, None, None]
    angle = 2 * torch.pi * position / torch.tensor(PERIODS)[:, None] * torch.arange(1, 28)
    waves = torch.cat([angle.cos(), angle.sin()], -1) * 1.7
    popular = torch.zeros(SEQ, len(PERIODS), 1)
    popular[torch.randint(0, SEQ, (8,), generator=generator)] = 66.0
    noise = torch.randn(2, SEQ, len(PERIODS), DIM - waves.shape[-1] - 1, generator=generator) * 0.5
    q = torch.cat([waves, torch.ones_like(popular), noise[0]], -1)
    k = torch.cat([waves, popular, noise[1]], -1)
    return q[None], k[None]


def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Causal softmax of the first head, ``[SEQ, SEQ]``."""
    scores = q[0, :, 0].double() @ k[0, :, 0].double().T * DIM**-0.5
    return scores.masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), -torch.inf).softmax(-1)


def pooled(matrix: torch.Tensor) -> np.ndarray:
    """The maximum of each ``POOL x POOL`` tile, so that single columns stay visible."""
    return torch.nn.functional.max_pool2d(matrix.float()[None], POOL)[0].numpy()


def draw_index() -> VerticalSlashIndex:
    """concept_index.png: what the probe rows see, which lines that selects, and the kept pairs."""
    q, k = heads()
    index = estimate_index(q, k, config=MTrainingConfig(top_p=0.9))
    weights, mask = attention(q, k), index.to_mask()[0, 0]
    figure, axes = plt.subplots(1, 4, figsize=(16, 4.2), width_ratios=[1, 0.9, 0.9, 1])
    extent = (0, SEQ, SEQ, 0)
    axes[0].imshow(pooled(weights) ** 0.25, cmap="magma", extent=extent)
    axes[0].axhspan(SEQ - BLOCK, SEQ, color="white", alpha=0.5)
    axes[0].annotate("the probe:\nlast 64 queries", (SEQ * 0.62, SEQ - 40), (SEQ * 0.55, SEQ * 0.35), color="white",
                     arrowprops={"arrowstyle": "->", "color": "white"})  # fmt: skip
    axes[0].set(title="attention of a head", xlabel="key", ylabel="query")
    draw_masses(axes[1], axes[2], weights, index)
    axes[3].imshow(pooled(mask), cmap=ListedColormap(["white", COLORS[0]]), extent=extent, interpolation="nearest")
    recall = float((weights * mask).sum(1).mean())
    title = f"kept at top-p 0.9: {kept_share(mask):.0%} of the pairs,\n{recall:.0%} of the attention of all rows"
    axes[3].set(title=title, xlabel="key", ylabel="query")
    save(figure, "concept_index.png")
    return index


def kept_share(mask: torch.Tensor) -> float:
    """Kept pairs over causal pairs."""
    return float(mask.sum() / (SEQ * (SEQ + 1) / 2))


def draw_masses(slash: plt.Axes, column: plt.Axes, weights: torch.Tensor, index: VerticalSlashIndex) -> None:
    """The probe's mass by block distance and by key, kept lines in colour."""
    probe = weights[-BLOCK:].sum(0)
    by_distance = probe.view(-1, BLOCK).sum(1).flip(0) / BLOCK
    kept = index.slash_bits()[0, 0].bool().numpy()
    slash.bar(range(kept.size), by_distance, color=np.where(kept, COLORS[2], "#bbbbbb"), width=0.9)
    slash.set(title=f"slash mass: {kept.sum()} of {kept.size} distances kept", xlabel="distance in blocks of 64",
              ylabel="share of the probe's attention")  # fmt: skip
    words = index.column_words[0, 0]
    columns = ((words[:, None] >> torch.arange(64)) & 1).bool().flatten().numpy()
    mass = (probe / BLOCK).numpy()
    order = np.argsort(-mass)
    column.plot(np.arange(1, SEQ + 1), np.cumsum(mass[order]), color="#bbbbbb")
    column.plot(np.arange(1, columns.sum() + 1), np.cumsum(mass[order])[: columns.sum()], color=COLORS[2], linewidth=3)
    column.axhline(0.9, color="black", linewidth=0.6, linestyle=":")
    column.set(title=f"vertical mass: {columns.sum()} of {SEQ} keys kept", xlabel="keys, heaviest first (log)",
               ylabel="cumulated share", xscale="log", ylim=(0, 1.02))  # fmt: skip


def draw_layouts(index: VerticalSlashIndex) -> None:
    """concept_layout.png: who holds what, and the work of each rank in each step of a flat ring, zigzag and striped."""
    ranks = 4
    figure, axes = plt.subplots(2, 2, figsize=(13, 5), width_ratios=[1.25, 1])
    layouts = (Layout.zigzag(SEQ, ranks), Layout.striped(SEQ, ranks))
    tables = [work_table(index, layout) for layout in layouts]
    most = max(float(table.max()) for table in tables) / 1e6
    for (strip, bars), layout, table in zip(axes, layouts, tables, strict=True):
        draw_strip(strip, layout)
        draw_work(bars, layout.kind, table, most * 1.1)
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, color=COLORS[2 * rank]) for rank in range(ranks)],
        [f"rank {rank}" for rank in range(ranks)],
        ncols=ranks,
        loc="upper left",
        bbox_to_anchor=(0.15, 0.56),
        frameon=False,
    )
    save(figure, "concept_layout.png")


def draw_strip(axis: plt.Axes, layout: Layout) -> None:
    """The blocks of the sequence in the colours of their ranks."""
    owner = layout.inverse("cpu") // layout.local_blocks
    for block, rank in enumerate(owner.tolist()):
        axis.barh(0, 1, left=block, color=COLORS[2 * rank], edgecolor="white", linewidth=0.6)
    axis.set(title=f"{layout.kind}: the sequence's {layout.num_blocks} blocks, coloured by rank", ylim=(-0.9, 0.9))
    axis.axis("off")


def draw_work(axis: plt.Axes, kind: str, table: torch.Tensor, top: float) -> None:
    """Pairs of every rank in every step; the columns are counted in the last one."""
    ranks, steps = table.shape
    for rank in range(ranks):
        axis.bar(np.arange(steps) + 0.2 * rank - 0.3, table[rank] / 1e6, width=0.18, color=COLORS[2 * rank])
    worker = imbalance_degrees(table)["critical"]
    axis.set(title=f"{kind}: a ring that waits in each step pays {worker:.2f} x the mean rank", xlabel="ring step")
    axis.set(ylabel="million pairs", xticks=range(steps), ylim=(0, top))


def draw_pass(axis: plt.Axes, schedules: list[tuple[Step, ...]], inner: int, title: str) -> None:
    """One pass: chunks by rank and step, windows, and what crosses between nodes."""
    ranks = len(schedules)
    for rank, steps in enumerate(schedules):
        y = ranks - 1 - rank - 0.35 * (rank // inner)
        for number, step in enumerate(steps):
            x = number + 0.25 * (number // inner)
            axis.barh(y, 0.94, left=x, height=0.86, color=COLORS[step.chunk])
            axis.text(x + 0.47, y, str(step.chunk), ha="center", va="center", color="white", fontsize=9)
        axis.text(-0.15, y, f"rank {rank}", ha="right", va="center", fontsize=9)
    for window in range(ranks // inner):
        left = window * (inner + 0.25)
        axis.text(left + inner / 2, ranks - 0.25, f"window {window + 1}", ha="center", fontsize=9)
        for name, height in (("outer", -1.35), ("outer_grad", -1.95)):
            if any(getattr(step, name) for step in schedules[0][window * inner : (window + 1) * inner]):
                draw_outer(axis, left, inner, name, height)
    axis.set(title=title, xlim=(-1, ranks + 1.3), ylim=(-2.3, ranks + 0.2))
    axis.axis("off")


def draw_outer(axis: plt.Axes, left: float, inner: int, name: str, height: float) -> None:
    """The time in which an outer transfer travels."""
    start, text, color = (left, "next node's keys travel", "#555555")
    if name == "outer_grad":
        start, text, color = (left + inner + 0.25, "the window's dK, dV travel", "#b03030")
    axis.annotate("", (start + inner, height), (start, height), arrowprops={"arrowstyle": "->", "color": color})
    axis.text(start + inner / 2, height + 0.12, text, ha="center", fontsize=8, color=color)


def draw_ring() -> None:
    """concept_ring.png: both passes of 2 nodes of 4 ranks."""
    inner, outer = 4, 2
    ranks = range(inner * outer)
    figure, axes = plt.subplots(1, 2, figsize=(14, 4.8))
    draw_pass(
        axes[0],
        [forward_schedule(rank, inner, outer) for rank in ranks],
        inner,
        "forward: each cell is the chunk of keys worked on",
    )
    draw_pass(
        axes[1],
        [backward_schedule(rank, inner, outer) for rank in ranks],
        inner,
        "backward: the same chunks, both rings turned around",
    )
    save(figure, "concept_ring.png")


def save(figure: plt.Figure, name: str) -> None:
    """Writes a picture, small enough for a repository."""
    figure.tight_layout()
    figure.savefig(FOLDER / name, dpi=80, bbox_inches="tight", facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    draw_layouts(draw_index())
    draw_ring()
