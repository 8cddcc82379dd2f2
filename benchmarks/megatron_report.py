"""Turns the results of `benchmarks.megatron_runs`, `_single`, `_pair` or `_four` into tables, and a plot of the loss curves.

python -m benchmarks.megatron_report runs.jsonl --name megatron-DATE-MACHINE [--plot docs/images/megatron_curves.png]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import megatron_four, megatron_runs, megatron_single
from .preloaded import GATE
from .run_hosts import HOSTS

CURVES = (*megatron_runs.CURVES, *megatron_four.CURVES)
DENSE = ("dense", "dense_again", "dense_third", "dense_cp2", "dense_tp2")
"""Runs of the same thing, on one GPU and two: their distances from each other are the noise."""
PAIRS = (
    ("p1_again", "p1"),
    ("p1_cp2", "p1"),
    ("p1_cp2", "dense_cp2"),
    ("p1_tp2", "p1"),
    ("p1_tp2", "dense_tp2"),
    ("p95_cp2", "p95"),
    ("p95_tp2", "p95"),
    ("p1_cp4_2x2", "p1"),
    ("p95_cp4_2x2", "p95"),
)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The runs by name; the newest of each counts."""
    return {run["name"]: run for run in map(json.loads, path.read_text().splitlines())}


def difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float] | None:
    """How far two loss curves are apart: the largest and the mean absolute difference; None without both curves."""
    pairs = list(zip(one["loss"], other["loss"], strict=False))  # over the steps that both have
    if not pairs:
        return None
    gaps = [abs(a - b) for a, b in pairs]
    return {"steps": len(gaps), "largest": max(gaps), "mean": statistics.fmean(gaps)}


def from_dense(name: str, runs: dict[str, dict[str, Any]]) -> list[dict[str, float]]:
    """How far a curve is from each of the dense runs, other than itself."""
    gaps = [difference(runs[name], runs[dense]) for dense in DENSE if dense in runs and dense != name]
    return [gap for gap in gaps if gap]


def noise(steps: int, runs: dict[str, dict[str, Any]]) -> dict[str, float] | None:
    """How far dense runs are apart at most over as many steps as a curve has: one that was cut off missed the late, larger
    distances. None without two dense runs of that length.
    """
    cut = [{"loss": runs[name]["loss"][:steps]} for name in DENSE if name in runs and len(runs[name]["loss"]) >= steps]
    gaps = [gap for one, other in itertools.combinations(cut, 2) if (gap := difference(one, other))]
    return {what: max(gap[what] for gap in gaps) for what in ("largest", "mean")} if gaps else None


