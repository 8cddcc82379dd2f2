"""Draws `simulator.png`: `python docs/images/draw_simulator.py`. All times are simulated, see docs/simulator.md."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from megatron_mtraining.simulator import (
    H200_LINKS,
    H200_RATES,
    Choice,
    Cluster,
    Pattern,
    Predictor,
    Shape,
    make_profile,
)

SEQ = 524288
SERIES = {
    "striped, hierarchical, rotated": (Choice(stripe_rotation=8, chunks_per_launch=8), "tab:blue"),
    "striped, flat": (Choice(ring="flat"), "tab:orange"),
    "zigzag, flat": (Choice("zigzag", "flat"), "tab:red"),
}
BALANCE = {
    "striped, hierarchical": Choice(),
    "striped, hierarchical, rotated": Choice(stripe_rotation=8),
    "zigzag, flat": Choice("zigzag", "flat"),
    "zigzag, hierarchical": Choice("zigzag"),
}


def main() -> None:
    """Left: attention of a call over the number of GPUs. Right: worker-level imbalance on 4 nodes of 8."""
    profile = make_profile(Pattern(), SEQ, 16)
    figure, (times, balance) = plt.subplots(1, 2, figsize=(10, 3.4))
    for name, (choice, color) in SERIES.items():
        ranks = (16, 32, 64)
        predictors = [Predictor(Shape(SEQ), profile, Cluster(size, 8, H200_LINKS, H200_RATES)) for size in ranks]
        rate = [SEQ / p.predict(choice).seconds / 1e6 for p in predictors]
        times.plot(ranks, rate, "o-", color=color, label=name)
    times.set_xticks((16, 32, 64))
    times.set_ylim(0, 48)
    times.set_xlabel("GPUs (nodes of 8)")
    times.set_ylabel("million tokens/s of one attention layer")
    times.legend(fontsize=8, loc="upper left")
    predictor = Predictor(Shape(SEQ), profile, Cluster(32, 8, H200_LINKS, H200_RATES))
    degrees = [predictor.predict(choice).balance.worker for choice in BALANCE.values()]
    bars = balance.barh(list(BALANCE), degrees, color=["tab:blue", "tab:cyan", "tab:red", "tab:pink"])
    balance.bar_label(bars, fmt="%.2f", padding=3)
    balance.set_xlim(0.9, max(degrees) + 0.2)
    balance.invert_yaxis()
    balance.set_xlabel("worker-level imbalance, 4 x 8 (1 is perfect)")
    figure.suptitle("Simulated: 512K tokens, 16/2 heads, density 5%", fontsize=10)
    figure.tight_layout()
    figure.savefig(Path(__file__).parent / "simulator.png", dpi=130)


if __name__ == "__main__":
    main()
