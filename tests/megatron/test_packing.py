"""Packed sequences: documents do not see each other, on one rank and on several, whatever deals the batch."""

from __future__ import annotations

import contextlib
import types
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from megatron.core import parallel_state, utils
from megatron.core.datasets.utils import Split
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.enums import AttnMaskType

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.integration import MTrainingCoreAttention, RefusedError, set_up, tear_down
from megatron_mtraining.integration.packed_rotary import rotate_packed
from megatron_mtraining.integration.packing import packing_of, placed_by_document, read_packing
from megatron_mtraining.integration.sft_padding import pad_documents

from .conftest import make_config
from .ranks import run_ranks

REAL = (100, 250, 64, 300, 70)
PADDED = (128, 256, 64, 320, 256)
VOCAB = 96
DENSE = MTrainingConfig(top_p=1, max_vertical=None)
SPARSE = MTrainingConfig(top_p=0.8, sink_tokens=2)


def bounds(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def packed_params(real=REAL, padded=PADDED):
    lengths = [bounds(real), bounds(padded)]
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=lengths[0], cu_seqlens_kv=lengths[0],
        cu_seqlens_q_padded=lengths[1], cu_seqlens_kv_padded=lengths[1],
        max_seqlen_q=max(padded), max_seqlen_kv=max(padded),
    )  # fmt: skip


def documents():
    """Tokens of each document, one more than its length: the last is a label only."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB, (1, length + 1), generator=generator) for length in REAL]


def packed_batch():
    total = sum(PADDED)
    batch = {
        "tokens": torch.full((1, total), VOCAB - 1),
        "labels": torch.full((1, total), VOCAB - 1),
        "loss_mask": torch.zeros(1, total),
        "position_ids": torch.zeros(1, total, dtype=torch.int64),
    }
    for begin, tokens in zip(bounds(PADDED).tolist(), documents(), strict=False):
        part = slice(begin, begin + tokens.shape[1] - 1)
        batch["tokens"][:, part], batch["labels"][:, part] = tokens[:, :-1], tokens[:, 1:]
        batch["loss_mask"][:, part] = 1
        batch["position_ids"][:, part] = torch.arange(tokens.shape[1] - 1)
    return batch | {"cu_seqlens": bounds(REAL)[None], "cu_seqlens_padded": bounds(PADDED)[None]}


def build(cp_size, **changes):
    """The same weights whatever the split."""
    config = make_config(
        context_parallel_size=cp_size, init_method=lambda w: torch.nn.init.normal_(w, std=0.3), **changes
    )
    torch.manual_seed(1)
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), VOCAB, 1024, position_embedding_type="rope"
    )  # fmt: skip


def losses_and_gradients(model, batches):
    """``batches``: (batch, packed_seq_params); the sum of the losses of all of them, and its gradients."""
    total = torch.zeros(())
    for batch, packed in batches:
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=packed)
        total = total + (losses.float() * batch["loss_mask"]).sum()
    total.backward()
    group = parallel_state.get_context_parallel_group()
    found = {"loss": total.detach()} | {name: x.grad for name, x in model.named_parameters()}
    for x in found.values():
        torch.distributed.all_reduce(x, group=group)
    return found


def assert_same(ours, theirs, what):
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        error = float((ours[name] - x).norm() / x.norm())
        assert error <= 1e-5, f"{what}: {name} differs by {error:.1e}"


@contextlib.contextmanager
def megatron(cp_size, config, layout_mode="auto"):
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    set_up(config, make_config(context_parallel_size=cp_size), layout_mode)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        tear_down()


def without_cuda():
    torch.cuda.current_device = lambda: torch.device("cpu")
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    # What Transformer Engine would compute: every document in zigzag by itself.
    utils.tex = types.SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)


def partitioned_indices(cu_seqlens, total_tokens, cp_size, cp_rank):
    index = []
    for begin, end in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False):
        chunks = torch.arange(begin, end).chunk(2 * cp_size)
        index += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]]
    index = torch.cat(index)
    assert index.numel() == total_tokens // cp_size
    return index


def _alone(config):
    """Every document as a sequence of its own, without padding, on one rank."""
    with megatron(1, config):
        batches = [
            ({"tokens": x[:, :-1], "labels": x[:, 1:], "loss_mask": torch.ones(1, x.shape[1] - 1),
              "position_ids": torch.arange(x.shape[1] - 1)[None]}, None)
            for x in documents()
        ]  # fmt: skip
        return losses_and_gradients(build(1), batches)


def _packed(cp_size, config, layout_mode="auto"):
    with megatron(cp_size, config, layout_mode):
        group = parallel_state.get_context_parallel_group()
        batch = utils.get_batch_on_this_cp_rank(packed_batch(), is_hybrid_cp=False, cp_group=group)
        assert batch["tokens"].shape == (1, sum(PADDED) // cp_size)
        return losses_and_gradients(build(cp_size), [(batch, packed_params())])


def _documents_are_alone(_):
    """Forward and all gradients: each document alone = packed on 1, 2 and 4 ranks, dealt natively or by Megatron."""
    without_cuda()
    alone = _alone(DENSE)
    for cp_size in (1, 4):
        assert_same(_packed(cp_size, DENSE), alone, f"all lines, cp {cp_size}")
    alone = _alone(SPARSE)
    for cp_size in (1, 2, 4):
        assert_same(_packed(cp_size, SPARSE), alone, f"sparse, cp {cp_size}")
    for cp_size in (2, 4):
        assert_same(_packed(cp_size, SPARSE, "convert"), alone, f"sparse, cp {cp_size}, converted")
    assert_same(_packed(4, replace(SPARSE, layout="zigzag")), alone, "sparse, zigzag")


def _large_padding(rank):
    """Case F1: 698 real tokens in 768, the rest filled with 1e3; the same rows as of 698 tokens alone."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((768, 4, 16), (768, 2, 16), (768, 2, 16))
    whole = [torch.randn(shape, generator=generator) for shape in shapes]
    weight = torch.randn(768, 64, generator=generator)
    weight[698:] = 0
    for x in whole:
        x[698:] = 1e3
    mask = AttnMaskType.causal
    for cp_size in (2, 4):
        with megatron(cp_size, DENSE):
            core = MTrainingCoreAttention(make_config(context_parallel_size=cp_size), 1, mask, "self")
            layout = _runtime_layout(768, cp_size)
            place = parallel_state.get_context_parallel_rank()
            mine = [layout.shard(x, place, dim=0).clone().requires_grad_() for x in whole]
            params = packed_params((698,), (768,))
            kwargs = {"attn_mask_type": AttnMaskType.padding_causal, "packed_seq_params": params}
            out = core(*mine, None, **kwargs)
            again = core(*mine, None, **kwargs)
            assert torch.equal(out, again)
            (out * layout.shard(weight, place, dim=0)).sum().backward()
            real = [x[:698].clone().requires_grad_() for x in whole]
            dense = torch.nn.functional.scaled_dot_product_attention(
                *(x[None].transpose(1, 2) for x in real), is_causal=True, enable_gqa=True
            )
            dense = dense[0].transpose(0, 1).flatten(1)
            (dense * weight[:698]).sum().backward()
            rows = layout.token_position(place)
            kept = rows < 698
            torch.testing.assert_close(out[kept], dense[rows[kept]], rtol=1e-4, atol=1e-5)
            assert bool(out[kept].abs().sum(1).all())
            for ours, theirs in zip(mine, real, strict=True):
                torch.testing.assert_close(ours.grad[kept], theirs.grad[rows[kept]], rtol=1e-4, atol=1e-4)
                assert bool(torch.isfinite(ours.grad).all())


