"""Trains a recipe of `megatron_mtraining.bridge.recipes` with Megatron-Bridge.

    torchrun --nproc-per-node 8 examples/nemo/run_recipe.py qwen25_3b_pretrain_8gpu_128k_config \
        checkpoint.pretrained_checkpoint=checkpoints/qwen25_3b_long train.train_iters=100 mtraining.top_p=0.95

The words after the recipe are overrides: `mtraining.OPTION=VALUE` for the attention, the others for Bridge (`--list`
shows the recipes, `--dry-run` the settings that would be used, without training).
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_mtraining.integration import RefusedError


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what argparse does not know must be an override."""
    parser = argparse.ArgumentParser(description="Train with Megatron-Bridge and MTraining attention.")
    parser.add_argument("recipe", nargs="?", help="name of a recipe")
    parser.add_argument("--list", action="store_true", help="list the recipes")
    parser.add_argument("--peft-scheme", default=None, help="lora or dora, for the recipes named peft")
    parser.add_argument("--metrics", type=Path, default=None, help="append density and imbalance to this file, as JSON")
    parser.add_argument("--dry-run", action="store_true", help="print the settings and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides")
    args = parser.parse_intermixed_args(argv)
    wrong = [word for word in args.overrides if "=" not in word]
    if wrong:
        parser.error(f"{wrong[0]}: an override is key=value")
    if args.recipe is None and not args.list:
        parser.error("name a recipe; --list shows them")
    return args


def load_recipe(name: str, peft_scheme: str | None = None) -> Any:
    """The `ConfigContainer` of a recipe.

    Raises:
        RefusedError: if there is no such recipe, or it takes no peft scheme.
    """
    from megatron_mtraining.bridge import recipes

    if name not in recipes.__all__:
        raise RefusedError(f"{name}: no such recipe; valid: {', '.join(recipes.__all__)}")
    recipe = getattr(recipes, name)
    if peft_scheme is None:
        return recipe()
    if not inspect.signature(recipe).parameters:
        raise RefusedError(f"--peft-scheme {peft_scheme}: {name} trains all weights; take a recipe named peft")
    return recipe(peft_scheme)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, or lists recipes."""
    args = parse(argv)
    try:
        _run(args)
    except RefusedError as refused:
        sys.exit(f"megatron_mtraining: error: {refused}")


def _run(args: argparse.Namespace) -> None:
    from megatron.bridge.training.utils.omegaconf_utils import OverridesError

    from megatron_mtraining.bridge import apply_overrides, describe, recipes

    if args.list:
        print("\n".join(recipes.__all__))
        return
    cfg = load_recipe(args.recipe, args.peft_scheme)
    try:
        callback = apply_overrides(cfg, args.overrides)
    except OverridesError as error:
        raise RefusedError(" ".join(str(error).split())) from error
    callback.path = args.metrics
    if args.dry_run:
        cfg.print_yaml()
        print(f"# attention: {describe(cfg)}")  # Bridge's config holds nothing of it; a comment keeps the text YAML
        return
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    pretrain(cfg, forward_step, callbacks=[callback])


if __name__ == "__main__":
    main()
