"""What fits where: memory of one GPU when a model trains with a long context (estimates; the terms are listed, not hidden).

bf16 weights, fp32 gradients; fp32 master weights and two AdamW moments, sharded over data and context parallel ranks
(Megatron's distributed optimizer); full recomputation: one activation per layer and the working set of one layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import BLOCK
from ..launches import backward_plan, chunks_per_launch, forward_plan
from .cost import Shape


@dataclass(frozen=True)
class Model:
    """Shape of a dense transformer.

    Attributes:
        tied: whether input and output embedding are one.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer: attention, gated MLP (norms are left out)."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads) + 3 * self.hidden * self.ffn

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings."""
        return self.hidden * self.vocabulary * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * self.layer_parameters + self.embedding_parameters


MODELS = {
    "qwen2.5-3b": Model(36, 2048, 11008, 16, 2, 128, 151936, tied=True),
    "llama-3.1-8b": Model(32, 4096, 14336, 32, 8, 128, 128256),
}


@dataclass(frozen=True)
class Parallel:
    """Ranks: tensor, context (in inner rings of ``inner_size``), data."""

    tp: int
    cp: int
    dp: int = 1
    inner_size: int = 8

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tp * self.cp * self.dp


def memory_plan(model: Model, seq_len: int, parallel: Parallel, max_vertical: int = 4096) -> dict[str, float]:
    """GiB of one GPU by what holds it, and their sum ``total``.

    Raises:
        ValueError: if tensor parallelism does not divide the key heads, or the sequence cannot be shared.
    """
    tp, cp = parallel.tp, parallel.cp
    if model.kv_heads % tp:
        raise ValueError(f"tp={tp}: must divide the {model.kv_heads} key heads")
    if seq_len % (BLOCK * cp):
        raise ValueError(f"seq_len={seq_len}: must be a multiple of {BLOCK * cp} for cp={cp}")
    local = seq_len // cp
    weights = model.parameters / tp
    shape = Shape(seq_len, model.heads // tp, model.kv_heads // tp, model.head_dim)
    inner = parallel.inner_size if cp % parallel.inner_size == 0 else cp
    ring = 0.0
    if cp > 1:
        forward = forward_plan(0, inner, cp // inner, min(chunks_per_launch(local, False), cp))
        backward = backward_plan(0, inner, cp // inner, min(chunks_per_launch(local, True), cp))
        key, grad = shape.chunk_bytes(cp), shape.chunk_bytes(cp, 4)
        ring = max(forward.key_slots * key, backward.key_slots * key + backward.grad_slots * grad)
    blocks = seq_len // BLOCK
    # q, k, v, out, their gradients, the MLP's two halves and product, of one recomputed layer, with their gradients.
    widths = (2 * shape.heads + 2 * shape.kv_heads) * model.head_dim + 2 * model.hidden + 3 * model.ffn // tp
    parts = {
        "weights": 2 * weights,
        "gradients": 4 * weights,
        "optimizer": 12 * weights / (parallel.dp * cp),
        # With sequence parallelism the stored activations are shared by the tensor-parallel ranks too.
        "activations": 2.0 * local * model.hidden * model.layers / tp,
        "one layer": 2 * 2.0 * local * widths,
        "logits": (2.0 + 4.0) * local * model.vocabulary / tp,
        "ring buffers": ring,
        # One recomputed layer holds its kept chunk, its compact columns, their fp32 gradients, and its index.
        "columns": (2 + 4) * 2.0 * shape.heads * min(max_vertical, seq_len) * model.head_dim,
        "index": 8.0 * shape.heads * (blocks + blocks / 64),
    }
    found = {name: size / 2**30 for name, size in parts.items()}
    return found | {"total": sum(found.values())}


def smallest_cp(model: Model, seq_len: int, memory_gib: float, tp: int = 1, reserve: float = 0.1) -> int | None:
    """Fewest context-parallel ranks (a power of two up to 1,024) that fit, with a share of the memory in reserve."""
    for cp in (1 << power for power in range(11)):
        if seq_len % (BLOCK * cp):
            return None
        if memory_plan(model, seq_len, Parallel(tp, cp))["total"] <= memory_gib * (1 - reserve):
            return cp
    return None
