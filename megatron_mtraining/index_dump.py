"""Writing indices to files and reading them back, to look at what attention kept.

    python -m megatron_mtraining.index_dump FILE...

prints the kept lines of every head. A file is what ``torch.save`` makes of a dictionary of tensors and numbers.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .documents import Documents
from .index import VerticalSlashIndex

FORMAT = 1
KEYS = frozenset({"slash_words", "column_words", "documents", "column_capacity", "about"})
"""What a file of this format holds besides its format."""


def save_index(path: str | Path, index: VerticalSlashIndex, **about: Any) -> None:
    """Writes an index (copied to the host, which waits for the device).

    Args:
        path: of the file; its folder must be there.
        index: the kept lines.
        about: anything plain to keep beside it: strings, numbers, lists of them.
    """
    documents = index.documents
    content = {
        "format": FORMAT,
        "slash_words": index.slash_words.cpu(),
        "column_words": index.column_words.cpu(),
        "documents": (documents.seq_len, list(documents.starts), list(documents.lengths)),
        "column_capacity": index.column_capacity,
        "about": about,
    }
    torch.save(content, Path(path))


def load_index(path: str | Path) -> tuple[VerticalSlashIndex, dict[str, Any]]:
    """The index of a file, on the CPU, and what was kept beside it.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it holds something else.
    """
    try:
        content = torch.load(Path(path), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):  # what torch.load makes of other files
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not content.keys() >= KEYS:
        raise ValueError(f"{path}: not an index of format {FORMAT} (a file of megatron_mtraining.index_dump)")
    seq_len, starts, lengths = content["documents"]
    documents = Documents(seq_len, tuple(starts), tuple(lengths))
    index = VerticalSlashIndex(content["slash_words"], content["column_words"], documents, content["column_capacity"])
    return index, content["about"]


def describe(index: VerticalSlashIndex) -> list[str]:
    """A line for every sample and head: the numbers of lines, the density and the first distances."""
    slash, columns, pairs = index.slash_bits(), index.column_bits(), index.pairs()
    lines = []
    for sample in range(slash.shape[0]):
        for head in range(slash.shape[1]):
            entries = slash[sample, head].nonzero().flatten()
            distances = (entries - index.documents.doc_start.long()[entries]).unique().tolist()
            shown = ", ".join(map(str, distances[:12])) + (", ..." if len(distances) > 12 else "")
            density = float(pairs[sample, head]) / (index.seq_len**2 / 2)
            lines.append(
                f"sample {sample} head {head}: {entries.numel()} slash lines, {int(columns[sample, head].sum())} columns, "
                f"density {density:.4f}, block distances {shown}"
            )
    return lines


def main(paths: Sequence[str] | None = None) -> None:
    """Prints what files hold; the command line's, if none are given."""
    paths = sys.argv[1:] if paths is None else paths
    if not paths:
        raise SystemExit("usage: python -m megatron_mtraining.index_dump FILE...")
    for path in paths:
        try:
            index, about = load_index(path)
        except (OSError, ValueError) as error:
            raise SystemExit(f"megatron_mtraining.index_dump: {error}") from error
        print(f"{path}: {index.seq_len} tokens in {len(index.documents.starts)} documents, {about}")
        print(*describe(index), sep="\n")


if __name__ == "__main__":
    main()
