"""What fits where: memory of one GPU when a model trains with a long context (estimates; the terms are listed, not hidden).

bf16 weights, fp32 gradients; fp32 master weights and two AdamW moments, sharded over data and context parallel ranks
(Megatron's distributed optimizer); full recomputation: one activation per layer and the working set of one layer.
:class:`Training` has the other choices.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import BLOCK
from ..launches import Plan, backward_plan, chunks_per_launch, forward_plan
from .cost import Shape


@dataclass(frozen=True)
class Model:
    """Shape of a dense transformer.

    Attributes:
        tied: whether input and output embedding are one.
        gated: whether the MLP has a gate (SwiGLU): three matrices instead of two.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    gated: bool = True

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer: attention and MLP (norms are left out)."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    def stage_embeddings(self, stage: int, stages: int) -> int:
        """Parameters of the embeddings that a pipeline stage holds; tied ones are on the first and the last."""
        ends = (stage == 0) + (stage == stages - 1)
        return self.hidden * self.vocabulary * (min(ends, 1) if self.tied else ends)

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
    """Ranks: tensor, context (in inner rings of ``inner_size``), data, pipeline.

    Attributes:
        nodes: nodes that the context-parallel ranks lie on, where the rings do not follow them.
    """

    tp: int
    cp: int
    dp: int = 1
    inner_size: int = 8
    pp: int = 1
    nodes: int = 1

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tp * self.cp * self.dp * self.pp


@dataclass(frozen=True)
class Training:
    """What else memory depends on.

    Attributes:
        micro_batch: samples a micro-batch.
        recompute: full recomputation; else everything that backward needs is kept.
        sharded_optimizer: Megatron's distributed optimizer.
        half: bf16 or fp16 weights and activations, with fp32 master weights; else fp32.
        max_vertical: most kept columns per head.
        chunks: most chunks a launch; None: by the local length.
    """

    micro_batch: int = 1
    recompute: bool = True
    sharded_optimizer: bool = True
    half: bool = True
    max_vertical: int | None = 4096
    chunks: int | None = None


def ring_plans(local: int, parallel: Parallel, chunks: int | None = None) -> tuple[Plan, Plan]:
    """Forward and backward launches of rank 0, as the product chooses them for chunks of ``local`` tokens."""
    cp = parallel.cp
    inner = parallel.inner_size if cp % parallel.inner_size == 0 else cp
    crossing = cp // inner < parallel.nodes  # a flat ring over several nodes works chunk by chunk
    most = [1 if crossing else chunks or chunks_per_launch(local, backward) for backward in (False, True)]
    return forward_plan(0, inner, cp // inner, most[0]), backward_plan(0, inner, cp // inner, most[1])


def ring_buffer_bytes(forward: Plan, backward: Plan, key: float, grad: float) -> float:
    """What the pool of ring buffers holds after a forward and a backward pass: all of them, idle ones too.

    Args:
        forward, backward: the launches.
        key: bytes of a chunk's K and V.
        grad: bytes of their gradients.
    """
    packs = len(forward.launches) > 1  # the own chunk, packed into the slot after the others
    keys = {forward.key_slots + packs, backward.key_slots}  # buffers of one size are one buffer
    return sum(keys) * key + backward.grad_slots * grad


def memory_plan(
    model: Model, seq_len: int, parallel: Parallel, training: Training | None = None, stage: int = 0
) -> dict[str, float]:
    """GiB of one GPU of a pipeline stage by what holds it, and their sum ``total``.

    Raises:
        ValueError: if tensor parallelism neither divides the key heads nor is a multiple of them, or the sequence cannot
            be shared.
    """
    training = training or Training()
    tp, cp, pp = parallel.tp, parallel.cp, parallel.pp
    if model.kv_heads % tp and tp % model.kv_heads:
        raise ValueError(f"tp={tp}: must divide the {model.kv_heads} key heads, or be a multiple of them")
    if seq_len % (BLOCK * cp):
        raise ValueError(f"seq_len={seq_len}: must be a multiple of {BLOCK * cp} for cp={cp}")
    local, element = training.micro_batch * seq_len // cp, 2 if training.half else 4
    shape = Shape(seq_len, model.heads // tp, max(model.kv_heads // tp, 1), model.head_dim, element)
    layers, last = model.layers / pp, stage == pp - 1
    weights = layers * model.layer_parameters / tp + model.stage_embeddings(stage, pp) / tp
    kept_states = weights / (parallel.dp * cp if training.sharded_optimizer else 1)
    # q, k, v, out, their gradients, the MLP's halves and product, of one layer.
    halves = 3 if model.gated else 2
    width = (2 * shape.heads + 2 * shape.kv_heads) * model.head_dim + 2 * model.hidden + halves * model.ffn // tp
    columns = 2.0 * shape.heads * min(training.max_vertical or seq_len, seq_len) * model.head_dim * training.micro_batch
    chunk = shape.chunk_bytes(cp) * training.micro_batch
    # 1F1B: a stage holds the activations of as many micro-batches as there are stages from it on.
    held = layers * (pp - stage) * (
        float(element) * local * model.hidden / tp  # shared by tensor-parallel ranks with sequence parallelism
        if training.recompute else float(element) * local * width + element * columns + chunk * (cp > 1)
    )  # fmt: skip
    blocks = seq_len // BLOCK
    plans = ring_plans(seq_len // cp, parallel, training.chunks)
    parts = {
        "weights": element * weights,
        "gradients": 4 * weights,
        "optimizer": (12 if training.half else 8) * kept_states,
        "activations": held,
        "one layer": 2.0 * element * local * width,
        "logits": (element + 4.0) * local * model.vocabulary / tp if last else 0.0,
        "ring buffers": ring_buffer_bytes(*plans, chunk, shape.chunk_bytes(cp, 4) * training.micro_batch),
        # One layer at work: its compact columns, their fp32 gradients, and its index.
        "columns": (element + 4) * columns,
        "index": 8.0 * shape.heads * (blocks + blocks / 64) * training.micro_batch,
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
