"""Tables of the study from its raw results: paired loss gaps, step times, retrieval, density (docs/proof.md).

    python -m benchmarks.proof.summary benchmarks/results/proof-2026-11-30-h200

Reads ``*/training/*.jsonl`` (runs that were trained and evaluated), ``*/steps/*.jsonl`` (runs of a few steps for their time)
and ``*/again/*.jsonl`` (further dense runs) below the folder and writes ``summary.json`` into it. Runs are compared with
those of their own length.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.proof.variants import DENSE, variant

STUDENT_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
"""0.975 quantiles by degrees of freedom."""


@dataclass(frozen=True)
class Run:
    """One file of :mod:`benchmarks.proof.runs`."""

    job: str
    variant: str
    seed: int
    length: int
    steps: list[dict[str, Any]]
    valid: dict[str, dict[str, Any]]
    retrieval: list[dict[str, Any]]
    planted: list[dict[str, Any]]
    recall: dict[int, dict[str, list[float | None]]]

    @classmethod
    def load(cls, path: Path) -> Run:
        """Reads a file."""
        header, *lines = (json.loads(line) for line in path.read_text().splitlines())
        return cls(
            path.parent.parent.name,
            header["variant"],
            header["seed"],
            header["plan"]["length"],
            [line for line in lines if "step" in line],
            {line["attention"]: line["valid"] for line in lines if "valid" in line},
            [{"attention": line["attention"], **line["retrieval"]} for line in lines if "retrieval" in line],
            [{"attention": line["attention"], **line["planted"]} for line in lines if "planted" in line],
            {line["recall_after"]: line["recall"] for line in lines if "recall" in line},
        )

    @property
    def own(self) -> str:
        """The attention that the run was trained with."""
        return self.variant

    @property
    def step_seconds(self) -> float:
        """Median of the steps after the first two."""
        return float(np.median([step["seconds"] for step in self.steps[2:]]))

    @property
    def density(self) -> float | None:
        """Mean over layers at the last step."""
        layers = self.steps[-1].get("density_by_layer")
        return None if layers is None else float(np.mean(layers))


def load_runs(folder: Path, kind: str) -> list[Run]:
    """The runs below a folder, in the order of their seeds, then of their files' names."""
    paths = (path for path in sorted(folder.glob(f"*/{kind}/*-seed*.jsonl")) if "index-" not in path.name)
    return sorted((Run.load(path) for path in paths), key=lambda run: run.seed)


def mean_interval(values: list[float]) -> dict[str, Any]:
    """Mean and half of its 95% interval (Student), where there are two values or more."""
    half = None
    if len(values) > 1:
        half = STUDENT_T[len(values) - 1] * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return {"mean": float(np.mean(values)), "half_interval": half, "values": [round(v, 5) for v in values]}


def wilson(right: int, count: int) -> list[float]:
    """95% interval of a share (Wilson)."""
    z, share = 1.96, right / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count**2)) / (1 + z * z / count)
    return [round(centre - half, 4), round(centre + half, 4)]


def gaps(runs: list[Run]) -> dict[str, Any]:
    """Held-out loss of each variant less that of dense of the same seed, in nats, by attention at evaluation."""
    dense = {run.seed: run.valid["dense"]["loss"] for run in runs if run.variant == DENSE}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.seed in dense and run.variant != DENSE:
            found[run.variant]["own attention"].append(run.valid[run.own]["loss"] - dense[run.seed])
            found[run.variant]["dense attention"].append(run.valid["dense"]["loss"] - dense[run.seed])
    for run in runs:
        if run.variant == DENSE:
            for name, valid in run.valid.items():
                if name != "dense":
                    found["dense"][f"{name} attention"].append(valid["loss"] - dense[run.seed])
    return {name: {how: mean_interval(v) for how, v in by.items()} for name, by in found.items()}


def late_training_gap(runs: list[Run], last: int = 10) -> dict[str, Any]:
    """Training loss of the last steps less dense's on the same batches, in nats, mean over them by seed."""
    dense = {run.seed: [s["loss"] for s in run.steps] for run in runs if run.variant == DENSE}
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if run.seed in dense and run.variant != DENSE:
            ours = [step["loss"] for step in run.steps]
            found[run.variant].append(float(np.mean(ours[-last:]) - np.mean(dense[run.seed][-last:])))
    return {name: mean_interval(values) for name, values in found.items()}


