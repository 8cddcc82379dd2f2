"""Row lists: the second index type, through the operators and the ring, against the dense oracle under their mask."""

import pytest
import torch

from megatron_mtraining import BlockListIndex, Documents, Layout, VerticalSlashIndex, mtraining_attention
from megatron_mtraining.metrics import pair_counts, work_table
from megatron_mtraining.ops import reference
from megatron_mtraining.testing import run_virtual

from .helpers import assert_close, oracle_results, random_index, random_qkv

SEQ = 1024
DOCUMENTS = Documents.from_cu_seqlens([0, 300, 301, 700], SEQ, [0, 320, 384, SEQ])


def random_lists(heads: int = 4, documents: Documents | None = None, share: float = 0.3) -> BlockListIndex:
    """Other blocks in every row and head; bits of the future and of other documents are set too: they mean nothing."""
    documents = documents or Documents.single(SEQ)
    bits = torch.rand(1, heads, documents.num_blocks, documents.num_blocks) < share
    return BlockListIndex.from_mask(bits, documents=documents)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize(("cp_size", "inner_size"), [(1, 1), (4, 4), (4, 2), (8, 4)])
@pytest.mark.parametrize("kind", ["striped", "zigzag", "contiguous"])
def test_ring_of_row_lists(kind: str, cp_size: int, inner_size: int, documents: Documents | None) -> None:
    index = random_lists(heads=2, documents=documents)
    q, k, v = random_qkv(SEQ, heads=2, kv_heads=1)
    layout = getattr(Layout, kind)(SEQ, cp_size)
    out, aux = run_virtual(q, k, v, layout=layout, inner_size=inner_size, index=index, return_aux=True)
    dout = torch.randn_like(out)
    results = [out, aux.lse, *torch.autograd.grad(out, (q, k, v), dout)]
    assert_close(results, oracle_results((q, k, v), index.to_mask(), dout), 1e-10)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
def test_lines_as_row_lists_are_the_same_attention(documents: Documents | None) -> None:
    lines = random_index(SEQ, 4, vertical=0, documents=documents)
    lists = BlockListIndex.from_lines(lines)
    assert torch.equal(lists.to_mask(), lines.to_mask())
    assert torch.equal(lists.pairs(), lines.pairs()) and float(lists.density()) == float(lines.density())
    q, k, v = random_qkv(SEQ)
    outs = [run_virtual(q, k, v, layout=Layout.striped(SEQ, 4), index=index) for index in (lines, lists)]
    assert torch.equal(*outs)


def test_all_bits_are_dense_attention_and_none_the_diagonal() -> None:
    q, k, v = random_qkv(512)
    documents = Documents.single(512)
    full = BlockListIndex.from_mask(torch.ones(1, 4, 8, 8, dtype=torch.bool), documents=documents)
    dense = VerticalSlashIndex.dense(1, 4, documents)
    assert torch.equal(mtraining_attention(q, k, v, index=full), mtraining_attention(q, k, v, index=dense))
    empty = BlockListIndex(torch.zeros(1, 4, 8, 1, dtype=torch.int64), tuple(range(8)), documents)
    diagonal = VerticalSlashIndex.from_lines([[[0]] * 4], [[[]] * 4], seq_len=512)
    assert torch.equal(mtraining_attention(q, k, v, index=empty), mtraining_attention(q, k, v, index=diagonal))


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize("kind", ["striped", "zigzag", "contiguous"])
def test_pair_counts_by_rank(kind: str, documents: Documents | None) -> None:
    index, layout = random_lists(documents=documents), getattr(Layout, kind)(SEQ, 4)
    bits, table = index.block_bits().sum((0, 1)), layout.block_position.long()
    blocks, columns = pair_counts(index, layout)
    for rank in range(4):
        assert blocks[rank].tolist() == [int(bits[table[rank]][:, table[other]].sum()) for other in range(4)]
    assert not columns.any() and float(work_table(index, layout, 2).sum()) == float(index.pairs().sum())
    lines = random_index(SEQ, 4, vertical=0, documents=documents)
    assert torch.equal(pair_counts(BlockListIndex.from_lines(lines), layout)[0], pair_counts(lines, layout)[0])
    with pytest.raises(ValueError, match="index has 4 rows: all 16 are needed"):
        pair_counts(index.local(layout, 1), layout)


