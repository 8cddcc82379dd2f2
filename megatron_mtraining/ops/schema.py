"""Schemas of the operators and their shape functions (fakes).

The table in ``docs/design.md`` says what each operator computes and the shape of each argument. The CPU implementation is
the torch reference, registered in :mod:`megatron_mtraining.ops`; the CUDA implementation is registered by the native
library, see :mod:`megatron_mtraining.ops.native`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..budget import STATE_FIELDS

NAMESPACE = "megatron_mtraining"

_PROBES = "Tensor probe_blocks, Tensor probe_rows, Tensor block_probes, Tensor doc_start, Tensor kv_blocks, float scale"

_BUDGET = "int digit_bits, int mass_rounds, int tie_rounds, int p_num, int p_den, int cap, bool all_lines"

SCHEMAS: dict[str, str] = {
    "attention_forward_": (
        "(Tensor q, Tensor k, Tensor v, Tensor slash_words, Tensor doc_start, Tensor q_blocks, Tensor kv_blocks, "
        "Tensor? compact_k, Tensor? compact_v, Tensor? column_list, float scale, bool accumulate, int arch, "
        "Tensor(a!)? partial, Tensor(b!)? final, Tensor(c!) lse) -> ()"
    ),
    "attention_delta": "(Tensor out, Tensor dout) -> Tensor",
    "attention_backward_": (
        "(Tensor q, Tensor k, Tensor v, Tensor dout, Tensor lse, Tensor delta, Tensor slash_words, Tensor doc_start, "
        "Tensor q_blocks, Tensor kv_blocks, float scale, bool accumulate_dq, bool deterministic, int arch, "
        "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> ()"
    ),
    "list_columns": "(Tensor column_words, Tensor blocks, int capacity, int first) -> (Tensor, Tensor)",
    "gather_columns_": (
        "(Tensor k, Tensor v, Tensor kv_blocks, Tensor column_list, Tensor(a!) compact_k, Tensor(b!) compact_v) -> ()"
    ),
    "vertical_backward_": (
        "(Tensor q, Tensor dout, Tensor lse, Tensor delta, Tensor compact_k, Tensor compact_v, Tensor column_list, "
        "Tensor slash_words, Tensor doc_start, Tensor q_blocks, float scale, bool accumulate_dq, bool deterministic, "
        "int arch, Tensor(a!) dq, Tensor(b!) d_compact_k, Tensor(c!) d_compact_v) -> ()"
    ),
    "scatter_columns_": (
        "(Tensor d_compact_k, Tensor d_compact_v, Tensor column_list, Tensor kv_blocks, Tensor(a!) dk, Tensor(b!) dv) "
        "-> ()"
    ),
    "probe_row_max": f"(Tensor probe_q, Tensor k, {_PROBES}) -> Tensor",
    "probe_row_sum": f"(Tensor probe_q, Tensor k, {_PROBES}, Tensor row_max) -> Tensor",
    "probe_mass": f"(Tensor probe_q, Tensor k, {_PROBES}, Tensor row_max, Tensor row_sum) -> (Tensor, Tensor)",
    "probe_columns": (
        f"(Tensor probe_q, Tensor k, {_PROBES}, Tensor row_max, Tensor row_sum, "
        f"Tensor segment, Tensor tie, int documents, {_BUDGET}) -> (Tensor, Tensor)"
    ),
    "select_round_": (
        "(Tensor mass, Tensor segment, Tensor tie, Tensor? previous, Tensor? state, Tensor(a!) histogram, int round, "
        f"{_BUDGET}) -> Tensor"
    ),
    "select_pack": f"(Tensor mass, Tensor segment, Tensor tie, Tensor previous, Tensor state, {_BUDGET}) -> Tensor",
    "select_lines": f"(Tensor mass, Tensor segment, Tensor tie, int documents, {_BUDGET}) -> Tensor",
}


def _accumulator_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _nothing(*_: object) -> None:
    """Fake of the operators that only mutate their arguments."""


def _fake_attention_delta(out: Tensor, dout: Tensor) -> Tensor:
    batch, seq, heads, _ = dout.shape
    return dout.new_empty((batch, heads, seq), dtype=_accumulator_dtype(dout))


def _fake_list_columns(column_words: Tensor, blocks: Tensor, capacity: int, first: int) -> tuple[Tensor, Tensor]:
    batch, heads, _ = column_words.shape
    return (
        column_words.new_empty((batch, heads, capacity), dtype=torch.int32),
        column_words.new_empty((batch, heads), dtype=torch.int32),
    )


def _probe_rows_shape(probe_q: Tensor) -> tuple[int, int, int, int]:
    batch, tiles, rows, heads, _ = probe_q.shape
    return batch, heads, tiles, rows


def _fake_probe_row_max(probe_q: Tensor, *_: object) -> Tensor:
    return probe_q.new_empty(_probe_rows_shape(probe_q), dtype=_accumulator_dtype(probe_q))


def _fake_probe_row_sum(probe_q: Tensor, *_: object) -> Tensor:
    return probe_q.new_empty(_probe_rows_shape(probe_q), dtype=torch.int64)


def _fake_probe_mass(
    probe_q: Tensor,
    k: Tensor,
    probe_blocks: Tensor,
    probe_rows: Tensor,
    block_probes: Tensor,
    doc_start: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor]:
    batch, heads = probe_q.shape[0], probe_q.shape[3]
    return (
        k.new_empty((batch, heads, k.shape[1]), dtype=torch.int64),
        k.new_empty((batch, heads, doc_start.shape[0]), dtype=torch.int64),
    )


def _fake_probe_columns(
    probe_q: Tensor,
    k: Tensor,
    probe_blocks: Tensor,
    probe_rows: Tensor,
    block_probes: Tensor,
    doc_start: Tensor,
    kv_blocks: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor]:
    batch, heads = probe_q.shape[0], probe_q.shape[3]
    return (
        k.new_empty((batch, heads, kv_blocks.shape[0]), dtype=torch.int64),
        k.new_empty((batch, heads, doc_start.shape[0]), dtype=torch.int64),
    )


def _fake_select_round(
    mass: Tensor,
    segment: Tensor,
    tie: Tensor,
    previous: Tensor | None,
    state: Tensor | None,
    histogram: Tensor,
    *_: object,
) -> Tensor:
    return mass.new_empty((*histogram.shape[:3], STATE_FIELDS))


def _fake_select_pack(mass: Tensor, *_: object) -> Tensor:
    batch, heads, lines = mass.shape
    return mass.new_empty((batch, heads, (lines + 63) // 64))


FAKES: dict[str, Callable[..., object]] = {
    "attention_forward_": _nothing,
    "attention_delta": _fake_attention_delta,
    "attention_backward_": _nothing,
    "list_columns": _fake_list_columns,
    "gather_columns_": _nothing,
    "vertical_backward_": _nothing,
    "scatter_columns_": _nothing,
    "probe_row_max": _fake_probe_row_max,
    "probe_row_sum": _fake_probe_row_sum,
    "probe_mass": _fake_probe_mass,
    "probe_columns": _fake_probe_columns,
    "select_round_": _fake_select_round,
    "select_pack": _fake_select_pack,
    "select_lines": _fake_select_pack,
}

library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", FAKES[_name], lib=library)
