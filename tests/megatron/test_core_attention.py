"""The core attention module against Megatron's contract and against dense attention, on one rank."""

from __future__ import annotations

import inspect

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_mtraining import MTrainingConfig, mtraining_attention
from megatron_mtraining.config import BLOCK
from megatron_mtraining.integration import MTrainingCoreAttention, RefusedError
from megatron_mtraining.integration.layer_plan import LayerPlan
from megatron_mtraining.metrics import Recorder
from megatron_mtraining.recall import probe_recall

from .conftest import make_config


def core(layer_number=1, **options):
    return MTrainingCoreAttention(make_config(), layer_number, AttnMaskType.causal, "self", **options)


def qkv(seq=256, batch=2, heads=4, kv_heads=2, dim=16):
    """Views of one fused projection, as Megatron makes them: v is strided."""
    fused = torch.randn(seq, batch, kv_heads, (heads // kv_heads + 2) * dim)
    q, k, v = fused.split([heads // kv_heads * dim, dim, dim], dim=3)
    return [x.requires_grad_() for x in (q.reshape(seq, batch, heads, dim).detach(), k.detach(), v.detach())]


def parameters(function):
    return {name: value.default for name, value in inspect.signature(function).parameters.items() if name != "self"}


def megatron_cores():
    cores = [DotProductAttention]
    if HAVE_TE:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        cores.append(TEDotProductAttention)
    return cores


@pytest.mark.parametrize("other", megatron_cores(), ids=lambda module: module.__name__)
@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_every_argument_of_megatrons_own_modules_is_taken(other, method):
    """Case M5: the same names, and defaults wherever theirs have one."""
    theirs, ours = parameters(getattr(other, method)), parameters(getattr(MTrainingCoreAttention, method))
    assert theirs.keys() <= ours.keys()
    for name, default in theirs.items():
        assert default is inspect.Parameter.empty or ours[name] is not inspect.Parameter.empty, name


def test_the_builder_protocol_is_satisfied():
    from megatron.core.transformer.attention import CoreAttentionBuilder, CoreAttentionInterface

    assert parameters(CoreAttentionBuilder.__call__).keys() <= parameters(MTrainingCoreAttention.__init__).keys()
    assert parameters(CoreAttentionInterface.forward).keys() <= parameters(MTrainingCoreAttention.forward).keys()


@pytest.mark.usefixtures("one_rank", "on_cpu")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_all_lines_equal_megatrons_dense_attention(plugin, kv_heads):
    plugin()
    config = make_config(num_query_groups=kv_heads)
    q, k, v = qkv(kv_heads=kv_heads)
    mask = torch.ones(256, 256, dtype=torch.bool).triu(1)[None, None]
    dense = DotProductAttention(config, 1, AttnMaskType.causal, "self")(q, k, v, mask)
    expected = torch.autograd.grad(dense.square().sum(), (q, k, v))
    ours = MTrainingCoreAttention(config, 1, AttnMaskType.causal, "self")(q, k, v, None, attn_mask_type=None)
    assert ours.shape == dense.shape == (256, 2, 64)
    torch.testing.assert_close(ours, dense, rtol=1e-5, atol=1e-6)
    for gradient, wanted in zip(torch.autograd.grad(ours.square().sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("one_rank", "on_cpu")
@pytest.mark.parametrize(
    "changes",
    [
        {"apply_query_key_layer_scaling": True},
        {"attention_output_gate": True},
        {"softmax_scale": 0.7},
        {"use_mup": True, "mup_base_hidden_size": 32, "mup_width_mult": 2.0},
        {"qk_l2_norm": True},
        {"no_rope_freq": [1, 0]},
        {"kv_channels": 24},
        {"attention_softmax_in_fp32": False, "rotary_interleaved": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_options_around_attention_have_megatrons_result(plugin, changes):
    """Those that change the logits or the output without being refused: loss and gradients are those of Megatron's core."""
    config = make_config(**changes)

    def build():
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_l2_norm=config.qk_l2_norm)
        return GPTModel(config, spec, vocab_size=128, max_sequence_length=256, position_embedding_type="rope")

    dense = build()
    plugin(model=config)
    sparse = build()
    sparse.load_state_dict(dense.state_dict())
    tokens = torch.randint(0, 128, (1, 256))
    mask = torch.ones(256, 256, dtype=torch.bool).triu(1)[None, None]
    for model, given in ((dense, mask), (sparse, None)):
        model(tokens, torch.arange(256)[None], given, labels=tokens.roll(-1, 1)).mean().backward()
    for (name, wanted), ours in zip(dense.named_parameters(), sparse.parameters(), strict=True):
        error = (ours.grad - wanted.grad).norm() / wanted.grad.norm()
        assert error < 1e-4, f"{name} differs by {error:.1e}"


@pytest.mark.usefixtures("one_rank")
def test_softmax_scale_is_used(plugin):
    plugin()
    q, k, v = qkv()
    ours = core(softmax_scale=0.5)(q, k, v, None)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True, scale=0.5, enable_gqa=True
    )
    torch.testing.assert_close(ours, dense.permute(2, 0, 1, 3).flatten(2), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_each_sample_of_a_batch_is_its_own(plugin):
    """Case D1: the index has a batch dimension."""
    plugin(MTrainingConfig(top_p=0.5))
    q, k, v = qkv(batch=2)
    both = core()(q, k, v, None)
    swapped = core()(*(x.flip(1) for x in (q, k, v)), None)
    assert torch.equal(both, swapped.flip(1))
    for sample in (0, 1):
        alone = core()(*(x[:, sample : sample + 1] for x in (q, k, v)), None)
        torch.testing.assert_close(both[:, sample : sample + 1], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("one_rank")
def test_it_holds_no_state(plugin):
    """Case L1: dense checkpoints load, those with Transformer Engine's extra state too."""
    plugin()
    module = core()
    assert not module.state_dict()
    assert not list(module.parameters())
    assert not module.sharded_state_dict(metadata={"dp_cp_group": None})
    module.load_state_dict({"_extra_state": torch.zeros(3)}, strict=True)


@pytest.mark.usefixtures("one_rank", "on_cpu")
def test_checkpoints_pass_between_dense_and_sparse_models(plugin):
    """Case L1: the same keys both ways, and the same first loss when every line is selected."""

    def build():
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        return GPTModel(make_config(), spec, vocab_size=128, max_sequence_length=256, position_embedding_type="rope")

    dense = build()
    plugin()
    sparse = build()
    assert dense.state_dict().keys() == sparse.state_dict().keys()
    assert dense.sharded_state_dict().keys() == sparse.sharded_state_dict().keys()
    sparse.load_state_dict(dense.state_dict(), strict=True)
    dense.load_state_dict(sparse.state_dict(), strict=True)
    tokens = torch.randint(0, 128, (1, 256))
    mask = torch.ones(256, 256, dtype=torch.bool).triu(1)[None, None]
    position, labels = torch.arange(256)[None], tokens.roll(-1, 1)
    wanted = dense(tokens, position, mask, labels=labels)
    torch.testing.assert_close(sparse(tokens, position, None, labels=labels), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("one_rank")
def test_random_states_are_left_alone(plugin):
    """Case K3."""
    plugin(MTrainingConfig(top_p=0.5))
    q, k, v = qkv()
    before = torch.get_rng_state()
    core()(q, k, v, None).sum().backward()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("query_len", [1, 3, 256])
def test_static_batch_inference_is_dense(plugin, query_len):
    plugin(MTrainingConfig(top_p=0.01))
    q, k, v = qkv()
    module = core().eval()
    mask_type = AttnMaskType.no_mask if query_len < 256 else AttnMaskType.causal
    mask = torch.ones(256, 256, dtype=torch.bool).triu(1)[None, None, -query_len:]  # as Megatron's inference makes it
    with InferenceMode.active():
        out = module(q[-query_len:], k, v, mask, attn_mask_type=mask_type)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, dense.permute(2, 0, 1, 3).flatten(2)[-query_len:], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_evaluation_is_sparse_as_training_is(plugin):
    plugin(MTrainingConfig(top_p=0.3))
    q, k, v = qkv()
    module = core()
    training = module(q, k, v, None)
    with torch.no_grad():
        assert torch.equal(module.eval()(q, k, v, None), training)


@pytest.mark.usefixtures("one_rank")
def test_packed_documents_do_not_see_each_other(plugin):
    plugin()
    q, k, v = (x.detach()[:, 0] for x in qkv(seq=320))
    lengths = torch.tensor([0, 128, 320], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    out = core()(q, k, v, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=packed)
    for begin, end in ((0, 128), (128, 320)):
        alone = mtraining_attention(
            *(x[None, begin:end] for x in (q, k, v)), config=MTrainingConfig(top_p=1, max_vertical=None)
        )
        torch.testing.assert_close(out[begin:end], alone[0].flatten(1), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("one_rank")
def test_documents_off_the_blocks_are_refused(plugin):
    """As a RefusedError, of which the launcher makes one line."""
    plugin()
    q, k, v = (x.detach()[:, 0] for x in qkv(seq=320))
    lengths = torch.tensor([0, 100, 320], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    with pytest.raises(RefusedError, match="^packed_seq_params: .*begins at token 100, .*no multiple of 64.*padded$"):
        core()(q, k, v, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=packed)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attention_bias": torch.zeros(1)}, r"attention_bias of shape \(1,\)"),
        ({"attn_mask_type": AttnMaskType.padding}, "attn_mask_type padding"),
        ({"attn_mask_type": AttnMaskType.padding_causal}, "attn_mask_type padding_causal"),
        ({"num_splits": 2}, "num_splits 2"),
        ({"key": torch.zeros(512, 2, 2, 16)}, "256 queries, 512 keys"),
        ({"packed_seq_params": PackedSeqParams(qkv_format="sbhd")}, "qkv_format sbhd"),
        ({"packed_seq_params": PackedSeqParams(qkv_format="thd", local_cp_size=2)}, "local_cp_size 2: .*use None"),
    ],
)
def test_calls_that_are_not_supported_are_refused(plugin, changes, expected):
    plugin()
    q, k, v = qkv()
    arguments = {"query": q, "key": k, "value": v, "attention_mask": None} | changes
    with pytest.raises(RefusedError, match=expected):
        core()(**arguments)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("training", [True, False])
def test_a_mask_is_refused_in_training_and_evaluation(plugin, training):
    """Even a causal one: padding could hide in it, and it is not read."""
    plugin()
    mask = torch.ones(256, 256, dtype=torch.bool).triu(1)[None, None]
    with pytest.raises(RefusedError, match=r"^attention_mask of shape \(1, 1, 256, 256\): .*use None"):
        core().train(training)(*qkv(), mask)


@pytest.mark.usefixtures("one_rank")
def test_dynamic_batching_is_refused(plugin):
    plugin()
    attention = SelfAttention.__new__(SelfAttention)
    torch.nn.Module.__init__(attention)
    attention.core_attention = core()
    with pytest.raises(RefusedError, match="dynamic batching passes core attention by"):
        attention.flash_decode_and_prefill(None, None)


@pytest.mark.usefixtures("one_rank")
def test_the_recorder_gets_each_layers_index_in_training(plugin):
    config = MTrainingConfig(top_p=0.5)
    state = plugin(config)
    state.recorder = Recorder(takes_recall=True)
    q, k, v = qkv()
    module = core()
    module.layer_index = 7
    module.eval()(q, k, v, None)
    state.recorder.armed = False
    module.train()(q, k, v, None)
    assert not state.recorder.indices and not state.recorder.recalls
    state.recorder.armed = True
    module(q, k, v, None)
    assert list(state.recorder.indices) == [7]
    index = state.recorder.indices[7][0]
    expected = probe_recall(*(x.transpose(0, 1) for x in (q, k)), index, config=config)
    assert torch.equal(state.recorder.recalls[7], expected)
    assert 0.5 <= float(expected.mean()) < 1


@pytest.mark.usefixtures("one_rank")
def test_a_dense_layer_keeps_all_of_the_probe(plugin):
    state = plugin(MTrainingConfig(dense=True))
    state.recorder = Recorder(takes_recall=True)
    core().train()(*qkv(), None)
    assert float(state.recorder.recalls[0]) == 1


@pytest.mark.usefixtures("one_rank")
def test_options_and_metrics_number_the_layers_alike(plugin):
    """A layer that is made dense is the one whose density is that of dense attention."""
    state = plugin(MTrainingConfig(top_p=0.3))
    state.plan = LayerPlan(dense_layers=(1,))
    state.recorder = Recorder()
    q, k, v = qkv()
    for number in (1, 2, 3):  # Megatron's
        core(layer_number=number).train()(q, k, v, None)
    density = state.recorder.summary()["density_by_layer"]
    assert list(density) == [0, 1, 2]
    assert [layer for layer, share in density.items() if share == 1 + BLOCK / q.shape[0]] == [1]


class _Ranks:
    """Stands in for a context-parallel group of two ranks."""

    def size(self):
        return 2

    def rank(self):
        return 0


@pytest.mark.parametrize("missing", ["batch", "rotary"])
def test_what_was_not_dealt_in_the_layout_of_attention_is_an_error(plugin, missing):
    """Another slicer of the batch, or of the rotary embedding, would give silently wrong positions."""
    state = plugin(model=make_config(context_parallel_size=2))
    state.expects = {"batch", "rotary"}
    state.dealt = {what: {512} - ({512} if what == missing else set()) for what in state.expects}
    q, k, v = qkv()
    with pytest.raises(RefusedError, match=f"the {missing} of a sequence of 512 tokens was not dealt.*deal_{missing}"):
        core()._over_ranks(q, k, v, _Ranks())


def test_without_set_up_the_module_says_how(one_rank):
    with pytest.raises(RefusedError, match=r"python -m megatron_mtraining\.launch"):
        core()
