"""The dated files of a run: all rows as JSON, and as one table a kind of row in Markdown."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from pathlib import Path

import torch

from benchmarks.ring.cases import Row

LISTS = ("per_launch_ms", "per_rank_ms", "table_ms")
"""Lists of a row: in the JSON file alone, a line each."""


def markdown(rows: list[Row], header: str) -> str:
    """Rows with the same columns as one table; lists stay in the JSON file."""
    tables: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        tables.setdefault(tuple(key for key in row if key not in LISTS), []).append(row)
    lines = [header]
    for keys, found in tables.items():
        lines += ["", "| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
        lines += ["| " + " | ".join(str(row[key]) for key in keys) + " |" for row in found]
    return "\n".join(lines) + "\n"


def device_name() -> str:
    """The card, or the CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def write(rows: list[Row], folder: Path, module: str, name: str, device: str = "") -> Path:
    """Writes ``name-DATE-...`` with the command line that made them; called again as rows come.

    Args:
        rows: all so far.
        folder: of the files.
        module: that was run.
        name: of the files, with DATE for today's.
        device: what the rows are of; this machine's card if not given.

    Returns:
        The files' path without their endings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    date = datetime.date.today().isoformat()
    command = f"python -m {module} " + shlex.join(sys.argv[1:]).replace(str(folder), "benchmarks/results")
    target = folder / name.replace("DATE", date)
    head = {"date": date, "command": command, "device": device or device_name(), "torch": torch.__version__}
    lines = ",\n".join(json.dumps(row) for row in rows)
    Path(f"{target}.json").write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')
    title = f"# {module} on {head['device']}, {date}\n\n`{command}`, torch {head['torch']}."
    Path(f"{target}.md").write_text(markdown(rows, title))
    return target
