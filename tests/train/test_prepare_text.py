"""Text becomes Megatron's indexed dataset: bytes, documents, and one clear line for what is no text."""

from pathlib import Path

import numpy as np
import prepare_text
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_tokens_are_bytes_and_documents_end(tmp_path: Path) -> None:
    source = write(tmp_path / "text", {"b/two.txt": "é\n".encode(), "a.txt": b"hi"})
    corpus = prepare_text.prepare(source, tmp_path / "data")
    dataset = IndexedDataset(corpus.prefix + "-train")
    assert [list(document) for document in dataset] == [[104, 105, 256], [0xC3, 0xA9, 10, 256]]
    assert (corpus.documents, corpus.train_tokens, corpus.valid_tokens) == (2, 7, 0)
    assert dataset[0].dtype == np.uint16


def test_what_is_no_text_is_passed_over(tmp_path: Path) -> None:
    files = {"a.bin": b"\0\1", "latin.txt": b"\xe9\xff", "empty.txt": b"", ".git/x": b"hidden", "good.txt": b"good"}
    corpus = prepare_text.prepare(write(tmp_path / "text", files), tmp_path / "data")
    assert (corpus.documents, corpus.tokens) == (1, 5)


def test_one_document_of_fifty_is_kept_for_validation(tmp_path: Path) -> None:
    source = write(tmp_path / "text", {f"{number:03}.txt": b"%03d" % number for number in range(120)})
    corpus = prepare_text.prepare(source, tmp_path / "data")
    train, valid = (IndexedDataset(f"{corpus.prefix}-{part}") for part in ("train", "valid"))
    assert [bytes(document[:-1].astype(np.uint8)) for document in valid] == [b"049", b"099"]
    assert (len(train), corpus.train_tokens, corpus.valid_tokens) == (118, 118 * 4, 2 * 4)


def test_the_end_of_few_documents_is_kept_for_validation(tmp_path: Path) -> None:
    """One document alone must train and validate: both parts are there and together are the whole."""
    content = bytes(range(32, 127)) * 3
    corpus = prepare_text.prepare(write(tmp_path / "text", {"a.txt": content}), tmp_path / "data")
    datasets = [IndexedDataset(f"{corpus.prefix}-{part}") for part in ("train", "valid")]
    train, valid = (dataset[0] for dataset in datasets)  # views: their datasets must live
    assert bytes(np.concatenate([train[:-1], valid[:-1]]).astype(np.uint8)) == content
    assert len(valid) - 1 == len(content) // 50


def test_a_single_file(tmp_path: Path) -> None:
    source = write(tmp_path / "text", {"a.txt": b"abc"}) / "a.txt"
    assert prepare_text.prepare(source, tmp_path / "data").tokens == 4


def test_second_run_writes_nothing_and_changed_text_makes_a_new_dataset(tmp_path: Path) -> None:
    source = write(tmp_path / "text", {"a.txt": b"abc"})
    first = prepare_text.prepare(source, tmp_path / "data")
    written = Path(first.prefix + "-train.bin").stat().st_mtime_ns
    assert prepare_text.prepare(source, tmp_path / "data") == first
    assert Path(first.prefix + "-train.bin").stat().st_mtime_ns == written
    write(source, {"a.txt": b"abcd"})
    second = prepare_text.prepare(source, tmp_path / "data")
    assert second.prefix != first.prefix
    assert second.tokens == 5


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "no such file or folder"),
        ({}, "the folder holds no file"),
        ({"a.bin": b"\0"}, "none of its 1 files holds UTF-8 text"),
    ],
)
def test_no_text_is_one_line(tmp_path: Path, files: dict[str, bytes] | None, message: str) -> None:
    source = tmp_path / "text"
    if files is not None:
        source.mkdir()
        write(source, files)
    with pytest.raises(ValueError, match=message) as raised:
        prepare_text.prepare(source, tmp_path / "data")
    assert str(source) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.glob("data/*.bin"))


def test_a_device_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="DATA=/dev/null: neither a file nor a folder"):
        prepare_text.prepare(Path("/dev/null"), tmp_path)


def test_standard_library_is_real_text_without_packages() -> None:
    import sysconfig

    files = prepare_text.standard_library_files(Path(sysconfig.get_paths()["stdlib"]))
    assert any(path.name == "argparse.py" for path in files)
    assert not any("site-packages" in path.parts for path in files)
    assert sum(path.stat().st_size for path in files) > 10_000_000
