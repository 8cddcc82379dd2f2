"""Turn text files into Megatron's indexed dataset, one token a byte and one document a file.

    python examples/prepare_text.py --output data                    the Python standard library's own sources
    python examples/prepare_text.py --output data --input my/folder  the text files below a folder, or one file

There are two datasets, NAME-train and NAME-valid: one document of fifty is kept for validation, or, where there are
less than fifty, the end of each. (Megatron's own --split divides by whole documents and hangs if a part has none.)

The tokens are those of Megatron's `--tokenizer-type NullTokenizer --vocab-size 257`: the bytes 0-255, and 256 after
each document. The dataset is named after its source and a digest of the files' names, sizes and times, so a second run
finds it, and changed files make a new one (Megatron keeps indices by path and would not notice the change).
"""

import argparse
import hashlib
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
HELD_OUT = 50
FORMAT = "train and valid"  # what a dataset consists of: part of its name's digest


@dataclass(frozen=True)
class Corpus:
    """Two prepared datasets, `prefix`-train and `prefix`-valid (.bin and .idx), and what they were made of."""

    prefix: str
    source: str
    documents: int
    train_tokens: int
    valid_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of both together."""
        return self.train_tokens + self.valid_tokens


def standard_library_files(root: Path) -> list[Path]:
    """The Python sources of the standard library below `root`, without installed packages, in a fixed order."""
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    return sorted(path for path in root.rglob("*.py") if skipped.isdisjoint(path.parts))


def text_files(source: Path) -> list[Path]:
    """The files at or below `source` in a fixed order, hidden ones left out.

    Raises:
        ValueError: `source` does not exist or has no file.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        what = "neither a file nor a folder" if source.exists() else "no such file or folder"
        raise ValueError(f"DATA={source}: {what}")
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


def hold_out(documents: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The documents for training and those for validation, about one byte in fifty."""
    if len(documents) >= HELD_OUT:
        train = [content for number, content in enumerate(documents, 1) if number % HELD_OUT]
        return train, documents[HELD_OUT - 1 :: HELD_OUT]
    cuts = [len(content) - len(content) // HELD_OUT for content in documents]
    pairs = list(zip(documents, cuts, strict=True))
    return [content[:cut] for content, cut in pairs], [content[cut:] for content, cut in pairs if content[cut:]]


def write_dataset(documents: Iterable[bytes], prefix: Path) -> int:
    """Write `prefix`.bin and `prefix`.idx; returns the number of tokens.

    The files appear under their names only when they are complete.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core names each optional package that is not there
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    partial = prefix.with_name(f"{prefix.name}.partial-{os.getpid()}")
    builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=np.uint16)
    tokens = 0
    for content in documents:
        document = np.append(np.frombuffer(content, dtype=np.uint8).astype(np.uint16), np.uint16(END_OF_DOCUMENT))
        builder.add_document(torch.from_numpy(document), [len(document)])
        tokens += len(document)
    builder.finalize(f"{partial}.idx")
    for suffix in (".bin", ".idx"):
        os.replace(f"{partial}{suffix}", f"{prefix}{suffix}")
    return tokens


def fingerprint(root: Path, files: Iterable[Path]) -> str:
    """Eight hexadecimal digits of the files' names below `root`, their sizes and modification times."""
    digest = hashlib.sha256(f"{FORMAT}\0{root.resolve()}\0".encode())
    for path in files:
        status = path.stat()
        digest.update(f"{path.relative_to(root)}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:8]


def prepare(source: Path | None, folder: Path) -> Corpus:
    """Make the dataset of `source` (None: the standard library) in `folder` unless it is there already.

    Raises:
        ValueError: `source` does not exist or holds no text; the message names it.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if source is None else source
    files = standard_library_files(root) if source is None else text_files(root)
    name = "stdlib" if source is None else re.sub(r"[^A-Za-z0-9_-]+", "_", source.stem) or "text"
    prefix = folder / f"{name}-{fingerprint(root, files)}"
    description = prefix.with_name(prefix.name + ".json")
    if description.exists():
        return Corpus(**json.loads(description.read_text()))
    documents = list(read_documents(files))
    if not documents:
        raise ValueError(f"DATA={root}: none of its {len(files)} files holds UTF-8 text")
    train, valid = hold_out(documents)
    tokens = [write_dataset(part, Path(f"{prefix}-{name}")) for part, name in ((train, "train"), (valid, "valid"))]
    corpus = Corpus(str(prefix), str(root.resolve()), len(documents), *tokens)
    description.write_text(json.dumps(asdict(corpus)) + "\n")
    return corpus


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("data"), help="folder of the datasets (default: data)")
    parser.add_argument("--input", type=Path, help="a text file or a folder (default: the Python standard library)")
    options = parser.parse_args()
    try:
        corpus = prepare(options.input, options.output)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(f"{corpus.prefix}: {corpus.tokens:,} tokens in {corpus.documents:,} documents of {corpus.source}")


if __name__ == "__main__":
    main()
