"""Draw what training runs have written.

python examples/plot_run.py runs/mtraining                                   loss, density by layer, one head
python examples/plot_run.py runs/mtraining runs/dense --output compare.png   loss curves side by side
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.colors import LogNorm

BLOCK = 64
COLORS = ("#1f5fa8", "#c8553d", "#3a7d44", "#7b4b94")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; where a resumed run repeats steps, its own lines count.

    Raises:
        ValueError: the run has none.
    """
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not lines:
        raise ValueError(f"{path}: no metrics")
    return [by_step for _, by_step in sorted({line["step"]: line for line in lines}.items())]


def _axes(title: str, ylabel: str, xlabel: str = "step") -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def draw_loss(run: Path) -> None:
    """runs/NAME/loss.png: loss over steps."""
    lines = read_metrics(run)
    figure, axes = _axes(f"{run.name}: training loss", "cross entropy per byte (nats)")
    axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], color=COLORS[0])
    _save(figure, run / "loss.png")


def draw_density(run: Path) -> None:
    """runs/NAME/density.png: density of the index of each layer over steps."""
    lines = read_metrics(run)
    figure, axes = _axes(f"{run.name}: density of the index by layer", "kept pairs / causal pairs")
    for number, layer in enumerate(sorted(lines[-1]["density_by_layer"], key=int)):
        known = [line for line in lines if layer in line["density_by_layer"]]
        values = [line["density_by_layer"][layer] for line in known]
        color = COLORS[number % len(COLORS)]
        axes.plot([line["step"] for line in known], values, color=color, label=f"layer {layer}")
    axes.set_ylim(0, 1.1)
    axes.legend()
    _save(figure, run / "density.png")


def draw_attention(run: Path) -> None:
    """runs/NAME/attention.png: one head's true attention, averaged over 64 x 64 blocks, and its index on top of it."""
    data = np.load(run / "attention.npz")
    mass, kept = data["block_attention"], data["block_kept"]
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 5.2), layout="constrained", sharex=True, sharey=True)
    floor = max(float(mass[mass > 0].min()), 1e-6)
    for axes, title in zip(panels, ("true attention", "kept by the index"), strict=True):
        image = axes.imshow(np.where(mass > 0, mass, np.nan), norm=LogNorm(floor, 1), cmap="viridis")
        axes.set(title=title, xlabel=f"key block ({BLOCK} tokens)", ylabel="query block")
    causal = np.tril(np.ones_like(kept, dtype=bool))
    shade = np.where(causal, 1 - kept, np.nan)
    panels[1].imshow(np.ones((*shade.shape, 3)), alpha=np.nan_to_num(0.85 * shade))
    figure.colorbar(image, ax=list(panels), shrink=0.85, label="share of a query's attention in the block")
    share = (
        f"{100 * float(data['mass_kept']):.1f} % of the attention in {100 * float(data['density']):.1f} % of the pairs"
    )
    figure.suptitle(f"{run.name}: layer {int(data['layer'])}, head {int(data['head'])}; {share}")
    _save(figure, run / "attention.png")


def draw_run(run: Path) -> None:
    """All plots of one run."""
    draw_loss(run)
    draw_density(run)
    if (run / "attention.npz").exists():
        draw_attention(run)


def draw_comparison(runs: list[Path], path: Path) -> None:
    """The loss curves and the densities of several runs side by side."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, run in enumerate(runs):
        lines = read_metrics(run)
        steps, color = [line["step"] for line in lines], COLORS[number % len(COLORS)]
        left.plot(steps, [line["loss"] for line in lines], color=color, label=run.name)
        right.plot(steps, [line["density"] for line in lines], color=color, label=run.name)
    left.set(title="training loss", xlabel="step", ylabel="cross entropy per byte (nats)")
    right.set(title="density", xlabel="step", ylabel="computed pairs / causal pairs", ylim=(0, 1.1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    _save(figure, path)


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--output", type=Path, help="draw the runs into this one picture")
    options = parser.parse_args()
    try:
        if options.output:
            draw_comparison(options.runs, options.output)
        else:
            for run in options.runs:
                draw_run(run)
    except ValueError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
