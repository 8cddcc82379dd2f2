"""The pictures of docs/proof.md from the raw results.

python -m benchmarks.proof.plots --runs FOLDER --index FILE.jsonl --premises FOLDER --output docs/images
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.colors import LogNorm

from benchmarks.proof.summary import Run, load_runs
from benchmarks.proof.variants import variant

COLORS = {
    "dense": "black",
    "top-p-0.90": "#7fb2e5",
    "top-p-0.95": "#1f5fa8",
    "moba": "#3a7d44",
    "xattention-0.90": "#7b4b94",
    "joint-0.95": "#c8553d",
    "top-p-0.95-dense-8-19": "#e08a00",
    "segments-8-0.95": "#5b8c9b",
    "segments-8-0.9-dense-8-19": "#f2a3c0",
    "segments-8-0.95-dense-8-19": "#d6336c",
}
"""The variants that are drawn; the tables have all of them."""

SHORT = 32768
SMOOTH = 5  # steps of the running mean of the differences
STYLES = {"paper": "-", "spread + joint": "-"}


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def _by_variant(runs: list[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        found[run.variant].append(run)
    return found


def _smooth(values: np.ndarray) -> np.ndarray:
    """Running mean, shorter at the ends."""
    weight = np.ones(min(SMOOTH, len(values)))
    return np.convolve(values, weight, "same") / np.convolve(np.ones(len(values)), weight, "same")


def draw_training(runs: list[Run], path: Path) -> None:
    """Loss over the steps and perplexity over the positions of one seed; below, what they differ from dense, over the seeds."""
    figure, ((losses, perplexity), (gap, gap_by_position)) = pyplot.subplots(
        2, 2, figsize=(15, 9), layout="constrained"
    )
    by = _by_variant(runs)
    dense = {run.seed: run for run in by["dense"]}
    length = runs[0].length // 1024
    for name, found in by.items():
        paired = [run for run in found if run.seed in dense]
        color = COLORS.get(name.removesuffix("-at-once"))
        if not paired or color is None:
            continue
        ours, base = (np.array([_losses(run) for run in some]) for some in (paired, [dense[r.seed] for r in paired]))
        at, at_base = (
            np.array([_positions(run) for run in some]) for some in (paired, [dense[r.seed] for r in paired])
        )
        position = (np.arange(at.shape[1]) + 0.5) * length / at.shape[1]
        losses.plot(ours[0], color=color, linewidth=1.2, label=f"{name} (seeds: {len(paired)})")
        perplexity.plot(position, np.exp(at[0]), color=color, linewidth=1.2)
        if name != "dense":
            gap.plot(_smooth((ours - base).mean(0)), color=color)
            gap_by_position.plot(position, (at - at_base).mean(0), color=color)
    losses.set(title="training loss, one seed", xlabel=f"step of {length}K tokens", ylabel="nats")
    gap.set(title=f"less dense's on the same batch, mean of {SMOOTH} steps", xlabel="step", ylabel="nats")
    perplexity.set(title="held-out perplexity by position, one seed", xlabel="position (K tokens)", ylabel="perplexity")
    gap_by_position.set(title="held-out loss less dense's by position", xlabel="position (K tokens)", ylabel="nats")
    for axes in (losses, perplexity, gap, gap_by_position):
        axes.grid(alpha=0.3)
    for axes in (gap, gap_by_position):
        axes.axhline(0, color="black", linewidth=0.8)
    figure.legend(*losses.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    _save(figure, path)


def _losses(run: Run) -> list[float]:
    return [step["loss"] for step in run.steps]


def _positions(run: Run) -> list[float]:
    """Held-out loss under the run's own attention, by bucket of positions."""
    found: list[float] = run.valid[run.own]["by_position"]
    return found


