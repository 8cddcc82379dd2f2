"""Picture and table of the comparison of rings, and of a training step over numbers of ranks, from result files.

    python -m benchmarks.plot_ring --folder benchmarks/results --target docs/images/ring.png

Prints the tables of docs/ring.md. Balance: ``ring-DATE-pairs-4x8-512k.json``; times of 32 played ranks:
``ring-DATE-virtual-4x8-512k.json``. Steps at 262,144 tokens: 1 rank (``ring-DATE-1-gpu.json``) and 2
(``ring-DATE-2-gpus.json``) from measured parts, 8, 16 and 32 simulated with measured rates (``benchmarks.ring.simulated``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from benchmarks.ring.simulated import dense_rates, simulated_attention
from benchmarks.ring.step import Attention, LayerTimes, Rows, attention_of, step_ms
from megatron_mtraining.simulator import Shape
from megatron_mtraining.simulator.memory import MODELS

LONG, STEPS = 524288, 262144
MODEL = "qwen2.5-3b"
HEADS = "head-parallel, densities spread by e^0.6, 16 ranks"
DENSE = "Transformer Engine dense, p2p"

SYSTEMS = {
    "ours": ("C0", "o-"),
    "striped, flat ring": ("C1", "s-"),
    "zigzag, flat ring": ("C3", "v-"),
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


def measured_attention(folder: Path) -> dict[tuple[str, int], Attention]:
    """What was measured of whole calls at ``STEPS`` tokens, on one rank and on two."""
    one = newest(folder, "ring-*-1-gpu.json")
    two = newest(folder, "ring-*-2-gpus.json")
    found = {
        ("ours", 1): attention_of(one, "ours, one rank", STEPS),
        ("dense, zigzag", 1): attention_of(one, "cuDNN dense, one rank", STEPS),
        ("ours", 2): attention_of(two, "striped", STEPS),
        ("zigzag, flat ring", 2): attention_of(two, "zigzag", STEPS),
        ("dense, zigzag", 2): attention_of(two, DENSE, STEPS),
    }
    return {key: attention for key, attention in found.items() if attention is not None}


def steps(folder: Path) -> Iterator[tuple[str, int, Attention, float]]:
    """``(system, ranks, attention, ms of a step)``, by system and ranks."""
    layer = LayerTimes(newest(folder, f"layer-*-{MODEL}.json"))
    rates = dense_rates(newest(folder, "ring-*-2-gpus.json"), DENSE, STEPS)
    attention = measured_attention(folder) | dict(simulated_attention(Shape(STEPS), SIZES, rates))
    for system in SYSTEMS:
        for (name, size), times in sorted(attention.items(), key=lambda item: item[0][1]):
            if name == system:
                yield system, size, times, step_ms(MODELS[MODEL], layer, times, STEPS / size)


def draw_balance(axis: Any, balance: dict[str, dict[str, Any]]) -> None:
    """Worker-level imbalance in pairs, beside the paper's."""
    shown = (
        ("head-parallel,\n16 ranks", balance[HEADS]["pairs_total"], 1.94),
        ("zigzag,\nflat", balance["zigzag, flat"]["pairs_worker"], 2.4),
        ("zigzag,\n4 x 8", balance["zigzag, hierarchical"]["pairs_worker"], None),
        ("ours,\nflat", balance["striped, flat"]["pairs_worker"], None),
        ("ours,\n4 x 8", balance["striped, rotated, hierarchical"]["pairs_worker"], 1.0),
    )
    for place, (_, pairs, paper) in enumerate(shown):
        for number, (color, value) in enumerate((("C0", pairs), ("lightgrey", paper))):
            if value is not None:
                at = place + (number - 0.5) * 0.38
                axis.bar(at, value, 0.36, color=color)
                more = ">" if value == paper and value > 2 else ""
                axis.text(at, value, f"{more}{value:.2f}", ha="center", va="bottom", fontsize=7)
    labels = (("C0", "pairs, counted"), ("lightgrey", "paper"))
    handles = [Patch(color=color, label=label) for color, label in labels]
    axis.set_xticks(range(len(shown)), [name for name, *_ in shown], fontsize=8)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set(title="imbalance of workers (max / mean), 512K tokens", ylim=(0.8, None))
    axis.legend(handles=handles, fontsize=7)


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


def draw_steps(axis: Any, found: list[tuple[str, int, Attention, float]]) -> None:
    """Tokens per second over ranks: filled from measured parts, hollow simulated."""
    for system, (color, style) in SYSTEMS.items():
        points = [(size, STEPS / ms) for name, size, _, ms in found if name == system]
        if points:
            axis.plot(*zip(*points, strict=True), style[1:], color=color, linewidth=1)
            for size, rate in points:
                axis.plot(
                    size, rate, style[0], color=color, fillstyle="none" if size in SIZES else "full", markersize=6
                )
            axis.plot([], [], style, color=color, label=system)
    axis.set(xscale="log", yscale="log", xlabel="GPUs (filled: measured parts; hollow: simulated)",
             ylabel="thousand tokens a second", title=f"training step, {MODEL}, 256K tokens")  # fmt: skip
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


def print_steps(found: list[tuple[str, int, Attention, float]]) -> None:
    """The table of steps."""
    print("\n| system | GPUs | | index, forward, backward of a layer, ms | step, s | tokens/s |")
    print("|---|---|---|---|---|---|")
    for system, size, times, ms in found:
        parts = f"{times.index:.2f}, {times.forward:.2f}, {times.backward:.2f}"
        how = "simulated" if size in SIZES else "measured"
        print(f"| {system} | {size} | {how} | {parts} | {ms / 1e3:.2f} | {STEPS / ms * 1e3:,.0f} |")


def main() -> None:
    """Draws and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--target", type=Path, default=Path("docs/images/ring.png"))
    args = parser.parse_args()
    try:
        cases = by_case(newest(args.folder, "ring-*-virtual-4x8-512k.json"), LONG)
        balance = {case_name(row): row for row in newest(args.folder, "ring-*-pairs-4x8-512k.json")}
        found = list(steps(args.folder))
    except FileNotFoundError as error:
        parser.error(str(error))
    figure, axes = plt.subplots(1, 3, figsize=(16, 4.4))
    draw_balance(axes[0], balance)
    draw_times(axes[1], cases)
    draw_steps(axes[2], found)
    figure.tight_layout()
    figure.savefig(args.target, dpi=120)
    print_balance(balance)
    print_rings(cases)
    print_steps(found)


if __name__ == "__main__":
    main()