def _runtime_layout(seq_len, cp_size):
    from megatron_mtraining.integration import runtime

    layout = runtime.current().attention_layout(seq_len, cp_size)
    runtime.current().dealt["batch"].add(seq_len)
    return layout


def test_documents_over_ranks_equal_documents_alone(tmp_path):
    run_ranks([_documents_are_alone, _large_padding], 4, tmp_path)


def test_lengths_are_read_once_per_batch(monkeypatch):
    params = packed_params()
    first = packing_of(params, 1024)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda _: pytest.fail("a second read of the lengths"))
    assert packing_of(params, 1024) is first
    monkeypatch.undo()
    params.cu_seqlens_q[-1] -= 1  # written in place: read again
    assert packing_of(params, 1024).documents.lengths == (*REAL[:-1], REAL[-1] - 1)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ({"cu_seqlens_q": [[0, 1024]]}, r"packed_seq_params.cu_seqlens_q of shape \(1, 2\): must have one dimension"),
        ({}, "packed_seq_params.cu_seqlens_q None: must be given"),
        (
            {"cu_seqlens_q": [0, 1024], "cu_seqlens_kv": [0, 512, 1024]},
            "packed_seq_params.cu_seqlens_kv: other documents",
        ),
        (
            {"cu_seqlens_q": [0, 1024], "cu_seqlens_kv_padded": [0, 1024]},
            "packed_seq_params.cu_seqlens_kv_padded: other documents",
        ),
    ],
)
def test_lengths_of_another_attention_are_refused(lengths, expected):
    """Those of the keys would be ignored, without a word."""
    params = PackedSeqParams(qkv_format="thd", **{name: torch.tensor(x) for name, x in lengths.items()})
    with pytest.raises(RefusedError, match=f"^{expected}"):
        packing_of(params, 1024)


def test_equal_lengths_of_the_keys_may_be_another_tensor():
    q, kv = torch.tensor([0, 512, 1024]), torch.tensor([0, 512, 1024])
    packing = packing_of(PackedSeqParams(qkv_format="thd", cu_seqlens_q=q, cu_seqlens_kv=kv), 1024)
    assert packing.documents.starts == (0, 8)


