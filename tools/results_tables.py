"""Tables of measurements, made from the files of benchmarks/results: no figure is typed by hand."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
LINK = "../benchmarks/results"
Row = dict[str, Any]

IMPLEMENTATIONS = {
    "cudnn": "cuDNN, dense (in PyTorch)",
    "flash-attention-2": "FlashAttention-2, dense",
    "flash-attention-4": "FlashAttention-4, dense",
    "flex-slash-128": "FlexAttention, slash lines of 128-blocks only",
    "flash-attention-4-slash-128": "FlashAttention-4, slash lines of 128-blocks only",
    "minference-triton": "the authors' Triton kernel, same mask",
    "mtraining-sm90": "**ours, sm_90a**",
    "mtraining-sm90-fast": "ours, sm_90a, not deterministic",
    "mtraining-sm80": "ours, sm_80 kernels on this card",
    "mtraining-sm80-fast": "ours, sm_80 kernels on this card, not deterministic",
}


def load(name: str) -> dict[str, Any]:
    """A result file by its name without ``.json``."""
    read: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return read


def source(name: str) -> str:
    """One line: when, on what, by which command, and where all rows are."""
    data = load(name)
    device = f"{data['device']}, torch {data['torch']}, " if "device" in data else ""
    page = f"{name}.md" if (RESULTS / f"{name}.md").exists() else f"{name}.json"
    return f"*{data['date']}, {device}`{data['command']}`; [all rows]({LINK}/{page})*"


def markdown(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table; None is an empty cell."""
    lines = [list(header)]
    lines.append(["---"] * len(lines[0]))
    lines += [["" if cell is None else str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def of_problem(name: str, seq_len: str, shape: str) -> list[Row]:
    """The rows of a sequence length and of ``heads/kv_heads/head_dim``, launched from Python one by one."""
    heads = [int(number) for number in shape.split("/")]
    return [
        row
        for row in load(name)["rows"]
        if row["seq_len"] == int(seq_len)
        and [row["heads"], row["kv_heads"], row["head_dim"]] == heads
        and row.get("launch", "plain") == "plain"
    ]


def by_pass(rows: Iterable[Row], key: str) -> dict[tuple[Any, str], dict[str, Row]]:
    """The rows of forward and backward by (``key``, implementation), where both are there."""
    found: dict[tuple[Any, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row[key], row["impl"]), {})[row["pass"]] = row
    return {where: passes for where, passes in found.items() if {"forward", "backward"} <= passes.keys()}


def times(passes: dict[str, Row]) -> list[str]:
    """Milliseconds and useful TFLOP/s of both passes."""
    return [
        text
        for kind in ("forward", "backward")
        for text in (f"{passes[kind]['ms']:.2f}", f"{passes[kind]['tflops']:.0f}")
    ]


def operators(name: str, seq_len: str, shape: str = "16/2/128") -> str:
    """Forward and backward of whole sequences, beside the dense peers of the same run."""
    rows = [row for row in of_problem(name, seq_len, shape) if not row.get("cp_size")]
    index = next(row["ms"] for row in rows if row["impl"] == "mtraining" and row["pass"] == "index")
    dense = sum(row["ms"] for row in rows if row["impl"] == "cudnn")
    lines = []
    for (density, impl), passes in by_pass(rows, "density").items():
        total = passes["forward"]["ms"] + passes["backward"]["ms"] + index * impl.startswith("mtraining")
        speed_up = f"{dense / total:.1f}" if dense else None
        lines.append(
            (-round(density, 2), -total, [named(impl), f"{density:.3f}", *times(passes), f"{total:.1f}", speed_up])
        )
    header = [
        "",
        "density",
        "forward ms",
        "TFLOP/s",
        "backward ms",
        "TFLOP/s",
        "both, with index, ms",
        "speed-up over cuDNN",
    ]
    table = markdown(header, (cells for *_, cells in sorted(lines, key=lambda line: line[:2])))
    return f"{table}\n\nIndex estimation, in ours: {index:.2f} ms. {source(name)}"


def shares(name: str, seq_len: str, shape: str = "16/2/128") -> str:
    """One context-parallel rank's share, all chunks in one launch, without traffic."""
    rows = [row for row in of_problem(name, seq_len, shape) if row.get("cp_size")]
    whole = by_pass((row for row in rows if row["chunks_per_launch"] == row["cp_size"]), "cp_size")
    lines = [[size, named(impl), *times(passes)] for (size, impl), passes in sorted(whole.items())]
    header = ["ranks", "", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s"]
    return f"{markdown(header, lines)}\n\n{source(name)}"


def named(impl: str) -> str:
    """An implementation as a reader knows it."""
    return IMPLEMENTATIONS.get(impl, impl)


def ring(name: str) -> str:
    """Real ranks: time of a pass, and how much of the traffic is hidden where that was recorded."""
    header = ["tokens", "ranks", "ring", "pass", "ms, slowest rank", "transfer ms", "exposed ms", "hidden"]
    keys = ("seq_len", "cp_size", "case", "pass", "ms", "transfer_ms", "exposed_ms")
    lines = [
        [*(row.get(key) for key in keys), f"{row['hidden']:.1%}" if "hidden" in row else None]
        for row in load(name)["rows"]
    ]
    return f"{markdown(header, lines)}\n\n{source(name)}"


def links(name: str) -> str:
    """Flat against hierarchical over shaped links."""
    data = load(name)
    lines = [
        [kind, data[kind]["ms"], data[kind]["compute_ms"], data[kind]["exposed_ms"]]
        for kind in ("flat", "hierarchical")
    ]
    table = markdown(["ring", "ms", "of it compute ms", "exposed transfer ms"], lines)
    as_single = f"{data['bound']:.2f} if the flat ring's hops took as long as single exchanges"
    return f"{table}\n\nSpeed-up {data['speed_up']:.2f}; {as_single}. {source(name)}"


def steps(*names: str) -> str:
    """Training steps that ran as one, by their parts, and scaled to the whole model."""
    parts = ("forward", "output layer and loss", "backward", "step")
    header = ["", "GPUs", "layers", "density", *(f"{part} ms" for part in parts), "all layers (scaled), s"]
    lines = [
        [row["system"], row["cp_size"], row["layers"], f"{row['density']:.3f}"]
        + [f"{row[f'{part}_ms']:.0f}" for part in parts]
        + [f"{row['scaled_step_ms'] / 1e3:.1f}"]
        for name in names
        for row in load(name)["rows"]
    ]
    return "\n\n".join([markdown(header, lines), *map(source, names)])


KINDS: dict[str, Callable[..., str]] = {
    "operators": operators,
    "shares": shares,
    "ring": ring,
    "links": links,
    "steps": steps,
}
"""Kinds of tables; what follows a kind in a page are the arguments of its function."""