def step_ms(run: dict[str, Any]) -> float | None:
    """Median time of the second half of the steps: a run that begins dense is sparse by then."""
    times = run["ms"][len(run["ms"]) // 2 :]
    return statistics.median(times) if times else None


def ended(run: dict[str, Any]) -> str:
    """Whether a run ended well, in a word."""
    if run["status"] == 124:
        return "timed out"
    return "ran" if run["status"] == 0 else f"failed ({run['status']})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(runs: dict[str, dict[str, Any]]) -> str:
    """The page."""
    parts = curves(runs) if any(name in CURVES for name in runs) else []
    parts += four_ranks(runs)
    timed = [
        [
            f"`{name}`",
            ended(runs[name]),
            f"{ms:.0f}" if (ms := step_ms(runs[name])) else "",
            _number(runs[name]["loss"], -1),
        ]
        for name in runs
        if name in megatron_runs.SPEED or name in megatron_single.SPEED or name in megatron_four.SPEED
    ]
    if timed:
        parts += ["## One long sequence", table(("run", "", "ms a step, median", "last loss"), timed)]
    checked = [
        [
            f"`{name}`",
            ended(run),
            "0.19" if _older(name, run) else "main",
            _steps(run),
            _number(run["loss"], -1),
            _remark(name, run),
        ]
        for name, run in sorted(runs.items(), key=_place)
        if run["kind"] in ("check", "small") and name not in megatron_four.NAMES
    ]
    if checked:
        parts += ["## Combinations", table(("run", "", "Megatron-LM", "steps", "last loss", ""), checked)]
    golden = [
        [f"`{name}`", ended(run), f"{run['seconds']:.0f}"] for name, run in runs.items() if name.startswith("gpt_")
    ]
    if golden:
        parts += ["## Functional tests", table(("run", "", "seconds"), golden)]
    return "\n\n".join(parts) + "\n"


def curves(runs: dict[str, dict[str, Any]]) -> list[str]:
    """The part about the loss curves."""
    gaps = []
    for one, other in PAIRS:
        gap = difference(runs[one], runs[other]) if one in runs and other in runs else None
        if gap:
            gaps.append([f"`{one}` - `{other}`", f"{gap['steps']:.0f}", f"{gap['largest']:.2e}", f"{gap['mean']:.2e}"])
    rows = [
        [
            f"`{name}`",
            ended(runs[name]),
            _steps(runs[name]),
            _number(runs[name]["loss"], 0),
            _number(runs[name]["loss"], -1),
        ]
        for name in CURVES
        if name in runs
    ]
    away = []
    for name in CURVES:
        found = from_dense(name, runs) if name in runs else []
        if found:
            apart = noise(int(found[0]["steps"]), runs)
            away.append([f"`{name}`", f"{found[0]['steps']:.0f}"])
            for what in ("largest", "mean"):
                away[-1].append(" to ".join(f"{of(gap[what] for gap in found):.1e}" for of in (min, max)))
                away[-1].append(f"{apart[what]:.1e}" if apart else "")
    which = ", ".join(f"`{name}`" for name in DENSE if name in runs)
    head = ("curve", "steps", "largest, from the nearest to the farthest", "noise", "mean, likewise", "noise")
    return [
        "## Loss curves",
        table(("run", "", "steps", "loss of the first", "of the last"), rows),
        f"Distance from each of {which}. The noise is the largest distance of two of these, over as many steps:",
        table(head, away),
        "Difference of two curves:",
        table(("curves", "steps", "largest", "mean"), gaps),
    ]


def four_ranks(runs: dict[str, dict[str, Any]]) -> list[str]:
    """The part about four ranks: each run beside that of one GPU from the same weights."""
    rows = [_beside_one(name, runs) for name in megatron_four.NAMES if name in runs]
    if not rows:
        return []
    head = (
        "run",
        "",
        "ranks",
        "ring",
        "density",
        "steps",
        "first loss",
        "last",
        "distance from",
        "loss",
        "gradient norm",
    )
    said = (
        "Distance from a run of one GPU that begins with the same weights: the largest of all steps, of the loss "
        "(nats a byte) and of the gradient's norm (relative). Pretended hosts share GPUs. Density: of the last step."
    )
    return ["## Four ranks", said, table(head, rows)]


def _beside_one(name: str, runs: dict[str, dict[str, Any]]) -> list[str]:
    """A row of the table of four ranks."""
    run, reference = runs[name], megatron_four.reference_of(name)
    density = f"{run['density']:.2f}" if "density" in run else ""
    row = [f"`{name}`", ended(run), ranks_of(run), run.get("ring", "").partition(" (")[0], density, _steps(run)]
    row += [_number(run["loss"], 0), _number(run["loss"], -1)]
    if reference not in runs:
        return [*row, "", "", ""]
    other = runs[reference]
    places = [(run["steps"].index(step), other["steps"].index(step)) for step in run["steps"] if step in other["steps"]]
    # As the second step of a process Megatron (main) logs the mean of its first two: no other step compares with that.
    both = [(one, two) for one, two in places if (one == 1) == (two == 1)]
    values = {what: [(run[what][one], other[what][two]) for one, two in both] for what in ("loss", "grad_norm")}
    losses = [abs(one - two) for one, two in values["loss"] if one is not None and two is not None]
    norms = [abs(one / two - 1) for one, two in values["grad_norm"] if one is not None and two]
    return [*row, f"`{reference}`", *(f"{max(gaps):.1e}" if gaps else "" for gaps in (losses, norms))]


def ranks_of(run: dict[str, Any]) -> str:
    """Where the ranks of a run of `megatron_four` were."""
    if run["kind"] != "four":
        return "one"
    count = run.get("variables", {}).get(HOSTS)
    return f"four on {count} pretended hosts" if count else "four, a GPU each"


def _older(name: str, run: dict[str, Any]) -> bool:
    return megatron_single.is_older(name) if run["kind"] == "small" else name in megatron_runs.OLDER


def _place(item: tuple[str, dict[str, Any]]) -> int:
    """Where a run stands in the table: as in the list of its kind."""
    name, run = item
    names = list(megatron_single.CHECKS if run["kind"] == "small" else megatron_runs.CHECKS)
    return names.index(name) if name in names else len(names)


def _remark(name: str, run: dict[str, Any]) -> str:
    after = (megatron_single if run["kind"] == "small" else megatron_runs).AFTER
    found = [f"after `{after[name]}`"] if name in after else []
    if run.get("refusal"):
        found.append("refused by name")
    if run.get("tests"):
        found.append(", ".join(run["tests"]))
    if "validation_loss" in run:
        found.append(f"validation loss {run['validation_loss']:.5f}")
    return "; ".join(found)


def _number(values: Sequence[float | None], position: int) -> str:
    value = values[position] if values else None
    return "" if value is None else f"{value:.5f}"


def _steps(run: dict[str, Any]) -> str:
    return f"{run['steps'][0]} ... {run['steps'][-1]}" if run["steps"] else ""


def plot(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Loss over steps, and its distance from the first dense curve; that of the other dense runs is the noise."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    base = next(name for name in DENSE if name in runs)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for name in CURVES:
        if name not in runs or not runs[name]["loss"]:
            continue
        run, style = runs[name], style_of(name)
        left.plot(run["steps"], run["loss"], label=name, **style)
        if name != base:
            gap = [abs(a - b) for a, b in zip(run["loss"], runs[base]["loss"], strict=False)]
            right.plot(run["steps"][: len(gap)], gap, label=name, **style)
    left.set(title="training loss", xlabel="step", ylabel="cross entropy per byte (nats)")
    right.set(title=f"distance from `{base}`", xlabel="step", ylabel="absolute difference", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def style_of(name: str) -> dict[str, Any]:
    """The line of a curve: the colour says what attention, the dashes how many GPUs and how they split."""
    kind = name.split("_", maxsplit=1)[0]
    dashes = {"cp2": (5, 1.5), "tp2": (1, 1), "2x2": (5, 1, 1, 1)}.get(name.rpartition("_")[2], (None, None))
    return {"color": {"dense": "0.35", "p1": "tab:blue", "p95": "tab:red"}[kind], "dashes": dashes, "linewidth": 1.2}


def without_paths(run: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run: its command and its gate are paths of the machine."""
    variables = {name: value for name, value in run.get("variables", {}).items() if name != GATE}
    return {key: value for key, value in run.items() if key != "command"} | {"variables": variables}


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, help="their runs.jsonl")
    parser.add_argument("--name", required=True, help="of the results in benchmarks/results")
    parser.add_argument("--title", default="Training with Megatron-LM", help="of the page")
    parser.add_argument("--note", type=Path, help="a file with what to say first")
    parser.add_argument("--beside", type=Path, help="a stored .json whose loss curves these are compared with")
    parser.add_argument("--plot", type=Path, help="draw the loss curves into this picture")
    options = parser.parse_args()
    runs = read(options.runs)
    results = Path("benchmarks/results")
    kept = [without_paths(run) for run in runs.values()]
    (results / f"{options.name}.json").write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
    note = options.note.read_text() if options.note else ""
    if options.beside:
        stored = json.loads(options.beside.read_text())
        runs = {run["name"]: run for run in stored if run["name"] in CURVES} | runs
    (results / f"{options.name}.md").write_text(f"# {options.title}\n\n{note}\n{report(runs)}")
    if options.plot:
        plot(runs, options.plot)


if __name__ == "__main__":
    main()