def test_empty_documents_are_left_out_and_trailing_padding_is_a_document():
    packing = read_packing([0, 100, 200, 200], [0, 128, 256, 256], num_tokens=512)
    assert packing.documents.starts == (0, 2, 4)
    assert packing.documents.lengths == (100, 100, 256)
    assert packing.bounds == (0, 128, 256, 512)


@pytest.mark.parametrize(
    ("real", "padded", "expected"),
    [
        ([0, 100, 320], None, "begins at token 100, .*no multiple of 64.*cu_seqlens_padded"),
        ([0, 100], [0, 128, 320], "cu_seqlens_q has 2 entries, cu_seqlens_q_padded 3"),
        ([0, 200, 300], [0, 128, 320], "document of 200 tokens in 128 tokens"),
        ([0, 100, 172], [0, 128, 200], "documents end at 200, the sequence at 320"),
        ([0, 400], None, "documents end at 400, the sequence at 320"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(real, padded, expected):
    with pytest.raises(RefusedError, match=expected):
        read_packing(real, padded, num_tokens=320)


def test_lengths_that_megatron_cannot_deal_are_refused():
    with pytest.raises(RefusedError, match="document of 192 tokens .*on 5 .*multiple of 10"):
        placed_by_document((0, 128 + 192), 320, 5) and placed_by_document((0, 192, 320), 320, 5)


@pytest.mark.parametrize("cp_size", [2, 4])
def test_megatrons_places_are_those_of_transformer_engine(cp_size):
    cu_seqlens = bounds(PADDED)
    table = placed_by_document(tuple(cu_seqlens.tolist()), 1024, cp_size).in_units(1)
    for rank in range(cp_size):
        assert torch.equal(table[rank], partitioned_indices(cu_seqlens, 1024, cp_size, rank))


class OneRank:
    def size(self):
        return 1

    def rank(self):
        return 0


@pytest.mark.parametrize("angles_of", ["longest document", "whole sequence"])
def test_rotation_equals_megatrons_on_one_rank(plugin, angles_of):
    """Megatron counts from a document's start, or (with angles of the whole sequence) from that of the sequence."""
    original = rope_utils._apply_rotary_pos_emb_thd
    plugin()
    freqs = torch.randn(max(PADDED) if angles_of == "longest document" else 1024, 1, 1, 8)
    t = torch.randn(1024, 4, 16)
    expected = original(t, bounds(PADDED), freqs, cp_group=OneRank(), mscale=1.5)
    assert torch.equal(rotate_packed(t, bounds(PADDED), freqs, cp_group=OneRank(), mscale=1.5), expected)


class Conversations:
    """Stands in for a tokenizer and for the data of Megatron's ``SFTDataset``."""

    eod, pad = 1, 0
    unique_identifiers: ClassVar = {}

    def tokenize_conversation(self, conversation, return_target, add_generation_prompt):
        tokens = torch.arange(2, 2 + conversation[0]["length"])
        return tokens, tokens


@pytest.mark.parametrize("cp_size", [1, 2, 64])
@pytest.mark.parametrize("lengths", [(100, 30, 64), (100, 900), (1024,), (1025,), (900, 200)])
def test_megatrons_fine_tuning_data_are_padded_to_blocks(cp_size, lengths):
    """Conversations begin at multiples of 64 (and of what Megatron's layout needs); padding at the end is separate."""
    from megatron.training.datasets.sft_dataset import SFTDataset

    config = types.SimpleNamespace(
        tokenizer=Conversations(), sequence_length=1024, context_parallel_size=cp_size, reset_position_ids=False,
        create_attention_mask=False, reset_attention_mask=False, random_seed=1, split="1", split_matrix=None,
    )  # fmt: skip
    conversation = [[{"role": "system", "length": n} for n in lengths]]
    undo = pad_documents(cp_size)
    try:
        sample = SFTDataset(conversation, None, [0], 1, Split.train, config)[0]
    finally:
        for put_back in undo:
            put_back()
    assert config.context_parallel_size == cp_size
    granule = 64 if cp_size < 64 else 128
    ends = sample["cu_seqlens"][: int((sample["cu_seqlens"] < 1024).sum()) + 1]
    assert not (ends % granule).any()
    assert ends[-1] == 1024
    assert sample["max_seqlen"] == ends.diff().max()
    kept = [min(n, 1024) for n in lengths]
    starts = [
        0,
        *torch.tensor(kept).add(granule - 1).div(granule, rounding_mode="floor").mul(granule).cumsum(0).tolist(),
    ]
    assert ends.tolist() == sorted({min(x, 1024) for x in starts} | {1024})
    padding = 1024 - starts[-1]
    assert padding <= 0 or not sample["loss_mask"][-padding:].any()