def test_parts_of_ranks_make_the_whole() -> None:
    index, layout = random_lists(), Layout.striped(SEQ, 4, 128)
    parts = [index.local(layout, rank) for rank in range(4)]
    whole = BlockListIndex.of_ranks(parts)
    assert torch.equal(whole.slash_words, index.slash_words) and whole.row_blocks == index.row_blocks
    assert sum(int(part.pairs().sum()) for part in parts) == int(index.pairs().sum())
    assert parts[1].local(layout, 1) is parts[1]
    with pytest.raises(ValueError, match="rows of 4 blocks: it must have all rows, or those of rank 2"):
        parts[1].local(layout, 2)
    with pytest.raises(ValueError, match=r"to_mask\(\) of 4 rows"):
        parts[1].to_mask()


def test_columns_outside_the_row_lists() -> None:
    """The operators take columns beside row lists: a column is attended by the later rows that do not keep its block."""
    index, positions = random_lists(heads=2), [3, 70, 71, 500, 900]
    q, k, v = (x.detach() for x in random_qkv(SEQ, heads=2, kv_heads=1))
    columns = torch.tensor([[positions, positions]], dtype=torch.int32)
    compact = [x[:, positions].transpose(1, 2).expand(-1, 2, -1, -1).contiguous() for x in (k, v)]
    start, blocks = index.documents.doc_start, torch.arange(16, dtype=torch.int32)
    lines = (index.slash_words, start, blocks)
    out, lse = torch.empty_like(q), torch.empty(1, 2, SEQ, dtype=torch.float64)
    reference.attention_forward_(
        q, k[None], v[None], *lines, blocks[None], *compact, columns, 0.125, False, 0, None, out, lse
    )
    mask = index.to_mask()
    position = torch.arange(SEQ)
    earlier = (position[:, None] // 64) > (position[None, :] // 64)
    mask |= earlier & torch.isin(position, torch.tensor(positions))[None, :]
    dout = torch.randn_like(out)
    exact = oracle_results((q, k, v), mask, dout)
    assert_close([out, lse, *exact[2:]], exact, 1e-10)
    delta = reference.attention_delta(out, dout)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k)[None], torch.empty_like(v)[None]
    common = (0.125, False, True, 0)
    reference.attention_backward_(q, k[None], v[None], dout, lse, delta, *lines, blocks[None], *common, dq, dk, dv)
    grads = [torch.empty_like(x) for x in compact]
    reference.vertical_backward_(
        q, dout, lse, delta, *compact, columns, *lines, 0.125, True, True, 0, dq, grads[0], grads[1]
    )
    reference.scatter_columns_(grads[0], grads[1], columns, blocks[None], dk, dv)
    assert_close([out, lse, dq, dk[0], dv[0]], exact, 1e-10)


def test_wrong_words_are_refused_by_name() -> None:
    documents = Documents.single(SEQ)
    with pytest.raises(ValueError, match=r"must be int64 \[batch, heads, 16, 1\]"):
        BlockListIndex(torch.zeros(1, 4, 15, 1, dtype=torch.int64), tuple(range(16)), documents)
    with pytest.raises(ValueError, match="must be from 0 to 15"):
        BlockListIndex(torch.zeros(1, 4, 1, 1, dtype=torch.int64), (16,), documents)
    q, k, v = random_qkv(SEQ)
    with pytest.raises(ValueError, match="index is for"):
        mtraining_attention(q, k, v, index=random_lists(heads=2))
