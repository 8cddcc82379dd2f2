"""Picture of a scaling run: speed-up at a constant global length, efficiency at a constant local one, calls over slow links.

    python -m benchmarks.plot_scaling benchmarks/results/scaling-DATE-2-gpus.json --target docs/images/scaling.png

Filled: measured; hollow and dashed: what the simulator predicts. ``benchmarks.bench_scaling`` draws its own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.ring.cases import Row

STYLES = {
    "ours, striped": ("C0", "o"),
    "ours, zigzag": ("C3", "v"),
    "ours, striped, hierarchical": ("C2", "^"),
    "ours, dense, striped": ("C1", "s"),
    "cuDNN dense, gathered keys": ("C7", "D"),
    "Transformer Engine dense, p2p": ("C4", "P"),
}
SLOW = {
    "striped, hierarchical": ("C2", "^"),
    "striped, flat": ("C0", "o"),
    "zigzag, flat": ("C3", "v"),
}
KINDS = ("", "predicted_")
Values = dict[str, Any]


def line(axis: Any, x: list[float], y: list[float], style: tuple[str, str], predicted: bool, label: str) -> None:
    """One line: filled and whole, or hollow and dashed."""
    color, marker = style
    fill, dash = ("none", "--") if predicted else ("full", "-")
    axis.plot(x, y, marker=marker, linestyle=dash, color=color, fillstyle=fill, linewidth=1, markersize=6, label=label)


def longest(rows: list[Values], kind: str) -> str | None:
    """The longest constant length of a kind, ``global`` or ``local``."""
    found = [row["constant"] for row in rows if row["constant"].startswith(kind)]
    return max(found, key=lambda text: int(text.split()[1])) if found else None


def draw_constant(axis: Any, rows: list[Values], kind: str) -> None:
    """Speed-up (global) or efficiency (local) over the numbers of GPUs, at the longest length."""
    constant = longest(rows, kind)
    sizes = sorted({row["ranks"] for row in rows})
    for series, style in STYLES.items():
        mine = [row for row in rows if (row["series"], row["constant"]) == (series, constant)]
        labelled = False
        for prefix in KINDS:
            known = [row for row in mine if row.get(f"{prefix}efficiency") is not None]
            if known:
                first = known[0]["ranks"]
                factors = [row["ranks"] / first if kind == "global" else 1 for row in known]
                values = [row[f"{prefix}efficiency"] * by for row, by in zip(known, factors, strict=True)]
                line(axis, [row["ranks"] for row in known], values, style, bool(prefix), "" if labelled else series)
                labelled = True
    if kind == "global" and sizes:
        axis.plot(sizes, [size / sizes[0] for size in sizes], color="grey", linewidth=0.8)
    axis.set_xticks(sizes)
    what = "speed-up" if kind == "global" else "rate a GPU over that of the first"
    axis.set(
        xlabel="GPUs (filled: measured; hollow: predicted)", ylabel=what, ylim=(0, None if kind == "global" else 1.2)
    )
    axis.set_title(f"constant length, {constant or kind}")
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=7)


def bandwidth(row: Values) -> float | None:
    """GB/s of a row's artificial link."""
    words = row["links"].split()
    return float(words[1]) if words[0] == "artificial," else None


def draw_slow(axis: Any, rows: list[Values]) -> None:
    """Calls of the longest sequence over the artificial link's bandwidth, held back by copies."""
    slow = [
        row
        for row in rows
        if row["pass"] == "call" and bandwidth(row) is not None and not row["links"].endswith("kernel")
    ]
    length = max((row["seq_len"] for row in slow), default=None)
    for case, style in SLOW.items():
        mine = sorted(
            (row for row in slow if (row["case"], row["seq_len"]) == (case, length)),
            key=lambda row: bandwidth(row) or 0,
        )
        labelled = False
        for prefix in KINDS:
            known = [row for row in mine if row.get(f"{prefix}ms") is not None]
            if known:
                values = [row[f"{prefix}ms"] for row in known]
                line(
                    axis, [bandwidth(row) or 0 for row in known], values, style, bool(prefix), "" if labelled else case
                )
                labelled = True
    axis.set(xlabel="GB/s of the artificial link between the nodes", ylabel="ms", ylim=(0, None))
    axis.set_title(f"call, {length} tokens" if length else "no slow link")
    if slow:
        axis.set_xscale("log")
        speeds = sorted({bandwidth(row) or 0 for row in slow})
        axis.set_xticks(speeds, [f"{speed:g}" for speed in speeds])
        axis.minorticks_off()
        axis.legend(fontsize=7)
    axis.grid(alpha=0.3)


def draw(scaling: list[Row], rows: list[Row], target: Path) -> None:
    """Draws the table's rows and the rows over slow links."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    draw_constant(axes[0], scaling, "global")
    draw_constant(axes[1], scaling, "local")
    draw_slow(axes[2], rows)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def main() -> None:
    """Draws a stored run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--target", type=Path, required=True)
    args = parser.parse_args()
    if not args.results.is_file():
        parser.error(f"no {args.results}")
    rows: list[Row] = json.loads(args.results.read_text())["rows"]
    draw([row for row in rows if "series" in row], [row for row in rows if "case" in row], args.target)


if __name__ == "__main__":
    main()
