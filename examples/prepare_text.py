"""Turn text files into Megatron's indexed dataset, one token a byte and one document a file.

    python examples/prepare_text.py --output data/stdlib                  the Python standard library's own sources
    python examples/prepare_text.py --output data/mine --input my/folder  the text files below a folder, or one file

The tokens are those of Megatron's `--tokenizer-type NullTokenizer --vocab-size 257`: the bytes 0-255, and 256 after
each document. A second run with the same input finds the dataset and writes nothing.
"""

import argparse
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257


@dataclass(frozen=True)
class Corpus:
    """What a dataset was made of: kept beside it, to know it again."""

    source: str
    files: int
    tokens: int
    newest: float


def standard_library_files(root: Path) -> list[Path]:
    """The Python sources of the standard library below `root`, without installed packages, in a fixed order."""
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    return sorted(path for path in root.rglob("*.py") if skipped.isdisjoint(path.parts))


def text_files(source: Path) -> list[Path]:
    """The files at or below `source` in a fixed order, hidden ones left out.

    Raises:
        ValueError: `source` does not exist or has no file.
    """
    if not source.exists():
        raise ValueError(f"DATA={source}: no such file or folder")
    if source.is_file():
        return [source]
    files = [path for path in sorted(source.rglob("*")) if path.is_file() and not _is_hidden(path.relative_to(source))]
    if not files:
        raise ValueError(f"DATA={source}: the folder holds no file")
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def read_documents(files: Iterable[Path]) -> Iterator[bytes]:
    """The content of each file that is UTF-8 text and not empty; others are passed over."""
    for path in files:
        content = path.read_bytes()
        if not content.strip() or b"\0" in content:
            continue
        try:
            content.decode()
        except UnicodeDecodeError:
            continue
        yield content


def write_dataset(documents: Iterable[bytes], prefix: Path) -> tuple[int, int]:
    """Write `prefix`.bin and `prefix`.idx; returns the number of documents and of tokens.

    The files appear under their names only when they are complete.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    partial = prefix.with_name(f"{prefix.name}.partial-{os.getpid()}")
    builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=np.uint16)
    count = tokens = 0
    for content in documents:
        document = np.append(np.frombuffer(content, dtype=np.uint8).astype(np.uint16), np.uint16(END_OF_DOCUMENT))
        builder.add_document(torch.from_numpy(document), [len(document)])
        count += 1
        tokens += len(document)
    builder.finalize(f"{partial}.idx")
    for suffix in (".bin", ".idx"):
        os.replace(f"{partial}{suffix}", f"{prefix}{suffix}")
    return count, tokens


def prepare(source: Path | None, prefix: Path) -> Corpus:
    """Make the dataset `prefix` of `source` (None: the standard library) unless it is there already.

    Raises:
        ValueError: `source` does not exist or holds no text; the message names it.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if source is None else source
    files = standard_library_files(root) if source is None else text_files(root)
    newest = max((path.stat().st_mtime for path in files), default=0.0)
    description = prefix.with_name(prefix.name + ".json")
    complete = all(Path(f"{prefix}{suffix}").exists() for suffix in (".bin", ".idx")) and description.exists()
    if complete:
        known = Corpus(**json.loads(description.read_text()))
        if (known.source, known.newest) == (str(root.resolve()), newest):
            return known
    documents, tokens = write_dataset(read_documents(files), prefix)
    if documents == 0:
        for suffix in (".bin", ".idx"):
            Path(f"{prefix}{suffix}").unlink()
        raise ValueError(f"DATA={root}: none of its {len(files)} files is UTF-8 text")
    corpus = Corpus(str(root.resolve()), documents, tokens, newest)
    description.write_text(json.dumps(asdict(corpus)) + "\n")
    return corpus


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="path of the dataset without .bin and .idx")
    parser.add_argument("--input", type=Path, help="a text file or a folder (default: the Python standard library)")
    options = parser.parse_args()
    try:
        corpus = prepare(options.input, options.output)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(f"{options.output}: {corpus.tokens:,} tokens in {corpus.files:,} documents of {corpus.source}")


if __name__ == "__main__":
    main()
