"""One HTML page about a training run: ``python -m megatron_mtraining.report RUN_DIR [--output FILE]``.

Reads ``metrics.jsonl`` (a line per logging interval: loss, density by layer, imbalance) and, where there is one,
``ring.jsonl`` (a line per profiled pass and rank: ``PassTimes.to_json``). Writes ``RUN_DIR/report.html``, with all plots in
the file itself. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
from pathlib import Path
from typing import Any

import torch

from .metrics import imbalance_degrees
from .ring_profile import PassTimes

CHANNEL_COLORS = {"inner": "#1f5fa8", "outer": "#c8553d", "inner_grad": "#3a7d44", "outer_grad": "#7b4b94"}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSON-lines file; none if there is no such file.

    Raises:
        ValueError: for a line that is no JSON; names file and line.
    """
    found = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    return found


def _picture(figure: Any) -> str:
    """A figure as an image element that holds its own data."""
    from matplotlib import pyplot

    data = io.BytesIO()
    figure.savefig(data, dpi=110, bbox_inches="tight", format="png")
    pyplot.close(figure)
    return f'<img alt="plot" src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}">'


def _axes(title: str, xlabel: str, ylabel: str, height: float = 3.6) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, height), layout="constrained")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def plot_series(lines: list[dict[str, Any]], names: list[str], title: str, ylabel: str) -> str:
    """Values of the metrics over the steps."""
    figure, axes = _axes(title, "step", ylabel)
    for name in names:
        known = [line for line in lines if line.get(name) is not None]
        axes.plot([line["step"] for line in known], [line[name] for line in known], label=name)
    axes.grid(alpha=0.3)
    axes.legend()
    return _picture(figure)


def plot_density(lines: list[dict[str, Any]]) -> str:
    """Density of each layer over the steps, as a heat map."""
    layers = sorted({layer for line in lines for layer in line["density_by_layer"]}, key=int)
    table = [[line["density_by_layer"].get(layer, float("nan")) for line in lines] for layer in layers]
    figure, axes = _axes("density by layer", "step", "layer")
    image = axes.imshow(table, aspect="auto", cmap="viridis", vmin=0)
    every = max(1, len(lines) // 10)
    axes.set_xticks(range(0, len(lines), every), [str(line["step"]) for line in lines[::every]])
    axes.set_yticks(range(len(layers)), layers)
    figure.colorbar(image, label="kept pairs / causal pairs")
    return _picture(figure)


def plot_balance(passes: list[PassTimes]) -> str:
    """Compute time of every rank in every launch of one pass."""
    table = torch.tensor([[launch.compute_ms for launch in p.launches] for p in passes])
    degrees = ", ".join(f"{name} {value:.3f}" for name, value in imbalance_degrees(table).items())
    figure, axes = _axes(f"{passes[0].phase}: compute time; imbalance: {degrees}", "launch", "rank")
    image = axes.imshow(table.tolist(), aspect="auto", cmap="magma", vmin=0)
    axes.set_xticks(range(table.shape[1]))
    axes.set_yticks(range(len(passes)), [str(p.cp_rank) for p in passes])
    figure.colorbar(image, label="ms")
    return _picture(figure)


def plot_timeline(times: PassTimes) -> str:
    """What one rank computed, waited for and moved in one pass."""
    lanes = ["compute", *(c for c in CHANNEL_COLORS if any(t.channel == c for t in times.transfers))]
    title = f"{times.phase}, rank {times.cp_rank}: {times.exposed_ms:.2f} ms exposed, {100 * times.hidden:.0f} % hidden"
    figure, axes = _axes(title, "ms", "", 1.4 + 0.45 * len(lanes))
    for launch in times.launches:
        for begin, end in ((launch.arrived, launch.computed), (launch.summed, launch.end)):
            axes.barh(0, end - begin, left=begin, color="#444444", edgecolor="white")
        for begin, end in ((launch.begin, launch.arrived), (launch.computed, launch.summed)):
            axes.barh(0, end - begin, left=begin, color="#e0a030", hatch="//")
    for transfer in times.transfers:
        color, length = CHANNEL_COLORS[transfer.channel], transfer.end - transfer.begin
        axes.barh(lanes.index(transfer.channel), length, left=transfer.begin, color=color, edgecolor="white")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    return _picture(figure)


def newest_passes(lines: list[dict[str, Any]]) -> dict[str, list[PassTimes]]:
    """The newest pass of each rank, by phase, in rank order."""
    newest: dict[tuple[str, int], PassTimes] = {}
    for line in lines:
        times = PassTimes.from_json(line)
        newest[times.phase, times.cp_rank] = times
    found: dict[str, list[PassTimes]] = {}
    for (phase, _), times in sorted(newest.items(), key=lambda item: (item[0][0] != "forward", item[0][1])):
        found.setdefault(phase, []).append(times)
    return found


def page(run: Path) -> str:
    """The page of a run.

    Raises:
        ValueError: if the run has neither file, or one cannot be read.
    """
    lines, passes = read_lines(run / "metrics.jsonl"), newest_passes(read_lines(run / "ring.jsonl"))
    if not lines and not passes:
        raise ValueError(
            f"{run}: neither metrics.jsonl nor ring.jsonl; train with --mtraining-metrics {run}/metrics.jsonl"
        )
    lines = sorted({line["step"]: line for line in lines}.values(), key=lambda line: line["step"])
    parts = []
    if lines:
        parts += ["<h2>Training</h2>", plot_series(lines, ["loss"], "loss", "cross entropy"), plot_density(lines)]
        parts.append(
            plot_series(lines, ["imbalance_worker", "imbalance_step"], "imbalance in pairs", "imbalance degree")
        )
    for phase, ranks in passes.items():
        rows = "".join(
            f"<tr><td>{p.cp_rank}</td><td>{p.total_ms:.3f}</td><td>{p.compute_ms:.3f}</td><td>{p.exposed_ms:.3f}</td>"
            f"<td>{p.transfer_ms:.3f}</td><td>{100 * p.hidden:.1f} %</td><td>{p.tail_ms:.3f}</td></tr>"
            for p in ranks
        )
        head = "<tr><th>rank</th><th>ms</th><th>compute</th><th>exposed</th><th>transfers</th><th>hidden</th><th>tail</th></tr>"
        parts += [f"<h2>Ring, {html.escape(phase)}</h2>", f"<table>{head}{rows}</table>"]
        parts += [plot_balance(ranks), plot_timeline(ranks[0])]
    title = html.escape(run.resolve().name)
    style = (
        "body{font:15px sans-serif;max-width:60em;margin:auto}td,th{padding:.2em .8em;text-align:right}img{width:100%}"
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{style}</style>"
        f"<h1>{title}</h1>{''.join(parts)}</html>\n"
    )


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="folder that a training run has written")
    parser.add_argument("--output", type=Path, help="default: RUN_DIR/report.html")
    options = parser.parse_args()
    output = options.output or options.run / "report.html"
    try:
        output.write_text(page(options.run))
    except ValueError as error:
        raise SystemExit(f"megatron_mtraining.report: error: {error}") from None
    print(output)


if __name__ == "__main__":
    main()
