"""Recall of the probe against an explicit dense softmax."""

from __future__ import annotations

import pytest
import torch

from megatron_mtraining import Documents, Layout, MTrainingConfig, estimate_index
from megatron_mtraining.documents import segment_ends
from megatron_mtraining.ops import operators
from megatron_mtraining.recall import probe_recall, recall_steps
from megatron_mtraining.testing import lockstep

from .helpers import random_index, random_qkv

PACKED = Documents(768, (0, 2, 3, 8), (100, 64, 300, 200))


def explicit(q, k, index, last_q, segments=1):
    """Softmax of the probe rows over their documents, and the share of it under the mask of the index."""
    documents = index.documents
    mask = index.to_mask()
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)) * q.shape[-1] ** -0.5
    shares = []
    for start, length in zip(documents.starts, documents.lengths, strict=True):
        begin = start * 64
        ends = segment_ends(length, last_q, segments)
        rows = [row for end in ends for row in range(begin + max(0, end - last_q), begin + end)]
        kept = total = 0
        for row in rows:
            weights = scores[:, :, row, begin : row + 1].softmax(-1)
            kept = kept + (weights * mask[:, :, row, begin : row + 1]).sum(-1)
            total = total + 1
        shares.append(kept / total)
    return torch.stack(shares, -1)


@pytest.mark.parametrize(("last_q", "segments"), [(64, 1), (192, 1), (64, 3)])
@pytest.mark.parametrize("documents", [Documents.single(512), Documents.single(500), Documents.single(40), PACKED])
def test_recall_equals_that_of_an_explicit_softmax(documents, last_q, segments):
    q, k, _ = (x.detach() for x in random_qkv(documents.seq_len, batch=2, dim=16))
    index = random_index(documents.seq_len, 4, batch=2, slash=2, vertical=60, documents=documents)
    found = probe_recall(q, k, index, config=MTrainingConfig(last_q=last_q, probe_segments=segments))
    assert found.dtype == torch.float64
    assert 0 < float(found.min())
    torch.testing.assert_close(found, explicit(q, k, index, last_q, segments), rtol=1e-7, atol=1e-7)
    if documents.seq_len > 64:
        assert float(found.min()) < 0.9


@pytest.mark.parametrize("layout", [Layout.striped(768, 4), Layout.zigzag(768, 3), Layout.contiguous(768, 2)])
@pytest.mark.parametrize("documents", [Documents.single(768), PACKED])
def test_recall_has_the_same_bits_on_all_ranks_and_layouts(layout, documents):
    q, k, _ = (x.detach() for x in random_qkv(768, dim=16))
    index = random_index(768, 4, slash=2, vertical=60, documents=documents)
    alone = probe_recall(q, k, index)
    steps = [
        recall_steps(
            layout.shard(q, rank), layout.shard(k, rank), index, last_q=64, layout=layout, cp_rank=rank, scale=0.25,
            ops=operators("reference", q),
        )
        for rank in range(layout.cp_size)
    ]  # fmt: skip
    for found in lockstep(steps):
        assert torch.equal(found, alone)


def test_an_estimated_index_recalls_its_share():
    """Slash lines alone hold the share that was asked for; columns add to it. Every line: all of it."""
    q, k, _ = (x.detach() for x in random_qkv(1024, dim=16))
    config = MTrainingConfig(top_p=0.7)
    recall = probe_recall(q, k, estimate_index(q, k, config=config), config=config)
    assert 0.7 <= float(recall.min()) < 1
    everything = MTrainingConfig(top_p=1, max_vertical=None)
    assert bool((probe_recall(q, k, estimate_index(q, k, config=everything), config=everything) == 1).all())


def test_an_index_of_another_length_is_refused():
    q, k, _ = random_qkv(512, dim=16)
    with pytest.raises(ValueError, match="documents are for 1024 tokens: the sequence has 512"):
        probe_recall(q, k, random_index(1024, 4))