def draw_density(runs: list[Run], path: Path) -> None:
    """Density of each layer over the steps, one panel a variant (one seed); MoBA's is the same everywhere."""
    first: dict[str, Run] = {}
    for run in runs:
        if run.density is not None and run.variant in COLORS and run.variant != "moba":
            first.setdefault(run.variant, run)
    rows = -(-len(first) // 4)
    figure, panels = pyplot.subplots(rows, 4, figsize=(17, 4 * rows), layout="constrained", squeeze=False)
    for axes in panels.flat[len(first) :]:
        axes.set_axis_off()
    for run, axes in zip(first.values(), panels.flat, strict=False):
        table = np.array([step["density_by_layer"] for step in run.steps]).T
        extent = (0, table.shape[1], table.shape[0] + 0.5, 0.5)
        image = axes.imshow(table, aspect="auto", cmap="viridis", vmin=0, vmax=1, extent=extent)
        axes.set(xlabel="step", ylabel="layer")
        axes.set_title(f"{run.variant}\nmean at the end {table[:, -1].mean():.2f}", fontsize=10)
    figure.colorbar(image, ax=list(panels[:, -1]), label="computed pairs / causal pairs")
    _save(figure, path)


def draw_recall(runs: list[Run], path: Path) -> None:
    """Recall of the rows that chose the lines and of all rows: over the steps (mean of the layers), and by layer at the end."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 4.8), layout="constrained")
    first: dict[str, Run] = {}
    for run in runs:
        if run.recall:
            first.setdefault(run.variant, run)
    for run in first.values():
        color, steps = COLORS.get(run.variant.removesuffix("-at-once")), sorted(run.recall)
        kept = [n for n in range(len(run.recall[steps[0]]["true"])) if n + 1 not in variant(run.variant).dense_layers]
        for key, style, what in (("probe", "--", "rows that chose"), ("true", "-", "all rows")):
            means = [np.mean([run.recall[step][key][layer] for layer in kept]) for step in steps]
            left.plot(steps, means, style, marker="o", markersize=4, color=color, label=f"{run.variant}: {what}")
        numbers = [layer + 1 for layer in kept]
        for key, style, what in (("probe", "--", "rows that chose"), ("true", "-", "all rows"),
                                 ("worst_head", ":", "all rows, worst head")):  # fmt: skip
            values = [run.recall[steps[-1]][key][layer] for layer in kept]
            right.plot(numbers, values, style, marker="o", markersize=3, color=color, label=f"{run.variant}: {what}")
    left.set(title="over training, mean of the sparse layers", xlabel="step", ylabel="recall of the attention mass")
    right.set(title="by layer, last step", xlabel="layer", ylabel="recall of the attention mass")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    _save(figure, path)


def draw_zero_shot(path_in: Path, path: Path) -> None:
    """What sparse attention costs densely trained weights: by variant against density, and layer by layer."""
    lines = [json.loads(line) for line in path_in.read_text().splitlines()]
    measured = [line for line in lines if "loss" in line and "variant" in line]
    whole = {line["variant"]: line for line in measured if "layer" not in line}
    layers = sorted((line for line in measured if "layer" in line), key=lambda line: line["layer"])
    dense = whole.pop("dense")
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(17, 4.6), layout="constrained")
    for family, color, offset in (
        ("top-p", "#1f5fa8", (4, 4)),
        ("segments", "#e08a00", (4, -9)),
        ("own-lines", "#c8553d", (-28, -10)),
        ("xattention", "#7b4b94", (4, 4)),
    ):
        # Without a cap of the columns the same point.
        found = {name: line for name, line in whole.items() if name.startswith(family) and "uncapped" not in name}
        x = [line["density"] for line in found.values()]
        for axes, key, base in ((left, "loss", dense["loss"]), (middle, "answer_loss", dense["answer_loss"])):
            y = [line[key] - base for line in found.values()]
            axes.plot(x, y, "o", color=color, markersize=5, label=family)
            for name, a, b in zip(found, x, y, strict=True):
                short = name.removeprefix(f"{family}-")
                axes.annotate(short, (a, b), xytext=offset, textcoords="offset points", fontsize=7)
    left.set(title="held-out loss less dense's", xlabel="density", ylabel="nats", xlim=(0.08, 0.7))
    middle.set(title="loss of planted answers' digits less dense's", xlabel="density", xlim=(0.08, 0.7))
    base = float(np.mean(dense["by_window"][:2]))
    number = [line["layer"] for line in layers]
    right.bar(number, [line["loss"] - base for line in layers], color="#1f5fa8", label="held-out loss less dense's")
    other = right.twinx()
    answers = [line["answer_loss"] for line in layers]
    other.plot(number, answers, "o-", color="#e08a00", markersize=3, label="loss of answers' digits (right axis)")
    other.axhline(float(np.median(answers)), color="#e08a00", linewidth=0.6)
    right.set(title="one layer at top-p 0.95, the others dense", xlabel="layer", ylabel="nats")
    right.legend(loc="upper left", fontsize=8)
    other.legend(loc="upper left", bbox_to_anchor=(0, 0.9), fontsize=8)
    for axes in (left, middle):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    _save(figure, path)


def recall_at(lines: list[dict[str, Any]], density: float) -> float:
    """Recall at a density, interpolated along a family's curve; NaN outside of it."""
    x, y = zip(*sorted((line["density"], line["recall"]) for line in lines), strict=True)
    return float(np.interp(density, x, y, left=np.nan, right=np.nan))


def draw_index(path_in: Path, path: Path, density: float = 0.1) -> None:
    """Recall against density, mean over the layers, and recall of each layer at one density."""
    lines = [json.loads(line) for line in path_in.read_text().splitlines()]
    table: dict[str, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        table[line["family"]][line["layer"]].append(line)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    colors = pyplot.get_cmap("tab10")
    for number, (family, layers) in enumerate(table.items()):
        if family.endswith("probes") and family.startswith("spread"):
            continue
        budgets: dict[float, list[tuple[float, float]]] = defaultdict(list)
        for found in layers.values():
            for line in found:
                budgets[line["budget"]].append((line["density"], line["recall"]))
        curve = np.array([np.mean(points, 0) for _, points in sorted(budgets.items())])
        width = 2.6 if family in STYLES else 1.2
        left.plot(
            curve[:, 0], curve[:, 1], "o-", color=colors(number % 10), linewidth=width, markersize=3, label=family
        )
        at = [recall_at(layers[layer], density) for layer in sorted(layers)]
        right.plot(sorted(layers), at, "o-", color=colors(number % 10), linewidth=width, markersize=3, label=family)
    left.set(xlabel="density (computed pairs / causal pairs)", ylabel="recall of the attention mass", xlim=(0, 0.8))
    left.set(ylim=(0.4, 1.005), title="mean over layers")
    right.set(xlabel="layer", ylabel="recall", title=f"each layer at density {density}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    _save(figure, path)


def draw_premises(folder: Path, path: Path) -> None:
    """One head of some layers: its attention, its |dL/dS|, and the mean score by distance beside the prediction."""
    data = np.load(folder / "premises-heads.npz")
    layers = sorted({int(name.split("-")[1]) for name in data.files})
    figure, panels = pyplot.subplots(3, len(layers), figsize=(4 * len(layers), 11), layout="constrained")
    for column, layer in enumerate(layers):
        for row, name in enumerate(("attention", "gradient")):
            mass = data[f"{name}-{layer}"]
            shown = np.where(mass > 0, mass / mass.sum(), np.nan)
            panels[row, column].imshow(shown, norm=LogNorm(1e-7, 1e-2), cmap="viridis")
            title = "attention" if name == "attention" else "|dL/dS|"
            panels[row, column].set(title=f"layer {layer}, head 0: {title}", xlabel="key block")
        for name, style in (("measured", "-"), ("expected", "--")):
            panels[2, column].plot(data[f"{name}-{layer}"], style, linewidth=1.2, label=name)
        panels[2, column].set(title="mean score by distance", xlabel="distance (tokens)", xscale="symlog")
        panels[2, column].legend(fontsize=8)
        panels[2, column].grid(alpha=0.3)
    panels[0, 0].set_ylabel("query block")
    panels[1, 0].set_ylabel("query block")
    _save(figure, path)


def draw_runs(runs: list[Run], steps: list[Run], output: Path) -> None:
    """The pictures of the runs at 32K, and the losses at 64K where there are such runs."""
    short = [run for run in runs if run.length == SHORT]
    draw_training(short, output / "proof_training.png")
    draw_density(short, output / "proof_density.png")
    measured = [run for run in (*short, *steps) if run.length == SHORT and run.recall]
    if measured:
        draw_recall(measured, output / "proof_recall.png")
    if long := [run for run in runs if run.length == 2 * SHORT]:
        draw_training(long, output / "proof_training_64k.png")


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="folder of the training results")
    parser.add_argument("--zero-shot", type=Path, help="results of benchmarks.proof.zero_shot")
    parser.add_argument("--index", type=Path, help="results of the index study")
    parser.add_argument("--premises", type=Path, help="folder that benchmarks.proof.premises wrote")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.runs:
        draw_runs(load_runs(options.runs, "training"), load_runs(options.runs, "steps"), options.output)
    if options.zero_shot:
        draw_zero_shot(options.zero_shot, options.output / "proof_zero_shot.png")
    if options.index:
        draw_index(options.index, options.output / "proof_index.png")
    if options.premises:
        draw_premises(options.premises, options.output / "proof_premises.png")


if __name__ == "__main__":
    main()
