"""Long English text from Debian's packages as token ids: books and manuals, read in order, the end of each held out.

    python -m benchmarks.proof.corpus --packages FOLDER --gguf MODEL.gguf --output data/proof

FOLDER holds the unpacked packages of :data:`BOOKS` (``apt-get download NAME; dpkg -x NAME*.deb FOLDER``). Writes
``train.bin`` and ``valid.bin`` (uint16 token ids) and ``corpus.json``, what they were made of.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import lzma
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HELD_OUT = 25  # one token of this many, at the end of each book, is for validation
MIN_TOKENS = 20_000  # shorter books are left out: the study is about long sequences
END_OF_TEXT = 0  # <|endoftext|> of SmolLM2


@dataclass(frozen=True)
class Source:
    """Files of one package that make one book, or one book per folder below ``root``.

    Attributes:
        package: Debian package.
        root: folder below the unpacked packages.
        pattern: glob of the files, read in the order of their names.
        by_folder: whether each folder below ``root`` is a book of its own.
        max_tokens: cut of a book.
    """

    package: str
    root: str
    pattern: str
    by_folder: bool = False
    max_tokens: int = 400_000


BOOKS = (
    Source("anarchism", "usr/share/doc/anarchism/html", "sec*.html", max_tokens=2_000_000),
    Source("debian-handbook", "usr/share/doc/debian-handbook/html/en-US", "*.html"),
    Source("debian-reference-en", "usr/share/debian-reference", "debian-reference.en.txt.gz"),
    Source("git-doc", "usr/share/doc/git-doc", "*.txt"),
    Source("jargon-text", "usr/share/doc/jargon-text", "jargon.txt.gz"),
    Source("linux-doc-6.1", "usr/share/doc/linux-doc-6.1/Documentation", "**/*.rst.gz", by_folder=True),
    Source("perl-doc", "usr/share/perl", "**/*.pod", max_tokens=900_000),
    Source("postgresql-doc-15", "usr/share/doc/postgresql-doc-15/html", "*.html", max_tokens=900_000),
    Source("python3.11-doc", "usr/share/doc/python3.11/html/_sources", "**/*.rst.txt", by_folder=True),
)
SKIPPED = frozenset({"translations", "devicetree"})

_INVISIBLE = re.compile(r"<(script|style|head)\b.*?</\1>", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"<[^>]+>")
_BLANK = re.compile(r"[ \t]+\n|\n{3,}")


def plain_text(path: Path) -> str:
    """The text of a file; gzip is unpacked, HTML stripped of its tags."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = raw.decode("utf-8", errors="replace")
    if ".html" in path.suffixes:
        text = html.unescape(_TAG.sub("", _INVISIBLE.sub("", text)))
    return _BLANK.sub(lambda found: "\n\n" if found.group().startswith("\n") else "\n", text).strip()


def read_books(folder: Path, sources: tuple[Source, ...] = BOOKS) -> dict[str, tuple[list[str], int]]:
    """The texts of each book in order and its cut in tokens, by name.

    Raises:
        ValueError: a source has no files; names the package.
    """
    books: dict[str, tuple[list[str], int]] = {}
    for source in sources:
        root = folder / source.root
        files = [p for p in sorted(root.glob(source.pattern)) if p.is_file() and SKIPPED.isdisjoint(p.parts)]
        if not files:
            raise ValueError(f"{root}: no {source.pattern}; unpack the package {source.package} there")
        for path in files:
            part = path.relative_to(root).parts[0] if source.by_folder and path.parent != root else ""
            name = f"{source.package}/{part}".rstrip("/")
            books.setdefault(name, ([], source.max_tokens))[0].append(plain_text(path))
    return books


def split(books: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation streams, uint16: the last part of each book is held out; books end with END_OF_TEXT."""
    end = np.array([END_OF_TEXT], dtype=np.uint16)
    train, valid = [], []
    for ids in books.values():
        cut = len(ids) - len(ids) // HELD_OUT
        train += [ids[:cut], end]
        valid += [ids[cut:], end]
    return np.concatenate(train), np.concatenate(valid)


def read_ids(folder: Path, name: str) -> np.ndarray:
    """uint16 token ids of ``name``.bin, or of the same file packed as ``name``.bin.xz."""
    path = folder / f"{name}.bin"
    if path.exists():
        return np.fromfile(path, dtype=np.uint16)
    return np.frombuffer(lzma.decompress(path.with_suffix(".bin.xz").read_bytes()), dtype=np.uint16)


def tokenize(books: dict[str, tuple[list[str], int]], tokenizer: Any) -> dict[str, np.ndarray]:
    """Token ids of each book that is long enough, uint16."""
    encoded = {}
    for name, (texts, limit) in books.items():
        parts = tokenizer(["\n\n".join([text, ""]) for text in texts], add_special_tokens=False)["input_ids"]
        ids = np.concatenate([np.asarray(part, dtype=np.uint16) for part in parts if part])[:limit]
        if len(ids) >= MIN_TOKENS:
            encoded[name] = ids
    return encoded


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="folder with the unpacked packages")
    parser.add_argument("--gguf", type=Path, required=True, help="the model, for its tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    options = parser.parse_args()

    from transformers import AutoTokenizer

    from benchmarks.proof.tasks import Phrases

    tokenizer = AutoTokenizer.from_pretrained(options.gguf.parent, gguf_file=options.gguf.name)
    books = tokenize(read_books(options.packages), tokenizer)
    train, valid = split(books)
    options.output.mkdir(parents=True, exist_ok=True)
    train.tofile(options.output / "train.bin")
    valid.tofile(options.output / "valid.bin")
    Phrases.from_tokenizer(tokenizer).save(options.output / "phrases.json")
    summary = {
        "books": {name: len(ids) for name, ids in books.items()},
        "train_tokens": len(train),
        "valid_tokens": len(valid),
    }
    (options.output / "corpus.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
