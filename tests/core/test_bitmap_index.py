import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mtraining import Documents, Layout, VerticalSlashIndex
from megatron_mtraining.bitmap import count_bits, pack_bits, unpack_bits
from megatron_mtraining.documents import ProbeTables, segment_ends
from megatron_mtraining.metrics import imbalance_step, imbalance_worker, pair_counts, work_table

from .helpers import random_index


@given(st.integers(1, 300), st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_words_hold_the_bits(length: int, seed: int) -> None:
    bits = torch.rand(2, 3, length, generator=torch.Generator().manual_seed(seed)) < 0.4
    words = pack_bits(bits)
    assert words.dtype == torch.int64 and words.shape[-1] == -(-length // 64)
    assert torch.equal(unpack_bits(words, length), bits)
    assert torch.equal(count_bits(words).sum(-1), bits.sum(-1))


def test_all_bits_of_a_word() -> None:
    words = pack_bits(torch.ones(64, dtype=torch.bool))
    assert words.tolist() == [-1] and count_bits(words).tolist() == [64]


def plain_mask(index: VerticalSlashIndex, slash: list[int], vertical: list[int], n: int) -> torch.Tensor:
    """The definitions, pair by pair, for one document."""
    mask = torch.zeros(n, n, dtype=torch.bool)
    for q in range(n):
        for k in range(q + 1):
            distance = q // 64 - k // 64
            on_line = distance in slash or distance == 0
            mask[q, k] = on_line or (distance > 0 and k in vertical)
    return mask


def test_mask_is_the_definition() -> None:
    slash, vertical = [[[2], []], [[0, 1], [3]]], [[[0, 70, 200], []], [[5], [64, 127]]]
    index = VerticalSlashIndex.from_lines(slash, vertical, seq_len=250)
    mask = index.to_mask()
    for b in range(2):
        for h in range(2):
            assert torch.equal(mask[b, h], plain_mask(index, slash[b][h], vertical[b][h], 250)), (b, h)


def test_mask_of_documents() -> None:
    documents = Documents.from_cu_seqlens([0, 100, 164], 256, [0, 128, 256])
    index = VerticalSlashIndex.from_lines([[[1]]], [[[0, 130]]], seq_len=256, documents=documents)
    mask = index.to_mask()[0, 0]
    assert not mask[128:, :128].any(), "a line crosses a document's start"
    assert mask[64:128, 0].all() and mask[192:, 130].all() and mask[192, 128]


@given(st.integers(1, 700), st.integers(0, 2**31), st.booleans())
@settings(max_examples=30, deadline=None)
def test_pairs_count_the_mask(seq_len: int, seed: int, packed: bool) -> None:
    import random

    random.seed(seed)
    documents = None
    if packed and seq_len > 192:
        documents = Documents.from_cu_seqlens([0, 100, 100 + seq_len - 128], seq_len, [0, 128, seq_len])
    index = random_index(seq_len, 3, batch=2, documents=documents)
    n = index.num_blocks
    padded = torch.zeros(2, 3, n * 64, n * 64, dtype=torch.bool)
    padded[..., :seq_len, :seq_len] = index.to_mask()
    blocks = padded.unflatten(-1, (n, 64)).unflatten(2, (n, 64))  # b h i q j k
    start = index.documents.doc_start
    on = torch.zeros(2, 3, n, n, dtype=torch.bool)
    bits = index.slash_bits()
    for i in range(n):
        for j in range(int(start[i]), i + 1):
            on[:, :, i, j] = bits[:, :, start[i] + i - j]
    assert torch.equal(index.block_pairs(), on.sum((-1, -2)))
    columns = (blocks.any(3) & ~on[..., None]).sum((-1, -2, -3))
    assert torch.equal(index.column_pairs(), columns)


def test_dense_density() -> None:
    index = VerticalSlashIndex.dense(2, 3, Documents.single(4096))
    assert index.density() == 1 + 64 / 4096
    assert int(index.block_pairs()[0, 0]) == 64 * 65 // 2


@pytest.mark.parametrize("seq_len", [256, 4096, 65536])
def test_full_budget_is_every_block(seq_len: int) -> None:  # D5
    n = seq_len // 64
    index = VerticalSlashIndex.from_lines([[list(range(n))]], [[[]]], seq_len=seq_len)
    assert int(index.block_pairs()) == n * (n + 1) // 2


def test_from_lines_refuses_what_is_outside() -> None:
    with pytest.raises(ValueError, match="from 0 to 3"):
        VerticalSlashIndex.from_lines([[[4]]], [[[]]], seq_len=256)
    with pytest.raises(ValueError, match="from 0 to 255"):
        VerticalSlashIndex.from_lines([[[0]]], [[[256]]], seq_len=256)
    with pytest.raises(ValueError, match="same shape"):
        VerticalSlashIndex.from_lines([[[0]]], [[[1], [2]]], seq_len=256)


def test_documents_refusals() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        Documents.from_cu_seqlens([0, 100, 256], 256)
    with pytest.raises(ValueError, match="padded length"):
        Documents.from_cu_seqlens([0, 130, 200], 256, [0, 128, 256])
    with pytest.raises(ValueError, match="end at 128"):
        Documents.from_cu_seqlens([0, 128], 256)
    with pytest.raises(ValueError, match="begin with 0"):
        Documents.from_cu_seqlens([1, 128], 128)


@pytest.mark.parametrize("last_q", [64, 128, 192])
@pytest.mark.parametrize("length", [1, 40, 64, 65, 127, 300, 512])
def test_probe_rows_are_the_last_real_rows(last_q: int, length: int) -> None:
    documents = Documents.from_cu_seqlens([0, 64, 64 + length], 640, [0, 64, 640])
    tables = ProbeTables.make(documents, last_q)
    first, last = tables.block_probes[5].tolist()
    rows = [
        int(tables.blocks[t]) * 64 + row - 64
        for t in range(first, last)
        for row in range(int(tables.rows[t, 0]), int(tables.rows[t, 1]))
    ]
    assert rows == list(range(max(0, length - last_q), length))


@pytest.mark.parametrize(
    ("length", "last_q", "segments", "ends"),
    [
        (640, 64, 1, [640]),
        (640, 64, 4, [640, 448, 320, 128]),
        (300, 64, 4, [300, 192, 128, 64]),
        (300, 64, 64, [300, 192, 128, 64]),
        (300, 192, 2, [300]),
        (40, 64, 8, [40]),
    ],
)
def test_segments_end_at_equal_parts(length: int, last_q: int, segments: int, ends: list[int]) -> None:
    assert segment_ends(length, last_q, segments) == ends
    tables = ProbeTables.make(Documents.from_cu_seqlens([0, 64, 64 + length], 1024, [0, 64, 1024]), last_q, segments)
    for number, end in enumerate(ends):
        some = tables.only(tables.segments == number)
        first, last = some.block_probes[5].tolist()
        rows = [
            int(some.blocks[t]) * 64 + row - 64
            for t in range(first, last)
            for row in range(int(some.rows[t, 0]), int(some.rows[t, 1]))
        ]
        assert rows == list(range(max(0, end - last_q), end))
        assert some.block_probes[0].tolist() == ([0, 1] if number == 0 else [0, 0])  # one block, one segment


def test_work_is_counted_where_it_is_done() -> None:
    index = random_index(1024, 2, slash=4)
    mask = index.to_mask()[0]
    for layout in (Layout.striped(1024, 4), Layout.zigzag(1024, 4)):
        blocks, columns = pair_counts(index, layout)
        assert int(blocks.sum()) == int(index.block_pairs().sum())
        assert int(columns.sum()) == int(index.column_pairs().sum())
        for r in range(4):
            for s in range(4):
                part = mask[:, layout.token_position(r)][:, :, layout.token_position(s)]
                touched = part.unflatten(1, (-1, 64)).unflatten(3, (-1, 64)).any(2)  # h i j k
                on = touched.all(-1)
                assert int(blocks[r, s]) == int(on.sum())
                assert int(columns[r, s]) == int((touched & ~on[..., None]).sum())
        for inner in (1, 2, 4):
            work = work_table(index, layout, inner)
            assert work.shape == (4, 4) and int(work.sum()) == int(index.pairs().sum())


def test_imbalance_degrees() -> None:
    work = torch.tensor([[1.0, 3.0], [3.0, 1.0]])
    assert imbalance_worker(work) == 1.0 and imbalance_step(work) == 1.5
    dense = VerticalSlashIndex.dense(1, 1, Documents.single(8192))
    striped, zigzag = work_table(dense, Layout.striped(8192, 4)), work_table(dense, Layout.contiguous(8192, 4))
    assert imbalance_worker(striped) < 1.03 < 1.7 < imbalance_worker(zigzag)


def test_documents_are_checked_when_made_directly() -> None:
    for starts, lengths in (((0, 2), (200, 128)), ((0, 2), (100,)), ((1,), (100,)), ((0, 0), (10, 10)), ((), ())):
        with pytest.raises(ValueError, match="document"):
            Documents(256, starts, lengths)


def test_index_is_checked_when_made_directly() -> None:
    documents = Documents.single(256)
    words, columns = torch.zeros(1, 2, 1, dtype=torch.int64), torch.zeros(1, 2, 4, dtype=torch.int64)
    for slash, column, message in (
        (words.int(), columns, "slash_words are torch.int32"),
        (words, columns[..., :3], "column_words are"),
        (words[:, :1], columns, "must be equal"),
    ):
        with pytest.raises(ValueError, match=message):
            VerticalSlashIndex(slash, column, documents, 0)
    kept = VerticalSlashIndex(words, columns, documents, 0).keeping_diagonal()
    assert kept.slash_bits()[..., 0].all() and int(kept.slash_bits().sum()) == 2
    for slash, vertical in (([], []), ([[]], [[]])):
        with pytest.raises(ValueError, match="at least one"):
            VerticalSlashIndex.from_lines(slash, vertical, seq_len=256)
    with pytest.raises(ValueError, match="documents are for 256"):
        VerticalSlashIndex.from_lines([[[0]]], [[[0]]], seq_len=512, documents=documents)


def test_pair_counts_of_documents() -> None:
    documents = Documents.from_cu_seqlens([0, 300, 700], 1024, [0, 320, 1024])
    index = random_index(1024, 3, documents=documents)
    blocks, columns = pair_counts(index, Layout.striped(1024, 4))
    assert int(blocks.sum()) == int(index.block_pairs().sum())
    assert int(columns.sum()) == int(index.column_pairs().sum())
