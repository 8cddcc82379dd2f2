"""Native or converted layout: what decides, and what is said about it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.integration import RefusedError, runtime
from megatron_mtraining.integration.layout_mode import ZIGZAG_USERS, choose_layout_mode
from megatron_mtraining.integration.refusals import refuse

USERS = {
    "--mtp-num-layers": {"mtp_num_layers": 1},
    "state-space": {"hybrid_layer_pattern": "M*M*"},
    "gated delta net": {"experimental_attention_variant": "gated_delta_net"},
    "mrope": {"position_embedding_type": "mrope"},
    "fused rotary": {"multi_latent_attention": True, "apply_rope_fusion": True},
    "--logits-load-dir": {"logits_load_dir": "logits"},
    "--logits-save-dir": {"logits_save_dir": "logits"},
}


def choose(requested="auto", config=None, cp=4, **args):
    return choose_layout_mode(requested, SimpleNamespace(context_parallel_size=cp, **args), config or MTrainingConfig())


def test_plain_gpt_is_native():
    chosen = choose(mtp_num_layers=None, hybrid_layer_pattern=None, position_embedding_type="rope")
    assert (chosen.mode, chosen.replaces_slicing) == ("native", True)


def test_attention_only_hybrids_are_native():
    assert choose(hybrid_layer_pattern="*-*-").mode == "native"


@pytest.mark.parametrize("name", USERS)
def test_other_users_of_zigzag_make_it_convert(name):
    chosen = choose(**USERS[name])
    assert (chosen.mode, chosen.replaces_slicing) == ("convert", False)
    assert name in chosen.reason


@pytest.mark.parametrize("name", USERS)
def test_native_beside_them_is_refused(name):
    with pytest.raises(RefusedError, match=r"--mtraining-layout-mode native: .*use auto or convert"):
        choose("native", **USERS[name])


@pytest.mark.parametrize("variant", ["gated_delta_net", "gdn", "gdn2"])
def test_every_name_of_a_gated_delta_net_is_taken(variant):
    """Megatron 0.20 renames the variant, in its configs too."""
    owner = SimpleNamespace(context_parallel_size=4, experimental_attention_variant=variant)
    refuse(owner)
    assert choose_layout_mode("auto", owner, MTrainingConfig()).mode == "convert"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--mtraining-stripe-rotation", "3"],
            "^--mtraining-stripe-rotation 3: must divide --context-parallel-size 4$",
        ),
        (["--seq-length", "1000"], "^--seq-length 1000: .*over --context-parallel-size 4 .*nearest: 768 or 1024$"),
    ],
)
def test_what_the_layout_cannot_do_is_said_by_the_options(parse, words, expected):
    with pytest.raises(RefusedError, match=expected):
        parse("--attention-backend", "mtraining", "--context-parallel-size", "4", *words)


def test_each_user_is_tested():
    assert len(ZIGZAG_USERS) == len(USERS) + 1  # the vision scripts, known by what the running script imports


def test_a_vision_script_makes_it_convert(monkeypatch):
    import __main__

    monkeypatch.setattr(__main__, "LLaVAModel", object, raising=False)
    assert choose().mode == "convert"


def test_convert_can_be_asked_for():
    assert choose("convert").mode == "convert"


def test_one_rank_and_megatrons_own_layout_replace_nothing():
    assert not choose(cp=1).replaces_slicing
    assert not choose(config=MTrainingConfig(layout="zigzag"), mtp_num_layers=1).replaces_slicing


def test_the_choice_is_one_line_of_log(parse, capsys):
    parse("--attention-backend", "mtraining", "--context-parallel-size", "4", "--mtp-num-layers", "1")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("> megatron_mtraining: layout")]
    assert lines == [
        "> megatron_mtraining: layout striped, convert: --mtp-num-layers (its roll) relies on Megatron's zigzag layout"
    ]
    assert runtime.current().layout_mode.mode == "convert"
