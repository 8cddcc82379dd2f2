"""Dealing the batch and the rotary embedding: every rank gets the tokens, labels and angles of its own positions."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import megatron.core
import megatron.training
import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from megatron_mtraining import Layout, MTrainingConfig
from megatron_mtraining.integration import RefusedError, deal_batch, runtime, sharding
from megatron_mtraining.integration.layout_mode import LayoutMode
from megatron_mtraining.integration.rebind import rebind

KNOWN_IMPORTERS = {
    "get_batch_on_this_cp_rank": {
        "training/training.py",
        "core/models/multimodal/llava_model.py",  # inside a function, when it is called; vision models convert
        "core/models/mimo/partition/utils.py",
    },
    "get_pos_emb_on_this_cp_rank": {
        "core/models/common/embeddings/rotary_pos_embedding.py",
        "core/models/common/embeddings/yarn_rotary_pos_embedding.py",
    },
    "_apply_rotary_pos_emb_thd": {"core/models/common/embeddings/rotary_pos_embedding.py"},  # not used there
}


class RankOf:
    """Stands in for a context-parallel group: only its size and rank are asked for."""

    def __init__(self, rank, size):
        self.place = (rank, size)

    def rank(self):
        return self.place[0]

    def size(self):
        return self.place[1]


@pytest.fixture(params=["striped", "striped128", "contiguous"])
def native(request):
    """A runtime that deals natively in one of the layouts."""
    stripe = 128 if request.param == "striped128" else 64
    config = MTrainingConfig(layout=request.param.removesuffix("128"), stripe_size=stripe)
    runtime.use(runtime.Runtime(config, LayoutMode("native", "test", replaces_slicing=True)))
    yield runtime.current()
    runtime.use(None)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_labels_and_positions_follow_the_tokens(native, cp_size):
    """Case G2: the main label at p is p + 1, at the ends of stripes too."""
    position = torch.arange(4096)[None]
    whole = {"tokens": position, "labels": position + 1, "loss_mask": (position % 3).float(), "position_ids": position}
    parts = [deal_batch(dict(whole), cp_group=RankOf(rank, cp_size)) for rank in range(cp_size)]
    for part in parts:
        assert {key: value.shape for key, value in part.items()} == dict.fromkeys(whole, (1, 4096 // cp_size))
        assert torch.equal(part["labels"], part["tokens"] + 1)
        assert torch.equal(part["position_ids"], part["tokens"])
    layout = native.attention_layout(4096, cp_size)
    for key, value in whole.items():
        assert torch.equal(layout.unshard([part[key] for part in parts]), value)


@pytest.mark.parametrize("valid", [2, 38, 63, 64, 65])
def test_samples_shorter_than_a_stripe(native, valid):
    """Case F2: few valid tokens, the rest is zero padding; every rank has equal shapes."""
    seq_len, cp_size = (512 if native.config.stripe_size == 128 else 256), 4
    tokens = torch.zeros(2, seq_len, dtype=torch.int64)
    tokens[:, :valid] = torch.arange(1, valid + 1)
    whole = {"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": (tokens > 0).float(), "position_ids": tokens}
    parts = [deal_batch(dict(whole), cp_group=RankOf(rank, cp_size)) for rank in range(cp_size)]
    layout = native.attention_layout(seq_len, cp_size)
    for key, value in whole.items():
        assert {part[key].shape for part in parts} == {(2, seq_len // cp_size)}
        assert torch.equal(layout.unshard([part[key] for part in parts]), value)


def test_entries_without_a_sequence_pass(native):
    batch = {"tokens": torch.zeros(1, 512), "attention_mask": None, "cu_seqlens": None, "max_seqlen": None,
             "dataset_id": torch.zeros(1)}  # fmt: skip
    part = deal_batch(batch, is_hybrid_cp=False, cp_group=RankOf(1, 2), hybrid_cp_group_func=None)
    assert part["tokens"].shape == (1, 256)
    assert part["dataset_id"].shape == (1,)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attention_mask": torch.ones(1, 1, 512, 512)}, "attention_mask.*--no-create-attention-mask-in-dataloader"),
    ],
)
def test_batches_that_cannot_be_dealt_are_refused(native, changes, expected):
    with pytest.raises(RefusedError, match=expected):
        deal_batch({"tokens": torch.zeros(1, 512)} | changes, cp_group=RankOf(0, 2))


def test_groups_that_change_from_batch_to_batch_are_refused(native):
    with pytest.raises(RefusedError, match="--hybrid-context-parallel"):
        deal_batch({"tokens": torch.zeros(1, 512)}, is_hybrid_cp=True, cp_group=RankOf(0, 2))


def test_a_length_that_does_not_fit_names_the_nearest(native):
    with pytest.raises(RefusedError, match=r"seq_len=100.*nearest"):
        deal_batch({"tokens": torch.zeros(1, 100)}, cp_group=RankOf(0, 4))


ROTARY = {
    "plain": lambda: RotaryEmbedding(32, 1.0, use_cpu_initialization=True, cp_group=RankOf(0, 1)),
    "interpolated": lambda: RotaryEmbedding(
        32, 0.5, seq_len_interpolation_factor=4.0, use_cpu_initialization=True, cp_group=RankOf(0, 1)
    ),
    "llama3": lambda: RotaryEmbedding(32, 1.0, rope_scaling=True, use_cpu_initialization=True, cp_group=RankOf(0, 1)),
    "yarn": lambda: YarnRotaryEmbedding(
        32, scaling_factor=4.0, original_max_position_embeddings=512, use_cpu_initialization=True,
        cp_group=RankOf(0, 1),
    ),
}  # fmt: skip


def angles(embedding, length, **options):
    """What the model would use: the angles (and for YaRN their scale)."""
    result = embedding(length, **options)
    return result if isinstance(result, tuple) else (result, 1.0)


@pytest.mark.usefixtures("on_cpu", "native")
@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("cp_size", [2, 4])
def test_angles_are_those_of_the_ranks_own_positions(kind, cp_size):
    state = runtime.current()
    embedding = ROTARY[kind]()
    whole, scale = angles(embedding, 1024)
    bindings = sharding.deal_natively()
    try:
        for rank in range(cp_size):
            mine, its_scale = angles(embedding, 1024, cp_group=RankOf(rank, cp_size))
            assert its_scale == scale
            assert torch.equal(mine, whole[state.attention_layout(1024, cp_size).token_position(rank)])
    finally:
        for binding in bindings:
            binding.undo()
    assert state.dealt["rotary"] == {1024}


@pytest.mark.usefixtures("on_cpu", "native")
@pytest.mark.parametrize("kind", ["plain", "yarn"])
def test_cached_slices_are_dropped_when_the_layout_changes(kind, monkeypatch):
    """Both ``forward`` methods are cached: what was sliced in zigzag must not be used after the change, nor before."""
    embedding, group = ROTARY[kind](), RankOf(1, 2)
    monkeypatch.setattr(torch, "tensor", _unpinned(torch.tensor))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, **_: self)
    zigzag, _ = angles(embedding, 1024, cp_group=group)
    bindings = sharding.deal_natively()
    dealt, _ = angles(embedding, 1024, cp_group=group)
    for binding in bindings:
        binding.undo()
    sharding.drop_cached_rotary()
    whole, _ = angles(embedding, 1024)
    assert torch.equal(zigzag, whole[Layout.zigzag(1024, 2).token_position(1)])
    assert torch.equal(dealt, whole[runtime.current().attention_layout(1024, 2).token_position(1)])
    assert torch.equal(angles(embedding, 1024, cp_group=group)[0], zigzag)


def _unpinned(make):
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


@pytest.mark.parametrize("name", KNOWN_IMPORTERS)
def test_every_importer_in_the_installed_megatron_is_known(name):
    """A new Megatron that slices in another module must be looked at before it is used."""
    found = set()
    for package in (megatron.core, megatron.training):
        root = Path(package.__path__[0])
        for path in root.rglob("*.py"):
            source = path.read_text()
            if name in source and any(
                isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}
                for node in ast.walk(ast.parse(source))
            ):
                found.add(f"{root.name}/{path.relative_to(root)}")
    assert found == KNOWN_IMPORTERS[name]


def test_every_zigzag_slicer_in_the_installed_megatron_is_known():
    """Files that compute the second chunk of a zigzag rank themselves."""
    pattern = re.compile(r"2 \* \w*cp_size\w* - \w*cp_rank\w* - 1")
    root = Path(megatron.core.__path__[0])
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if pattern.search(path.read_text())}
    assert {"utils.py", "models/common/embeddings/rope_utils.py"} <= found
    assert found <= {
        "utils.py",  # the batch slicer: replaced
        "models/common/embeddings/rope_utils.py",  # the rotary slicer and that of packed sequences: replaced
        "fusions/fused_mla_yarn_rope_apply.py",  # fused rotary embedding of latent attention: converts
        "transformer/experimental_attention_variant/dsa_layout.py",  # the variant is refused
        "transformer/multi_token_prediction.py",  # from 0.20; multi-token prediction makes attention convert
    }


def test_rebinding_reaches_the_running_script_and_is_undone(monkeypatch):
    from megatron.core import utils
    from megatron.training import training

    import __main__

    original = utils.get_batch_on_this_cp_rank
    monkeypatch.setattr(__main__, "sliced_by", original, raising=False)
    binding = rebind(*sharding.BATCH_SLICER, deal_batch)
    places = {utils.get_batch_on_this_cp_rank, training.get_batch_on_this_cp_rank, __main__.sliced_by}
    assert places == {binding.replacement}
    assert __main__.sliced_by({}, False, cp_group=RankOf(0, 1)) == {}
    binding.undo()
    assert {utils.get_batch_on_this_cp_rank, training.get_batch_on_this_cp_rank, __main__.sliced_by} == {original}
