"""One HTML page about a training run: ``python -m megatron_mtraining.report RUN_DIR [--output FILE]``.

Reads ``metrics.jsonl`` (a line per logging interval: loss, density by layer, imbalance) and, where there is one,
``ring.jsonl`` (a line per profiled pass and rank: ``PassTimes.to_json``; ``--mtraining-profile-steps`` writes it).
Writes ``RUN_DIR/report.html``, with all plots in the file itself. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .metrics import FLOPS_PER_PAIR, imbalance_degrees
from .ring_profile import PassTimes

METRICS_KEYS = frozenset({"step"})
RING_KEYS = frozenset({"phase", "cp_rank", "launches", "transfers"})
"""What the lines of the two files have at least."""

CHANNEL_COLORS = {"inner": "#1f5fa8", "outer": "#c8553d", "inner_grad": "#3a7d44", "outer_grad": "#7b4b94"}
Line = dict[str, Any]


def read_lines(
    path: Path, needed: frozenset[str] = frozenset(), check: Callable[[Line], object] | None = None
) -> list[Line]:
    """The lines of a JSON-lines file; none if there is no such file.

    Args:
        needed: keys that every line must have.
        check: called with every line; what it raises says that the line's values are of another kind.

    Raises:
        OSError: if the file cannot be read.
        ValueError: for a line that is no JSON object with these keys and such values; names file and line.
    """
    found = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
        try:
            made = json.loads(line)
        except ValueError as error:  # no JSON, or no text
            raise ValueError(f"{path}:{number}: {error}") from None
        if not isinstance(made, dict) or not needed <= made.keys():
            raise ValueError(f"{path}:{number}: must be an object with {', '.join(sorted(needed)) or 'any keys'}")
        try:
            if check is not None:
                check(made)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: values of another kind ({type(error).__name__}: {error})") from None
        found.append(made)
    return found


def _number(value: object) -> None:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")


def check_metrics(line: Line) -> None:
    """Goes through all that the page takes from a line of metrics, so that what is of another kind raises here."""
    _number(line["step"])
    for names, *_ in TRAINING_PLOTS:
        for name in names:
            if line.get(name) is not None:
                _number(line[name])
    for name, _, form in SHOWN:
        if line.get(name) is not None:
            format(line[name], form)
    for name in LAYER_TABLES:
        for layer, value in line.get(name, {}).items():
            int(layer)
            _number(value)


def check_pass(line: Line) -> None:
    """The same for a line of the ring: a pass of at least one launch, of known channels, with its call if it has a step."""
    times = PassTimes.from_json(line)
    for value in (times.cp_rank, times.total_ms, times.compute_ms, times.exposed_ms, times.hidden, times.tail_ms):
        _number(value)
    times.comm_over_compute()
    if times.phase not in FLOPS_PER_PAIR:
        raise ValueError(f"phase={times.phase!r}")
    for transfer in times.transfers:
        if transfer.channel not in CHANNEL_COLORS:
            raise ValueError(f"channel={transfer.channel!r}")
    if "step" in line:
        _number(line["step"])
        _number(line["call"])


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


def plot_series(lines: list[Line], names: list[str], title: str, ylabel: str) -> str:
    """Values of the metrics over the steps."""
    figure, axes = _axes(title, "step", ylabel)
    for name in names:
        known = [line for line in lines if line.get(name) is not None]
        axes.plot([line["step"] for line in known], [line[name] for line in known], label=name)
    axes.grid(alpha=0.3)
    axes.legend()
    return _picture(figure)


def plot_layers(lines: list[Line], name: str, title: str, label: str, low: float | None = 0) -> str:
    """A number of each layer over the steps, as a heat map."""
    layers = sorted({layer for line in lines for layer in line.get(name, {})}, key=int)
    table = [[line.get(name, {}).get(layer, float("nan")) for line in lines] for layer in layers]
    figure, axes = _axes(title, "step", "layer", 1.6 + min(0.25 * len(layers), 4))
    image = axes.imshow(table, aspect="auto", cmap="viridis", vmin=low, interpolation="nearest")
    every = max(1, len(lines) // 10)
    axes.set_xticks(range(0, len(lines), every), [str(line["step"]) for line in lines[::every]])
    some = max(1, len(layers) // 16)
    axes.set_yticks(range(0, len(layers), some), layers[::some])
    figure.colorbar(image, label=label)
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


def plot_ratio(passes: list[PassTimes]) -> str:
    """Transfers over compute of every launch: below 1 compute can hide what the launch sends. The mean rank and the highest."""
    table = torch.tensor([p.comm_over_compute() for p in passes])
    places = range(table.shape[1])
    figure, axes = _axes(f"{passes[0].phase}: transfers posted by a launch over its compute", "launch", "ratio", 2.4)
    axes.bar(places, table.mean(0).tolist(), color="#1f5fa8", label="mean rank")
    axes.plot(places, table.amax(0).tolist(), "_", color="#c8553d", label="highest rank")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(list(places)[:: max(1, len(places) // 16)])
    axes.legend()
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
    from matplotlib.patches import Patch

    meanings = [Patch(color="#444444", label="computing"), Patch(facecolor="#e0a030", hatch="//", label="waiting")]
    figure.legend(handles=meanings, loc="outside lower right", ncols=2, frameon=False)
    return _picture(figure)


def plot_calls(calls: list[list[PassTimes]]) -> str:
    """Computing and waiting of every timed pass of a phase in a step, means over the ranks; lines: the slowest rank."""
    figure, axes = _axes(f"{calls[0][0].phase}: all calls of the step", "call", "ms, mean of the ranks", 2.8)
    computing = [sum(times.compute_ms for times in ranks) / len(ranks) for ranks in calls]
    waiting = [sum(times.exposed_ms for times in ranks) / len(ranks) for ranks in calls]
    places = range(len(calls))
    axes.bar(places, computing, color="#444444", label="computing")
    axes.bar(places, waiting, bottom=computing, color="#e0a030", hatch="//", label="waiting")
    axes.plot(
        places, [max(times.total_ms for times in ranks) for ranks in calls], "_", color="#c8553d", label="slowest rank"
    )
    axes.set_xticks(list(places)[:: max(1, len(calls) // 16)])
    axes.legend()
    return _picture(figure)


def newest_passes(lines: list[Line]) -> dict[str, list[PassTimes]]:
    """The newest pass of each rank, by phase, in rank order."""
    newest: dict[tuple[str, int], PassTimes] = {}
    for line in lines:
        times = PassTimes.from_json(line)
        newest[times.phase, times.cp_rank] = times
    found: dict[str, list[PassTimes]] = {}
    for (phase, _), times in sorted(newest.items(), key=lambda item: (item[0][0] != "forward", item[0][1])):
        found.setdefault(phase, []).append(times)
    return found


def newest_calls(lines: list[Line]) -> dict[str, list[list[PassTimes]]]:
    """All passes of the newest profiled step by phase and call, each in rank order; none for lines without a step."""
    last = max((line["step"] for line in lines if "step" in line), default=None)
    found: dict[str, dict[int, dict[int, PassTimes]]] = {}
    for line in lines:
        if last is not None and line.get("step") == last:
            found.setdefault(line["phase"], {}).setdefault(line["call"], {})[line["cp_rank"]] = PassTimes.from_json(
                line
            )
    return {
        phase: [[ranks[rank] for rank in sorted(ranks)] for _, ranks in sorted(calls.items())]
        for phase, calls in found.items()
    }


TRAINING_PLOTS = (
    (("loss",), "loss", "cross entropy"),
    (("imbalance_worker", "imbalance_step"), "imbalance in pairs", "imbalance degree"),
    (("index_share_of_attention", "index_share"), "time of index estimation", "share of attention / of all time"),
    (("useful_tflops", "dense_equivalent_tflops"), "attention, per rank", "TFLOP/s"),
)
SHOWN = (
    ("loss", "loss", ".4f"), ("tokens_per_s", "tokens/s", ",.0f"), ("density", "density", ".4f"), ("recall", "recall", ".4f"),
    ("imbalance_worker", "imbalance, worker", ".3f"), ("imbalance_step", "imbalance, step", ".3f"),
    ("index_share_of_attention", "index / attention", ".1%"), ("useful_tflops", "useful TFLOP/s per rank", ".4g"),
    ("layout", "layout", ""), ("ring", "ring", ""),
)  # fmt: skip
"""The numbers of the last step at the top of the page: key, heading, format."""
LAYER_TABLES = {
    "density_by_layer": ("density by layer", "kept pairs / causal pairs", 0.0),
    "recall_by_layer": ("recall of the probe by layer", "attention on kept lines", None),
}
"""Numbers of each layer: title, what they are, the lowest on the scale (``None``: the least one)."""


def training_parts(lines: list[Line]) -> list[str]:
    """The page's part about training: the last step's numbers, curves, and heat maps by layer."""
    last = [(title, format(lines[-1][name], form)) for name, title, form in SHOWN if lines[-1].get(name) is not None]
    heads, values = ("".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row)
                     for tag, row in (("th", [title for title, _ in last]), ("td", [value for _, value in last])))  # fmt: skip
    parts = [f"<h2>Training, step {lines[-1]['step']}</h2><table><tr>{heads}</tr><tr>{values}</tr></table>"]
    for names, title, ylabel in TRAINING_PLOTS:
        known = [name for name in names if any(line.get(name) is not None for line in lines)]
        if known:
            parts.append(plot_series(lines, known, title, ylabel))
    for place, (name, (title, label, low)) in enumerate(LAYER_TABLES.items(), 2):
        if any(line.get(name) for line in lines):
            parts.insert(place, plot_layers(lines, name, title, label, low))
    return parts


def page(run: Path) -> str:
    """The page of a run.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if the run has neither file, or one holds something else.
    """
    lines = read_lines(run / "metrics.jsonl", METRICS_KEYS, check_metrics)
    ring = read_lines(run / "ring.jsonl", RING_KEYS, check_pass)
    passes = newest_passes(ring)
    if not lines and not passes:
        raise ValueError(
            f"{run}: neither metrics.jsonl nor ring.jsonl; train with --mtraining-metrics {run}/metrics.jsonl"
        )
    lines = sorted({line["step"]: line for line in lines}.values(), key=lambda line: line["step"])
    parts = training_parts(lines) if lines else []
    calls = newest_calls(ring)
    for phase, ranks in passes.items():
        rows = "".join(
            f"<tr><td>{p.cp_rank}</td><td>{p.total_ms:.3f}</td><td>{p.compute_ms:.3f}</td><td>{p.exposed_ms:.3f}</td>"
            f"<td>{p.transfer_ms:.3f}</td><td>{100 * p.hidden:.1f} %</td><td>{p.tail_ms:.3f}</td></tr>"
            for p in ranks
        )
        head = "<tr><th>rank</th><th>ms</th><th>compute</th><th>exposed</th><th>transfers</th><th>hidden</th><th>tail</th></tr>"
        parts += [f"<h2>Ring, {html.escape(phase)}</h2>", f"<table>{head}{rows}</table>"]
        parts += [plot_balance(ranks), plot_timeline(ranks[0])]
        if any(p.transfers for p in ranks):
            parts.append(plot_ratio(ranks))
        if len(calls.get(phase, [])) > 1:
            parts.append(plot_calls(calls[phase]))
    title = html.escape(run.resolve().name)
    style = (
        "body{font:15px sans-serif;max-width:60em;margin:auto}img{width:100%}table{border-collapse:collapse;font-size:13px}"
        "td,th{padding:.25em .7em;text-align:right;border-bottom:1px solid #ddd}"
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
    except (OSError, ValueError) as error:
        raise SystemExit(f"megatron_mtraining.report: error: {error}") from None
    print(output)


if __name__ == "__main__":
    main()
