"""Putting the plugin's core attention into a module spec, whoever built it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec

CORE_ATTENTION = "core_attention"


def swap_core_attention(spec: Any, core_attention: Any) -> tuple[Any, int]:
    """A copy of ``spec`` in which every causal self-attention has ``core_attention`` as its core.

    The spec is walked through ``ModuleSpec``, ``functools.partial``, the dataclasses of submodules, lists and tuples.
    Nothing of the given spec is changed: specs are often module-level objects that several models share.

    A spec that already builds the same module stays, with its own config. A core attention that has submodules of its
    own (an indexer, say) belongs to another kind of attention and is left alone; the check after building reports it.

    Args:
        spec: a module spec, or whatever a Megatron model takes as one.
        core_attention: the module or spec to put in.

    Returns:
        The new spec, and the number of swaps.
    """
    swaps = 0

    def swap_in(submodules: Any, params: dict[str, Any]) -> Any:
        nonlocal swaps
        is_ours = _same_module(getattr(submodules, CORE_ATTENTION, None), core_attention)
        if _is_causal_self_attention(submodules, params) and not is_ours:
            swaps += 1
            submodules = dataclasses.replace(submodules, core_attention=core_attention)
        return submodules

    def walk(node: Any) -> Any:
        if isinstance(node, ModuleSpec):
            return _with(node, submodules=walk(swap_in(node.submodules, node.params)))
        if isinstance(node, functools.partial):
            keywords = {name: walk(value) for name, value in node.keywords.items()}
            if "submodules" in keywords:
                keywords["submodules"] = swap_in(keywords["submodules"], node.keywords)
            same = all(keywords[name] is value for name, value in node.keywords.items())
            return node if same else functools.partial(node.func, *node.args, **keywords)
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            return _rebuild(node, walk)
        if isinstance(node, (list, tuple)):
            items = [walk(item) for item in node]
            if all(a is b for a, b in zip(items, node, strict=True)):
                return node
            return (
                type(node)(*items) if hasattr(node, "_fields") else type(node)(items)
            )  # a named tuple takes them one by one
        return node

    return walk(spec), swaps


def _is_causal_self_attention(submodules: Any, params: dict[str, Any]) -> bool:
    """Whether these are the submodules of a self-attention with a plain core and a causal mask."""
    core = getattr(submodules, CORE_ATTENTION, None)
    if core is None or hasattr(submodules, "linear_kv"):  # the submodules of cross attention have linear_kv
        return False
    if getattr(core, "submodules", None) is not None:
        return False
    return params.get("attn_mask_type") == AttnMaskType.causal


def _same_module(core: Any, other: Any) -> bool:
    """Whether two specs (or classes) build the same class; a spec with a config of its own is then kept."""
    return getattr(core, "module", core) is getattr(other, "module", other)


def _with(spec: ModuleSpec, submodules: Any) -> ModuleSpec:
    return spec if submodules is spec.submodules else dataclasses.replace(spec, submodules=submodules)


def _rebuild(node: Any, walk: Callable[[Any], Any]) -> Any:
    """The dataclass with its fields walked; the same object if nothing changed."""
    changed = {}
    for item in dataclasses.fields(node):
        value = getattr(node, item.name)
        walked = walk(value)
        if item.init and walked is not value:
            changed[item.name] = walked
    return dataclasses.replace(node, **changed) if changed else node
