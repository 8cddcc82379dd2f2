"""Rows of the operator benchmark and the dated files they go to."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.problems import Problem
from benchmarks.timing import Measured

Row = dict[str, object]
KEYS = (
    "seq_len", "heads", "kv_heads", "head_dim", "density", "cp_size", "chunks_per_launch", "launch", "impl", "pass",
    "ms", "tflops", "of_matmul", "speed_up", "of_ideal", "peak_mib",
)  # fmt: skip
DENSE = "cudnn"
"""The implementation that speed-ups refer to."""


class Results:
    """The rows of one run; every row is printed and, with a folder, written at once."""

    def __init__(self, matmul_tflops: float, folder: Path | None) -> None:
        self.matmul, self.folder = matmul_tflops, folder
        self.rows: list[Row] = []
        self.skipped: list[str] = []
        self.failed: list[str] = []
        self.dense_ms: dict[tuple[int, int, int, str], float] = {}

    def add(
        self, problem: Problem, impl: str, kind: str, measured: Measured, flops: float, density: float, **more: object
    ) -> None:
        """One measurement.

        Args:
            kind: forward, backward or index.
            flops: on useful pairs.
            density: of those pairs.
            more: further columns; ``launch`` is "plain" unless given.
        """
        tflops = flops / measured.ms / 1e9
        row: Row = {
            "impl": impl, "pass": kind, "seq_len": problem.seq_len, "heads": problem.heads,
            "kv_heads": problem.kv_heads, "head_dim": problem.head_dim, "density": round(density, 4),
            "ms": round(measured.ms, 4), "tflops": round(tflops, 1), "of_matmul": round(tflops / self.matmul, 3),
            "peak_mib": round(measured.peak_mib, 1), "launch": "plain", **more,
        }  # fmt: skip
        key = (problem.seq_len, problem.heads, problem.head_dim, kind)
        if impl == DENSE:
            self.dense_ms[key] = measured.ms
        elif key in self.dense_ms and "cp_size" not in more:
            speed_up = self.dense_ms[key] / measured.ms
            row |= {"speed_up": round(speed_up, 2), "of_ideal": round(speed_up * density, 3)}
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self.write()

    def write(self) -> None:
        """The JSON and Markdown files so far."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        date, card = datetime.date.today().isoformat(), torch.cuda.get_device_name()
        name = f"ops-{date}-{card.lower().replace(' ', '-')}"
        options = " ".join(sys.argv[1:]).replace(str(self.folder), "benchmarks/results")
        head = {
            "date": date, "command": f"python -m benchmarks.bench_ops {options}", "device": card,
            "torch": torch.__version__, "matmul_tflops": round(self.matmul, 1),
            "note": "sm80 kernels run here on Hopper, not on an A100", "steps": self.steps(), "skipped": self.skipped,
            "failed": self.failed,
        }  # fmt: skip
        text = json.dumps({**head, "rows": self.rows}, indent=1)
        (self.folder / f"{name}.json").write_text(text + "\n")
        (self.folder / f"{name}.md").write_text(self.markdown(head))

    def steps(self) -> list[Row]:
        """Forward, backward and, where an index is needed, its estimation, together, against dense attention."""
        found: list[Row] = []
        whole = [row for row in self.rows if "cp_size" not in row and row["launch"] != "in turn"]
        index = {(r["seq_len"], r["heads"], r["head_dim"]): r for r in whole if r["impl"] == "mtraining-queued"}
        for forward in whole:
            key = (forward["seq_len"], forward["heads"], forward["head_dim"])
            dense = [self.dense_ms.get((*key, kind)) for kind in ("forward", "backward")]  # type: ignore[arg-type]
            if forward["pass"] != "forward" or forward["impl"] == DENSE or None in dense:
                continue
            for backward in whole:
                same = all(backward[name] == forward[name] for name in ("seq_len", "heads", "head_dim", "density"))
                kernel = str(backward["impl"]).removesuffix("-fast")
                if backward["pass"] != "backward" or kernel != forward["impl"] or not same:
                    continue
                estimated = kernel.startswith("mtraining") and key in index
                ms = float(forward["ms"]) + float(backward["ms"])  # type: ignore[arg-type]
                index_ms = float(index[key]["ms"]) if estimated else 0.0  # type: ignore[arg-type]
                total, dense_total = ms + index_ms, sum(x for x in dense if x is not None)
                found.append({
                    "impl": backward["impl"], "seq_len": key[0], "heads": key[1], "head_dim": key[2],
                    "density": forward["density"], "ms": round(total, 3), "index_share": round(index_ms / ms, 4),
                    "speed_up": round(dense_total / total, 2),
                })  # fmt: skip
        return found

    def markdown(self, head: Row) -> str:
        """All rows as one table, and the sums of the passes as a second one."""
        title = (
            f"# Operators on {head['device']}, {head['date']}\n\n`{head['command']}`, torch {head['torch']}, bf16 matmul "
            f"{head['matmul_tflops']} TFLOP/s in the same run. {head['note']}. TFLOP/s on useful pairs; `of_matmul` of "
            f"that rate; `speed_up` over {DENSE} dense, `of_ideal` its share of 1/density; `launch`: launched from "
            f"Python one by one on an idle device (plain) or behind other work (queued), in turn with those of the same "
            f"name, or replayed as a CUDA graph (graph); `cp_size`: one rank's share without traffic.\n"
        )
        lines = [title, *table(KEYS, self.rows)]
        steps = self.steps()
        if steps:
            lines += ["", f"Forward + backward, index estimation included, against {DENSE} dense:", ""]
            lines += table(tuple(steps[0]), steps)
        for what, names in (("Left out for time", self.skipped), ("Failed", self.failed)):
            if names:
                lines += ["", f"{what}: " + "; ".join(names) + "."]
        return "\n".join(lines) + "\n"


def table(keys: tuple[str, ...], rows: Iterable[Row]) -> list[str]:
    """Lines of a Markdown table."""
    head = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    return head + ["| " + " | ".join(str(row.get(key, "")) for key in keys) + " |" for row in rows]
