"""Extending a model's context: the rotary embedding of a Hugging Face config, for training and for inference alike.

Bridge, transformers and vLLM read the rotary embedding from ``config.json``. Extended there, before the import into
Megatron, all of them agree, and the exported model needs no further change.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron_mtraining.integration import RefusedError

CONFIG = "config.json"
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""YaRN's defaults, written out: Megatron fails without them, others take them for granted."""


def extended_config(config: dict[str, Any], seq_length: int) -> dict[str, Any]:
    """A copy of a Hugging Face config, made for ``seq_length`` tokens.

    A plain rotary embedding becomes YaRN with the factor ``seq_length / max_position_embeddings``; the factor of YaRN and
    of Llama 3's own scaling (``llama3``) grows in the proportion of the lengths. At the model's length or below, the
    embedding stays as it is. The entry is ``rope_scaling``, or ``rope_parameters`` where transformers 5 saved the model.

    Args:
        config: the content of ``config.json``.
        seq_length: tokens of a sequence.

    Raises:
        RefusedError: for a rotary embedding that cannot be extended; names its type. For a config without a length, and
            for a length that is not positive.
    """
    length = config.get("max_position_embeddings")
    if seq_length < 1:
        raise RefusedError(f"seq_length {seq_length}: must be a number of tokens, 1 or more")
    if not isinstance(length, int) or length < 1:
        raise RefusedError(f"max_position_embeddings {length}: the config must name the model's length")
    if seq_length <= length:
        return dict(config)
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    scaling = config.get(key) or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if any(isinstance(value, dict) for value in scaling.values()):
        kind = "by layer"
    ratio = seq_length / length
    if kind == "default":
        grown = {"rope_type": "yarn", "factor": ratio, "original_max_position_embeddings": length, **YARN}
    elif kind in ("yarn", "llama3"):
        grown = {"rope_type": kind, "factor": scaling["factor"] * ratio}
    else:
        raise RefusedError(f"{key} {kind}: cannot be extended; use a model with default, yarn or llama3")
    return {**config, key: {**scaling, **grown}, "max_position_embeddings": seq_length}


def extend_hf_config(source: str | os.PathLike[str], target: str | os.PathLike[str], seq_length: int) -> Path:
    """A folder that holds the Hugging Face model of ``source``, made for ``seq_length`` tokens.

    Its files are links to those of ``source``, except ``config.json``.

    Args:
        source: folder of a model: ``config.json``, weights and tokenizer.
        target: the folder to make; must not exist.
        seq_length: tokens of a sequence.

    Returns:
        ``target``.

    Raises:
        RefusedError: if ``source`` holds no ``config.json`` that can be read, ``target`` exists or cannot be made, or the
            embedding cannot be extended.
    """
    source, target = Path(source).resolve(), Path(target)
    if not (source / CONFIG).is_file():
        raise RefusedError(f"{source}: no {CONFIG} there; give the folder of a downloaded Hugging Face model")
    if target.exists():
        raise RefusedError(f"{target}: exists; give a folder to make")
    try:
        read = json.loads((source / CONFIG).read_text())
    except ValueError as error:
        raise RefusedError(f"{source / CONFIG}: no JSON: {error}") from error
    config = extended_config(read, seq_length)
    try:
        target.mkdir(parents=True)
    except OSError as error:
        raise RefusedError(f"{target}: cannot make the folder: {error.strerror}") from error
    for file in source.iterdir():
        if file.is_file() and file.name != CONFIG:
            (target / file.name).symlink_to(file)
    (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return target
