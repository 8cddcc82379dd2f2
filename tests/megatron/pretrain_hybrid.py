"""Trains a HybridModel of attention and MLP layers from a user's ``--spec``, with the functions of the GPT example.

Megatron hard-wires Transformer Engine's final norm in its hybrid stack; the plain torch one takes its place.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron.core.enums import ModelType
from megatron.core.models.hybrid import hybrid_block
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.training import pretrain
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import pretrain_gpt as example  # a module of its own: the plugin replaces what loaded modules have imported by name


def main():
    hybrid_block.TENorm = WrappedTorchNorm
    datasets = example.datasets_provider
    datasets.is_distributed = True
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, hybrid_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, example.forward_step)


if __name__ == "__main__":
    main()
