"""The command line: the backend's name, the options, and what becomes of them."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.integration import RefusedError, install, runtime, uninstall
from megatron_mtraining.integration.options import add_mtraining_arguments, config_from_args, option_name
from megatron_mtraining.integration.versions import check_megatron_version


def parse_options(*words):
    parser = argparse.ArgumentParser()
    add_mtraining_arguments(parser)
    return config_from_args(parser.parse_args(words))


def test_every_config_field_has_an_option_with_the_same_default():
    assert parse_options() == MTrainingConfig()
    parser = argparse.ArgumentParser()
    add_mtraining_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {option_name(item.name) for item in fields(MTrainingConfig)} <= flags


def test_options_reach_the_config():
    config = parse_options(
        *[
            "--mtraining-top-p",
            "0.9",
            "--mtraining-slash-top-p",
            "0.8",
            "--mtraining-max-vertical",
            "none",
            "--mtraining-max-slash",
            "7",
        ],
        *[
            "--mtraining-last-q",
            "128",
            "--mtraining-layout",
            "zigzag",
            "--no-mtraining-deterministic",
            "--mtraining-dense",
        ],
    )
    assert config == MTrainingConfig(
        top_p=0.9, slash_top_p=0.8, max_vertical=None, max_slash=7, last_q=128, layout="zigzag", deterministic=False,
        dense=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--mtraining-top-p 2", r"--mtraining-top-p=2.0.*\(0, 1\]"),
        ("--mtraining-last-q 65", "--mtraining-last-q=65.*multiple of 64"),
        ("--mtraining-local-blocks 0", "--mtraining-local-blocks=0"),
    ],
)
def test_values_out_of_range_are_refused_by_the_name_of_the_option(words, expected):
    with pytest.raises(RefusedError, match=expected) as caught:
        parse_options(*words.split())
    assert "\n" not in str(caught.value)


def test_the_stored_backend_is_auto(parse):
    args = parse("--attention-backend", "mtraining", validate=False)
    assert args.attention_backend is AttnBackend.auto
    assert [member.name for member in AttnBackend] == ["flash", "fused", "unfused", "local", "auto"]


@pytest.mark.parametrize("backend", ["flash", "fused", "unfused", "auto"])
def test_dense_backends_stay_selectable(parse, backend):
    args = parse("--attention-backend", backend)
    assert args.attention_backend is AttnBackend[backend]
    assert not runtime.is_set_up()
    assert args.create_attention_mask_in_dataloader  # as Megatron's default


def test_a_typo_lists_the_choices(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--attention-backend", "mtrainng")
    message = capsys.readouterr().err.splitlines()[-1]
    assert "'mtrainng' (choose from flash, fused, unfused, local, auto, mtraining)" in message


def test_without_the_plugin_the_name_is_unknown(parse):
    install()
    uninstall()
    from megatron.training import arguments

    parser = argparse.ArgumentParser()
    arguments.add_megatron_arguments(parser)
    with pytest.raises(KeyError):
        parser.parse_args(["--attention-backend", "mtraining"])


@pytest.mark.parametrize("name", ["NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"])
def test_conflicting_environment_is_one_line(parse, monkeypatch, name):
    monkeypatch.setenv(name, "0")
    with pytest.raises(RefusedError, match=f"{name}=0.*unset") as caught:
        parse("--attention-backend", "mtraining")
    assert "\n" not in str(caught.value)


def test_a_name_written_into_the_namespace_is_taken(parse):
    """Case K2: the value as text in the namespace."""
    from megatron.training import arguments

    args = parse(validate=False)
    args.attention_backend = "mtraining"
    arguments.validate_args(args)
    assert args.attention_backend is AttnBackend.auto
    assert runtime.is_set_up()


def test_a_name_in_a_python_config_is_taken():
    """Case K2: a TransformerConfig made in Python."""
    install()
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, attention_dropout=0.0, attention_backend="mtraining"
    )
    assert config.attention_backend is AttnBackend.auto
    assert runtime.current().config == MTrainingConfig()


def test_arguments_that_were_never_validated_still_count(parse):
    parse("--attention-backend", "mtraining", "--mtraining-top-p", "0.5", validate=False)
    assert not runtime.is_set_up()
    TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, attention_dropout=0.0)
    assert runtime.current().config.top_p == 0.5


def test_parsing_again_changes_nothing(parse):
    """Megatron parses its command line several times (in-process restart, fault tolerance)."""
    parse("--attention-backend", "mtraining", "--context-parallel-size", "4")
    before = runtime.current()
    parse("--attention-backend", "mtraining", "--context-parallel-size", "4", validate=False)
    assert runtime.current() is before


def test_a_later_run_without_the_backend_ends_the_use(parse):
    parse("--attention-backend", "mtraining")
    parse("--attention-backend", "flash")
    assert not runtime.is_set_up()


@pytest.mark.parametrize(
    "words",
    [
        ("--mtraining-top-p", "0.5"),
        ("--mtraining-metrics", "metrics.jsonl"),
        ("--mtraining-layout-mode", "convert"),
        ("--mtraining-inner-across-hosts",),
        ("--mtraining-dump-steps", "2"),
    ],
)
def test_options_without_the_backend_are_pointed_out(parse, capsys, words):
    parse(*words)
    assert f"{words[0]} has no effect without --attention-backend mtraining" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "pointed_out"),
    [
        ((), False),
        (("--cp-comm-type", "p2p"), False),
        (("--cp-comm-type", "a2a"), True),
        (("--cp-comm-type", "p2p", "a2a"), True),
    ],
)
def test_options_of_another_attention_are_pointed_out(parse, capsys, words, pointed_out):
    parse("--attention-backend", "mtraining", "--context-parallel-size", "4", "--num-layers", "2", *words)
    assert ("--cp-comm-type has no effect with --attention-backend mtraining" in capsys.readouterr().out) == pointed_out


def test_no_mask_is_made_in_the_data_loader(parse, capsys):
    """Case I3: the mask has seq_length^2 entries."""
    args = parse("--attention-backend", "mtraining")
    assert not args.create_attention_mask_in_dataloader
    assert "the data loader makes no attention mask" in capsys.readouterr().out


def test_arguments_pickle_without_the_plugin(parse):
    """A checkpoint holds the namespace: nothing in it may be of ours."""
    args = parse("--attention-backend", "mtraining", "--mtraining-top-p", "0.9")
    ours = {
        name: value for name, value in vars(args).items() if type(value).__module__.startswith("megatron_mtraining")
    }
    assert not ours
    for name, value in vars(args).items():
        if name.startswith("mtraining_"):
            assert type(value) in (int, float, str, bool, type(None)), name


@pytest.mark.parametrize("version", ["0.16.1", "0.18.9", "0.0.0", "nonsense"])
def test_an_old_megatron_is_refused(version):
    with pytest.raises(RefusedError, match=rf"megatron-core {version}.*>= 0\.19"):
        check_megatron_version(version)


@pytest.mark.parametrize("version", ["0.19.0", "0.19.2", "0.20.0", "1.0", "0.20.0rc1"])
def test_a_new_megatron_is_taken(version):
    check_megatron_version(version)


def test_uninstalling_restores_megatron(parse):
    from megatron.core import parallel_state, utils
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding, yarn_rotary_pos_embedding
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.training import arguments, training

    def places():
        return [
            arguments.add_megatron_arguments, arguments.validate_args,
            TransformerConfig.__post_init__, GPTModel.__init__,
            parallel_state.initialize_model_parallel, parallel_state.destroy_model_parallel,
            training.setup_model_and_optimizer, training.get_batch_on_this_cp_rank, utils.get_batch_on_this_cp_rank,
            rope_utils.get_pos_emb_on_this_cp_rank, rotary_pos_embedding.get_pos_emb_on_this_cp_rank,
            yarn_rotary_pos_embedding.get_pos_emb_on_this_cp_rank,
        ]  # fmt: skip

    before = places()
    parse("--attention-backend", "mtraining", "--context-parallel-size", "4")
    assert all(new is not old for new, old in zip(places(), before, strict=True))
    uninstall()
    assert all(new is old for new, old in zip(places(), before, strict=True))
