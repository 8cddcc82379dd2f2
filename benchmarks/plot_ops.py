"""Plot of TFLOP/s on useful pairs against density, from the JSON of bench_ops.

python -m benchmarks.plot_ops benchmarks/results/ops-DATE-CARD.json docs/images/kernels.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLES = {
    "mtraining-sm90": ("this package, sm90", "C0", "o-"),
    "mtraining-sm90-fast": ("this package, sm90, fast mode", "C0", "o--"),
    "mtraining-sm80": ("this package, sm80", "C1", "s-"),
    "flash-attention-4-slash-128": ("FlashAttention-4, slash blocks alone (128)", "C2", "^-"),
    "flex-slash-128": ("FlexAttention, slash blocks alone (128)", "C3", "v-"),
    "minference-triton": ("the authors' Triton kernel, same mask", "C7", "D-"),
    "cudnn": ("cuDNN, dense", "C4", "*"),
    "flash-attention-4": ("FlashAttention-4, dense", "C5", "P"),
    "flash-attention-2": ("FlashAttention-2, dense", "C6", "X"),
}


def points(rows: list[dict[str, Any]], impl: str, kind: str) -> list[tuple[float, float]]:
    """(density in percent, TFLOP/s) of one implementation, by density."""
    return sorted(
        (100 * r["density"], r["tflops"])
        for r in rows
        if r["impl"] == impl and r["pass"] == kind and r["launch"] != "in turn"
    )


def shapes(rows: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """(heads, kv_heads, head_dim) in the order of the results."""
    return list(dict.fromkeys((r["heads"], r["kv_heads"], r["head_dim"]) for r in rows))


def draw(results: dict[str, Any], seq_len: int, target: Path) -> None:
    """A row of panels for each head shape: forward and backward side by side."""
    rows = [r for r in results["rows"] if r["seq_len"] == seq_len and "cp_size" not in r]
    found = shapes(rows)
    figure, grid = plt.subplots(len(found), 2, figsize=(11, 3.6 * len(found) + 0.9), sharey="row", squeeze=False)
    for line, shape in zip(grid, found, strict=True):
        own = [r for r in rows if (r["heads"], r["kv_heads"], r["head_dim"]) == shape]
        for axis, kind in zip(line, ("forward", "backward"), strict=True):
            for impl, (label, color, style) in STYLES.items():
                if some := points(own, impl, kind):
                    axis.plot(*zip(*some, strict=True), style, color=color, label=label, markersize=6)
            axis.axhline(results["matmul_tflops"], color="grey", linewidth=0.8, linestyle=":", label="bf16 matmul")
            heads, kv_heads, dim = shape
            axis.set(xscale="log", title=f"{kind}, {heads}/{kv_heads} heads, dimension {dim}", ylim=(0, None))
            axis.set_xticks([2, 5, 10, 100], ["2", "5", "10", "100"])
            axis.grid(alpha=0.3)
        line[0].set_ylabel("TFLOP/s on useful pairs")
    for axis in grid[-1]:
        axis.set_xlabel("density, %")
    handles = {
        label: handle for axis in grid.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), fontsize=7, loc="lower center", ncol=5)
    figure.suptitle(f"{results['device']}, N = {seq_len:,}, bf16, {results['date']}", fontsize=10)
    figure.tight_layout(rect=(0, 0.5 / figure.get_figheight(), 1, 1))
    figure.savefig(target, dpi=110)


def main() -> None:
    """Draws the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--seq-len", type=int, default=131072)
    args = parser.parse_args()
    draw(json.loads(args.results.read_text()), args.seq_len, args.target)


if __name__ == "__main__":
    main()
