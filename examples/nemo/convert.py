"""From Hugging Face to a longer Megatron checkpoint, and back: the steps around training of docs/from_hf_to_512k.md.

    python examples/nemo/convert.py extend models/qwen25_3b models/qwen25_3b_512k --seq-length 524288
    python examples/nemo/convert.py import models/qwen25_3b_512k checkpoints/qwen25_3b_512k
    python examples/nemo/convert.py export models/qwen25_3b_512k CHECKPOINTS models/qwen25_3b_512k_trained

`import` and `export` need a GPU: Transformer Engine makes its layers nowhere else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_mtraining.integration import RefusedError


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Convert between Hugging Face and Megatron with Megatron-Bridge.")
    steps = parser.add_subparsers(dest="step", required=True)
    extend = steps.add_parser("extend", help="a folder of links to a model, with a longer rotary embedding")
    extend.add_argument("source", type=Path, help="folder of a Hugging Face model")
    extend.add_argument("target", type=Path, help="folder to make")
    extend.add_argument("--seq-length", type=int, required=True, help="tokens of a sequence")
    load = steps.add_parser("import", help="a Megatron checkpoint of a Hugging Face model")
    load.add_argument("source", type=Path, help="folder of a Hugging Face model, the extended one")
    load.add_argument("target", type=Path, help="folder of the checkpoint")
    back = steps.add_parser("export", help="a Hugging Face model of a Megatron checkpoint")
    back.add_argument("model", type=Path, help="folder of the extended model: its config and tokenizer are taken")
    back.add_argument("source", type=Path, help="folder of checkpoints; the newest is taken")
    back.add_argument("target", type=Path, help="folder to make")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Does one step."""
    from megatron_mtraining.bridge import export_hf_checkpoint, extend_hf_config, import_hf_checkpoint

    args = parse(argv)
    try:
        if args.step == "extend":
            extend_hf_config(args.source, args.target, args.seq_length)
        elif args.step == "import":
            import_hf_checkpoint(args.source, args.target)
        else:
            export_hf_checkpoint(args.model, args.source, args.target)
    except RefusedError as refused:
        sys.exit(f"megatron_mtraining: error: {refused}")
    print(f"wrote {args.target}")


if __name__ == "__main__":
    main()
