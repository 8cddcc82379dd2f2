"""Picture and table of the comparison of rings, and of a training step over numbers of ranks, from result files.

    python -m benchmarks.plot_ring --folder benchmarks/results --target docs/images/ring.png

Prints the tables of docs/ring.md. Balance: ``ring-DATE-pairs-4x8-512k.json``; times of 32 played ranks:
``ring-DATE-virtual-4x8-512k.json``. Steps at 262,144 tokens and a density of 5%: on 1 and 2 ranks measured
(``step-DATE-...json`` of ``benchmarks.bench_step``, all layers, or a few, scaled to all), on 8, 16 and 32 attention
simulated with measured rates (``benchmarks.ring.simulated``), the rest of a layer measured (``layer-DATE-...json``). The
same sum on 1 and 2 ranks is printed beside what was measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from benchmarks.ring.simulated import dense_rates, simulated_attention
from benchmarks.ring.step import Attention, LayerTimes, Rows, step_ms
from megatron_mtraining.simulator import Shape
from megatron_mtraining.simulator.memory import MODELS

LONG, STEPS = 524288, 262144
MODEL = "qwen2.5-3b"
HEADS = "head-parallel, densities spread by e^0.6, 16 ranks"
DENSE = "Transformer Engine dense, p2p"

BARS = {"C0": "pairs, counted", "C9": "backward time, played ranks", "lightgrey": "paper"}
OUTPUT = "output layer and loss"
NAMES = {"ours, zigzag": "zigzag, flat ring", "dense": "dense, zigzag"}
"""Systems of ``benchmarks.bench_step`` by the names of the simulated ones (one node: its ring is flat)."""

SYSTEMS = {
    "ours": ("C0", "o-"),
    "striped, flat ring": ("C1", "s-"),
    "zigzag, flat ring": ("C3", "v-"),
    "MoBA, zigzag": ("C2", "^-"),
    "XAttention, zigzag": ("C4", "<-"),
    "dense, zigzag": ("C7", "D-"),
}
SIZES = (8, 16, 32)
"""Numbers of ranks that are simulated."""


def newest(folder: Path, pattern: str) -> Rows:
    """Rows of the newest file of a name.

    Raises:
        FileNotFoundError: if there is none.
    """
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"no {pattern} in {folder}")
    rows: Rows = json.loads(found[-1].read_text())["rows"]
    return rows


def case_name(row: dict[str, Any]) -> str:
    """The case, with the ranks of a head-parallel one."""
    return row["case"] + (f", {row['tp_size']} ranks" if "tp_size" in row else "")


def by_case(rows: Rows, seq_len: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Rows by case and pass."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["seq_len"] == seq_len:
            found.setdefault(case_name(row), {})[row["pass"]] = row
    return found


@dataclass(frozen=True)
class Step:
    """A training step of the whole model.

    Attributes:
        ms: of all layers.
        how: what of it was measured.
        row: the measured row; ``None``: simulated.
        attention: what the simulator says of a layer's attention; ``None``: measured.
    """

    system: str
    size: int
    ms: float
    how: str
    row: dict[str, Any] | None = None
    attention: Attention | None = None


def step_rows(folder: Path) -> Rows:
    """The rows of all measured steps of the model; of a case that was run again, the newest."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    files = sorted(folder.glob(f"step-*-{MODEL}-*.json"))
    if not files:
        raise FileNotFoundError(f"no step-*-{MODEL}-*.json in {folder}")
    for path in files:
        for row in json.loads(path.read_text())["rows"]:
            if row["seq_len"] == STEPS:
                found[row["system"], row["cp_size"], row["layers"]] = row
    return list(found.values())


def measured_steps(rows: Rows) -> Iterator[Step]:
    """Steps on 1 and 2 ranks, scaled to all layers; those of all layers as they are."""
    layers = MODELS[MODEL].layers
    for row in sorted(rows, key=lambda row: (row["cp_size"], row["layers"])):
        whole = row["layers"] == layers
        ms = row["step_ms"] if whole else row["scaled_step_ms"]
        how = "measured" if whole else f"measured, {row['layers']} of {layers} layers"
        yield Step(NAMES.get(row["system"], row["system"]), row["cp_size"], ms, how, row)


