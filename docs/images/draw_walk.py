"""Draws docs/images/walk.png, the README's picture, from the package's own index, layout and schedule.

python docs/images/draw_walk.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import FancyArrowPatch

from megatron_mtraining import Layout, VerticalSlashIndex
from megatron_mtraining.schedule import forward_schedule

BLOCKS, RANKS, INNER = 16, 4, 2
COLORS = ["#3b6fb6", "#e07b39", "#4a9d5b", "#b0509a"]
SEQ = BLOCKS * 64


def draw_index(axis: plt.Axes) -> None:
    """The kept pairs of one head, coloured by the rank that holds the query."""
    # Twelve neighbouring columns for each vertical line: one token would be too thin to see.
    columns = [first + i for first in (70, 330, 560) for i in range(12)]
    index = VerticalSlashIndex.from_lines([[[0, 1, 5]]], [[columns]], seq_len=SEQ)
    mask = index.to_mask()[0, 0].numpy()
    owner = np.repeat(Layout.striped(SEQ, RANKS).inverse("cpu").numpy() // (BLOCKS // RANKS), 64)
    picture = np.where(mask, owner[:, None] + 1, 0)
    axis.imshow(picture, cmap=ListedColormap(["white", *COLORS]), vmin=0, vmax=RANKS, interpolation="nearest")
    ticks = range(0, SEQ + 1, 256)
    axis.set(title="1  estimate: slash and vertical lines", xlabel="key", ylabel="query", xticks=ticks, yticks=ticks)
    axis.axhspan(SEQ - 64, SEQ, color="black", alpha=0.12)
    axis.set_ylim(SEQ, 0)
    axis.text(1010, 130, "the last queries (grey)\nchoose the lines", ha="right", va="center")


def draw_layout(axis: plt.Axes) -> None:
    """Which rank holds which 64-token stripe."""
    table = Layout.striped(SEQ, RANKS).block_position.tolist()
    for rank, blocks in enumerate(table):
        for block in blocks:
            axis.barh(RANKS + 0.6, 1, left=block, color=COLORS[rank], edgecolor="white")
        for place, block in enumerate(blocks):
            axis.barh(RANKS - 1 - rank, 1, left=2 + 3 * place, color=COLORS[rank], edgecolor="white")
            axis.text(2.5 + 3 * place, RANKS - 1 - rank, str(block), ha="center", va="center", color="white")
        axis.text(1.6, RANKS - 1 - rank, f"rank {rank}", ha="right", va="center")
    axis.text(8, RANKS + 1.2, "the sequence in stripes of 64 tokens", ha="center")
    axis.set(title="2  deal: block-striped layout", xlim=(-1.5, 16), ylim=(-0.7, RANKS + 1.7))
    axis.axis("off")


def draw_ring(axis: plt.Axes) -> None:
    """Which chunk each rank works on in each step of a 2 x 2 hierarchy, and what travels."""
    for rank in range(RANKS):
        y = RANKS - 1 - rank
        for number, step in enumerate(forward_schedule(rank, INNER, RANKS // INNER)):
            axis.barh(y, 0.8, left=number, color=COLORS[step.chunk], edgecolor="white")
            axis.text(number + 0.4, y, f"keys of {step.chunk}", ha="center", va="center", color="white", fontsize=8)
            if step.inner is not None:
                axis.add_patch(FancyArrowPatch((number + 0.8, y), (number + 1, y), arrowstyle="->", mutation_scale=8))
            if step.outer is not None:
                curve = {"arrowstyle": "->", "mutation_scale": 10, "linestyle": "--", "color": "#555555"}
                path = FancyArrowPatch(
                    (number + 0.4, y + 0.4), (number + 2.2, y + 0.4), connectionstyle="arc3,rad=-0.25", **curve
                )
                axis.add_patch(path)
        axis.text(-0.1, y, f"rank {rank}\n(node {rank // INNER})", ha="right", va="center", fontsize=8)
    axis.set(title="3  ring: inner hops each step,\nouter transfer (dashed) hidden behind a whole inner round")
    axis.set(xlim=(-1, 4), ylim=(-0.7, RANKS))
    axis.axis("off")


def main() -> None:
    """Draws the three panels."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), width_ratios=[1, 1.1, 1.2])
    for draw, axis in zip((draw_index, draw_layout, draw_ring), axes, strict=True):
        draw(axis)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("walk.png"), dpi=90, bbox_inches="tight")


if __name__ == "__main__":
    main()
