"""Megatron's own argument parser and models, on one CPU process."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest
import torch

pytest.importorskip("megatron.training", reason="needs megatron-core 0.19 or newer")

from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.integration import install, set_up, tear_down, uninstall

MODEL_OPTIONS = [
    "--num-layers",
    "2",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "1024",
    "--max-position-embeddings",
    "1024",
    "--micro-batch-size",
    "1",
    "--train-iters",
    "2",
    "--lr",
    "1e-3",
    "--transformer-impl",
    "local",
    "--position-embedding-type",
    "rope",
    "--attention-dropout",
    "0",
    "--hidden-dropout",
    "0",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "127",
]


@pytest.fixture(autouse=True)
def no_plugin_left():
    """Every test begins and ends without the plugin's hooks."""
    yield
    uninstall()


@pytest.fixture
def parse(monkeypatch):
    """Megatron's real parser and validation, with the plugin's hooks installed."""
    from megatron.training import arguments

    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 10)
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        monkeypatch.delenv(name)

    def run(*options, validate=True, world_size=4, base=MODEL_OPTIONS):
        install()
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *base, *options])
        args = arguments.parse_args()
        if validate:
            arguments.validate_args(args)
        return args

    return run


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A process group of this process alone, with Megatron's groups on it."""
    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def on_cpu(monkeypatch):
    """What a forward pass of a CPU model asks of CUDA: the device of the rotary embedding, and a random state."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())


def make_config(**changes):
    """A small model's config."""
    values = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
    }
    return TransformerConfig(**(values | changes))


@pytest.fixture
def plugin():
    """The plugin in use, selecting every line (so that results equal dense attention)."""

    def use(config=None, model=None, **options):
        return set_up(config or MTrainingConfig(top_p=1, max_vertical=None), model or make_config(), **options)

    yield use
    tear_down()
