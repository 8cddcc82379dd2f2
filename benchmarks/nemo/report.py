"""Tables of a run, from the lines of its parts, as Markdown: `python -m benchmarks.nemo.report RESULTS.jsonl [CALL...]`.

With calls, only their lines are taken (the key `call` of a line).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

Line = dict[str, Any]


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """A Markdown table."""
    if rows:
        yield "| " + " | ".join(head) + " |"
        yield "|" + "---|" * len(head)
        yield from ("| " + " | ".join(row) + " |" for row in rows)
        yield ""


def kinds(line: Line) -> str:
    """The classes of core attention of a line, in short."""
    return ", ".join(f"{name.rsplit('.', 1)[1]} x {count}" for name, count in line["attention"].items())


def conversions(lines: list[Line]) -> list[list[str]]:
    """Weights that came back."""
    return [
        [
            line.get("run", line["part"]),
            line["compared"],
            str(line["tensors"]),
            str(line["equal"]),
            f"{line['largest']:.2g}",
        ]
        for line in lines
        if "compared" in line
    ]


def logits(lines: list[Line]) -> list[list[str]]:
    """Distances of logits from transformers in fp32."""
    return [
        [
            line.get("run", line["part"]),
            line["logits"],
            f"{line['kl_mean']:.2e}",
            f"{line['logit_max']:.3f}",
            f"{100 * line['same_first']:.1f} %",
        ]
        for line in lines
        if "logits" in line
    ]


def trained(lines: list[Line]) -> list[list[str]]:
    """Runs, with their distance from the dense run of the same start; of runs made twice, the first."""
    runs: dict[str, Line] = {}
    for line in lines:
        if "losses" in line:
            runs.setdefault(line["run"], line)
    logged = {line["run"]: line["logged"][-1] for line in lines if "logged" in line}
    return [row(line, dense_of(line, runs), logged.get(name)) for name, line in runs.items()]


def dense_of(line: Line, runs: dict[str, Line]) -> Line | None:
    """The dense run with the start of a run, if there is one: for `qwen-p1` `qwen-dense`, for one that goes on from step 11
    `qwen-dense-from-ours`.
    """
    kind = "dense" if line["first_step"] == 1 else "dense-from-ours"
    dense = runs.get(f"{line['run'].split('-')[0]}-{kind}")
    if dense is None or dense is line or line["part"].endswith("big") or dense["first_step"] != line["first_step"]:
        return None
    return dense


def row(line: Line, dense: Line | None, logged: Line | None) -> list[str]:
    """One run."""
    gaps = [a - b for a, b in zip(line["losses"], dense["losses"], strict=True)] if dense else []
    first, *others = line["milliseconds"]
    return [
        line["run"],
        kinds(line),
        f"{line['first_step']} to {line['first_step'] + len(line['losses']) - 1}",
        f"{line['losses'][0]:.4f} -> {line['losses'][-1]:.4f}",
        f"{max(map(abs, gaps)):.5f} / {sum(gaps) / len(gaps):+.5f}" if gaps else "",
        f"{logged['density']:.3f} / {logged['recall']:.3f}" if logged else "",
        f"{first / 1000:.1f} s / {median(others):.0f} ms",
        f"{line['peak_gib']:.1f}",
    ]


def report(lines: list[Line]) -> Iterator[str]:
    """All tables."""
    yield "Weights that were exported, against those that were imported:\n"
    yield from table(["", "what", "tensors", "equal bits", "largest difference"], conversions(lines))
    yield "Logits against transformers in fp32:\n"
    yield from table(["", "of", "mean KL (nats)", "largest difference", "same first token"], logits(lines))
    yield "Training (gap to dense: largest / mean, in nats; step: the first / median of the others):\n"
    head = ["run", "core attention", "steps", "loss", "gap to dense", "density / recall", "step", "peak GiB"]
    yield from table(head, trained(lines))
    failures = [
        [line["part"], line["failed"], line["error"][:160].replace("|", " ")] for line in lines if "failed" in line
    ]
    yield "Failed:\n" if failures else "Nothing failed.\n"
    yield from table(["part", "step", "error"], failures)


def main() -> None:
    """Prints the tables of a file, or of some of its calls."""
    calls = sys.argv[2:]
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    lines = [line for line in lines if not calls or line["call"] in calls]
    print("\n".join(report(lines)))


if __name__ == "__main__":
    main()