def retrieval_table(runs: list[Run]) -> list[dict[str, Any]]:
    """Right answers pooled over the seeds, by training, attention at evaluation, task and length."""
    pooled: dict[tuple[str, str, str, int], list[int]] = defaultdict(lambda: [0, 0])
    for run in runs:
        for item in run.retrieval:
            cell = pooled[run.variant, item["attention"], item["task"], item["length"]]
            cell[0] += item["right"]
            cell[1] += item["count"]
    return [
        {
            "trained": key[0],
            "attention": key[1],
            "task": key[2],
            "length": key[3],
            "right": right,
            "count": count,
            "share": round(right / count, 4),
            "interval": wilson(right, count),
        }
        for key, (right, count) in sorted(pooled.items())
    ]


def planted_table(runs: list[Run]) -> list[dict[str, Any]]:
    """Right answers to questions in the middle of the text, pooled over the seeds, by training and attention."""
    pooled: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0])
    for run in runs:
        for item in run.planted:
            cell = pooled[run.variant, item["attention"]]
            for place, value in enumerate((item["right"], item["count"], item["loss"], 1)):
                cell[place] += value
    return [
        {
            "trained": key[0],
            "attention": key[1],
            "right": int(right),
            "count": int(count),
            "share": round(right / count, 4),
            "interval": wilson(int(right), int(count)),
            "digit_loss": round(loss / windows, 4),
        }
        for key, (right, count, loss, windows) in sorted(pooled.items())
    ]


def step_times(runs: list[Run]) -> dict[str, Any]:
    """Median seconds of a step and density at the end, by job and variant: the median over its runs.

    Only times of one job were taken on one machine, with one version of the kernels.
    """
    by: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        by[run.job][run.variant].append(run)
    return {
        job: {
            name: {
                "seconds": round(float(np.median([run.step_seconds for run in found])), 4),
                "density": None if found[0].density is None else round(float(np.mean([r.density for r in found])), 4),
                "runs": len(found),
            }
            for name, found in variants.items()
        }
        for job, variants in by.items()
    }


def recall_table(runs: list[Run]) -> dict[str, Any]:
    """Means over the layers that estimate an index, by variant and step; of the first run of a variant that measured them."""
    found: dict[str, Any] = {}
    for run in runs:
        if run.variant not in found and run.recall:
            dense = variant(run.variant).dense_layers
            found[run.variant] = {
                step: {key: _mean_of([v for number, v in enumerate(values, 1) if number not in dense])
                       for key, values in by_layer.items()}
                for step, by_layer in run.recall.items()
            }  # fmt: skip
    return found


def _mean_of(values: list[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return round(float(np.mean(numbers)), 4) if numbers else None


def repeated(runs: list[Run], again: list[Run]) -> list[dict[str, Any]]:
    """Held-out loss of a dense run less that of the first one with the same seed, batches and length."""
    first = {(run.seed, run.length): run.valid["dense"]["loss"] for run in runs if run.variant == DENSE}
    return [
        {"seed": run.seed, "length": run.length, "difference": run.valid["dense"]["loss"] - first[run.seed, run.length]}
        for run in again
        if run.variant == DENSE and (run.seed, run.length) in first
    ]


def at_length(runs: list[Run], steps: list[Run]) -> dict[str, Any]:
    """The tables of runs of one length."""
    return {
        "gap_to_dense_held_out": gaps(runs),
        "gap_to_dense_last_10_steps": late_training_gap(runs),
        "retrieval": retrieval_table(runs),
        "planted": planted_table(runs),
        "steps": step_times(runs),
        "steps_alone": step_times(steps),
        "recall": recall_table([*runs, *steps]),
    }


def summarize(folder: Path) -> dict[str, Any]:
    """Everything the page quotes, by the length of the training sequences."""
    runs, steps, again = (load_runs(folder, kind) for kind in ("training", "steps", "again"))
    found: dict[str, Any] = {
        str(length): at_length(
            [run for run in runs if run.length == length], [run for run in steps if run.length == length]
        )
        for length in sorted({run.length for run in runs + steps})
    }
    return {**found, "again": {"differences": repeated(runs, again), "retrieval": retrieval_table(again)}}


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    text = json.dumps(summarize(folder), indent=1) + "\n"
    (folder / "summary.json").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
