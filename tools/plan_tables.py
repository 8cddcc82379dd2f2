"""The table of what launches take of a rank, made by ``megatron-mtraining plan``: no figure is typed by hand."""

from megatron_mtraining import plan

NAMES = {"qwen2.5-3b": "Qwen2.5-3B", "llama-3.1-8b": "Llama-3.1-8B"}
HIERARCHICAL, FLAT = "--hierarchical-context-parallel-sizes 8 4", "--mtraining-ring flat"
LAUNCHES = (
    ("qwen2.5-3b", 1, 8, ""),
    ("qwen2.5-3b", 1, 16, ""),
    ("qwen2.5-3b", 1, 32, ""),
    ("qwen2.5-3b", 1, 32, HIERARCHICAL),
    ("qwen2.5-3b", 1, 32, FLAT),
    ("qwen2.5-3b", 2, 32, ""),
    ("qwen2.5-3b", 1, 64, ""),
    ("llama-3.1-8b", 1, 8, ""),
    ("llama-3.1-8b", 1, 16, ""),
    ("llama-3.1-8b", 1, 32, ""),
    ("llama-3.1-8b", 1, 32, FLAT),
    ("llama-3.1-8b", 2, 32, ""),
    ("llama-3.1-8b", 1, 64, ""),
)
"""model, tensor-parallel size, context-parallel size, more options"""
PARTS = {
    "ring buffers": ("ring buffers",),
    "columns, index": ("columns", "index"),
    "weights, gradients, optimizer": ("weights", "gradients", "optimizer"),
    "activations, one layer": ("activations", "one layer"),
    "logits": ("logits",),
    "total": ("total",),
}
"""column -> the parts of a rank's memory that it sums"""


def launches(seq_length: str) -> str:
    """A row for each of ``LAUNCHES``: ring, communicators, GiB of a rank, simulated ms of an attention call."""
    header = ["model", "tp", "cp", "ring", "communicators, made + Megatron's", *PARTS, "ms"]
    lines = [header, ["---"] * len(header)]
    for model, tp, cp, options in LAUNCHES:
        words = f"--model {model} --seq-length {seq_length} --mtraining-max-vertical 4096 {options}"
        sizes = f"--tensor-model-parallel-size {tp} --context-parallel-size {cp}"
        job, _ = plan.parse(f"{words} {sizes}".split())
        found = plan.plan(job)
        inner, gib, groups = found["inner_size"], found["stages"][0]["gib"], found["communicators"]
        lines.append(
            [
                NAMES[model] + (f", `{options}`" if options else ""),
                str(tp),
                str(cp),
                "flat" if inner == cp else f"{inner} x {cp // inner}",
                f"{len(groups['made'])} + {len(groups['megatron'])}",
                *(
                    f"{sum(gib[part] for part in parts):.{2 if column in ('ring buffers', 'columns, index') else 1}f}"
                    for column, parts in PARTS.items()
                ),
                f"{found['recommended']['this']['ms']:.1f}",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