def simulated_steps(folder: Path, rows: Rows, sizes: tuple[int, ...] = SIZES) -> Iterator[Step]:
    """Steps put together from simulated attention, and from what was measured of a layer and of the output layer."""
    [ours] = [
        row for row in rows if (row["system"], row["cp_size"]) == ("ours", 1) and row["layers"] < MODELS[MODEL].layers
    ]
    output = {"part": OUTPUT, "tokens": STEPS, "ms": ours[f"{OUTPUT}_ms"]}
    layer = LayerTimes([row for row in newest(folder, f"layer-*-{MODEL}.json") if row["part"] != OUTPUT] + [output])
    rates = dense_rates(newest(folder, "ring-*-2-gpus.json"), DENSE, STEPS)
    for (system, size), times in simulated_attention(Shape(STEPS), sizes, rates):
        ms = step_ms(MODELS[MODEL], layer, times, STEPS / size)
        yield Step(system, size, ms, "attention simulated", attention=times)


def draw_balance(axis: Any, balance: dict[str, dict[str, Any]], cases: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Worker-level imbalance in pairs and in the time of the backward pass, beside the paper's."""
    shown = (
        (HEADS, "head-parallel,\n16 ranks", "total", 1.94),
        ("zigzag, flat", "zigzag,\nflat", "worker", 2.4),
        ("zigzag, hierarchical", "zigzag,\n4 x 8", "worker", None),
        ("striped, flat", "ours,\nflat", "worker", None),
        ("striped, rotated, hierarchical", "ours,\n4 x 8", "worker", 1.0),
    )
    for place, (case, _, level, paper) in enumerate(shown):
        time = cases[case]["backward"][f"time_{level}"]
        for number, (color, value) in enumerate(zip(BARS, (balance[case][f"pairs_{level}"], time, paper), strict=True)):
            if value is not None:
                at = place + (number - 1) * 0.28
                axis.bar(at, value, 0.26, color=color)
                more = ">" if value == paper and value > 2 else ""
                axis.text(at, value, f"{more}{value:.2f}", ha="center", va="bottom", fontsize=7)
    axis.set_xticks(range(len(shown)), [name for _, name, *_ in shown], fontsize=8)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set(title="imbalance of workers (max / mean), 512K tokens", ylim=(0.8, None))
    axis.legend(handles=[Patch(color=color, label=label) for color, label in BARS.items()], fontsize=7)


def draw_times(axis: Any, cases: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Compute and waiting of a call on 32 ranks."""
    shown = [
        "striped, rotated, hierarchical",
        "striped, hierarchical",
        "striped, flat",
        "zigzag, hierarchical",
        "zigzag, flat",
    ]
    total = [sum(cases[name][p]["simulated_ms"] for p in ("forward", "backward")) for name in shown]
    busy = [sum(cases[name][p]["compute_ms"] for p in ("forward", "backward")) for name in shown]
    axis.barh(shown, busy, color="C0", label="computing, mean rank (measured)")
    axis.barh(shown, [t - b for t, b in zip(total, busy, strict=True)], left=busy, color="C3", alpha=0.6,
              label="waiting for links and ranks (simulated)")  # fmt: skip
    for place, value in enumerate(total):
        axis.text(value, place, f" {value:.1f}", va="center", fontsize=8)
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=8)
    axis.set(title="forward + backward, 512K tokens, 32 ranks", xlabel="ms", xlim=(0, 1.7 * max(total)))
    axis.legend(fontsize=7, loc="upper right")


def draw_steps(axis: Any, found: list[Step]) -> None:
    """Tokens per second over ranks: filled measured, hollow simulated."""
    for system, (color, style) in SYSTEMS.items():
        points = sorted({(step.size, STEPS / step.ms) for step in found if step.system == system})
        if points:
            axis.plot(*zip(*points, strict=True), style[1:], color=color, linewidth=1)
            for step in (step for step in found if step.system == system):
                fill = "none" if step.row is None else "full"
                axis.plot(step.size, STEPS / step.ms, style[0], color=color, fillstyle=fill, markersize=6)
            axis.plot([], [], style, color=color, label=system)
    axis.set(xscale="log", yscale="log", xlabel="GPUs (filled: measured; hollow: simulated)",
             ylabel="thousand tokens a second", title=f"training step, {MODEL}, 256K, 5% density")  # fmt: skip
    axis.set_xticks([1, 2, 8, 16, 32], ["1", "2", "8", "16", "32"])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def print_balance(balance: dict[str, dict[str, Any]]) -> None:
    """The table of balance."""
    print("| | worker | critical | step | all pairs |\n|---|---|---|---|---|")
    for name, row in balance.items():
        keys = ("pairs_worker", "pairs_critical", "pairs_step", "pairs_total")
        print(f"| {name} | " + " | ".join(str(row.get(key, "-")) for key in keys) + " |")
    print()


def print_rings(cases: dict[str, dict[str, dict[str, Any]]]) -> None:
    """The table of rings."""
    print(
        "| ring | pass | pairs: worker | critical | step | time: worker | critical | step | TFLOP/s | ms | exposed ms |"
    )
    print("|" + "---|" * 11)
    for name, passes in cases.items():
        for phase, row in passes.items():
            keys = ("pairs_worker", "pairs_critical", "pairs_step", "time_worker", "time_critical", "time_step", "tflops",
                    "simulated_ms", "exposed_ms")  # fmt: skip
            if "tp_size" in row:
                keys = ("pairs_total", "-", "-", "time_total", "-", "-", "-", "slowest_ms", "-")
            print(f"| {name} | {phase} | " + " | ".join(str(row.get(key, "-")) for key in keys) + " |")


def print_steps(found: list[Step]) -> None:
    """The tables of steps: measured ones by their parts, all of them scaled to the whole model."""
    parts = ("forward", OUTPUT, "backward", "gradients", "optimizer", "step")
    print("\n| | GPUs | layers | density | " + " | ".join(parts) + " |\n|" + "---|" * (4 + len(parts)))
    for step in found:
        if step.row is not None:
            times = " | ".join(f"{step.row[f'{part}_ms']:.0f}" for part in parts)
            print(f"| {step.system} | {step.size} | {step.row['layers']} | {step.row['density']} | {times} |")
    print("\n| system | GPUs | | index, forward, backward of a layer, ms | step, s | tokens/s |")
    print("|---|---|---|---|---|---|")
    for step in sorted(found, key=lambda step: (step.system, step.size)):
        at = step.attention
        times = "" if at is None else f"{at.index:.2f}, {at.forward:.2f}, {at.backward:.2f}"
        print(
            f"| {step.system} | {step.size} | {step.how} | {times} | {step.ms / 1e3:.2f} | {STEPS / step.ms * 1e3:,.0f} |"
        )


def print_errors(measured: list[Step], simulated: Iterator[Step]) -> None:
    """The simulated step beside the measured one, where both are there."""
    print("\n| | GPUs | measured, s | simulated, s | error |\n|---|---|---|---|---|")
    known = {(step.system, step.size): step.ms for step in measured}
    for step in simulated:
        if (step.system, step.size) in known:
            real = known[step.system, step.size]
            print(
                f"| {step.system} | {step.size} | {real / 1e3:.2f} | {step.ms / 1e3:.2f} | {step.ms / real - 1:+.1%} |"
            )


def main() -> None:
    """Draws and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--target", type=Path, default=Path("docs/images/ring.png"))
    args = parser.parse_args()
    try:
        cases = by_case(newest(args.folder, "ring-*-virtual-4x8-512k.json"), LONG)
        balance = {case_name(row): row for row in newest(args.folder, "ring-*-pairs-4x8-512k.json")}
        rows = step_rows(args.folder)
        measured = list(measured_steps(rows))
        found = [*measured, *simulated_steps(args.folder, rows)]
    except FileNotFoundError as error:
        parser.error(str(error))
    figure, axes = plt.subplots(1, 3, figsize=(16, 4.6), layout="constrained")
    draw_balance(axes[0], balance, cases)
    draw_times(axes[1], cases)
    draw_steps(axes[2], found)
    figure.savefig(args.target, dpi=120)
    print_balance(balance)
    print_rings(cases)
    print_steps(found)
    print_errors(measured, simulated_steps(args.folder, rows, (1, 2)))


if __name__ == "__main__":
    main()
