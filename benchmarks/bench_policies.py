"""Index policies on one GPU: time and memory of the index, time of attention under it, its density and recall.

    python -m benchmarks.bench_policies --seq-len 131072 --out benchmarks/results
    python -m benchmarks.bench_policies --seq-len 131072 --policies top_p --segments 1 4 8 16 --out benchmarks/results

Queries and keys are made up (``benchmarks.structured``): bands, distant lines and columns. Recall is the share of the true
attention of sampled row blocks that lies on kept pairs. Every policy also runs once with synchronisation forbidden.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.proof.mass import attention_rows
from benchmarks.ring.cases import Row
from benchmarks.ring.output import write
from benchmarks.structured import structured_tensors
from benchmarks.timing import Measured, measure
from megatron_mtraining import MTrainingConfig, VerticalSlashIndex, estimate_index, mtraining_attention
from megatron_mtraining.bitmap import unpack_bits
from megatron_mtraining.block_lists import Index
from megatron_mtraining.config import BLOCK, INDEX_POLICIES

SAMPLED_BLOCKS = 16


def kept_of_block(index: Index, block: int) -> Tensor:
    """Bool ``[heads, (block + 1) * 64]``: the keys that a row block attends (of its own block all), one document."""
    if not isinstance(index, VerticalSlashIndex):
        row = index.row_blocks.index(block)
        kept = unpack_bits(index.kept_words()[0, :, row], index.num_blocks)[:, : block + 1]
        return kept.repeat_interleave(BLOCK, 1)
    kept = index.slash_bits()[0][:, : block + 1].flip(1).repeat_interleave(BLOCK, 1)
    columns = index.column_bits()[0][:, : block * BLOCK]
    kept[:, : block * BLOCK] |= columns
    return kept


def sampled_recall(q: Tensor, k: Tensor, index: Index, blocks: list[int]) -> Tensor:
    """fp64 ``[heads]``: the share of the attention of these row blocks that the index keeps.

    Args:
        q, k: ``[1, seq, heads, dim]`` and ``[1, seq, kv_heads, dim]``.
        index: of one document.
        blocks: row blocks, whole ones.
    """
    shares = []
    for block in blocks:
        end = (block + 1) * BLOCK
        rows = torch.arange(block * BLOCK, end, device=q.device)
        mass = attention_rows(q[:, :end], k[:, :end], rows, q.shape[-1] ** -0.5).sum(1, dtype=torch.float64)
        shares.append((mass * kept_of_block(index, block)).sum(1) / mass.sum(1))
    return torch.stack(shares).mean(0)


def sample(num_blocks: int) -> list[int]:
    """Row blocks spread evenly over the sequence, its last one among them."""
    count = min(SAMPLED_BLOCKS, num_blocks)
    return [(i + 1) * num_blocks // count - 1 for i in range(count)]


class PolicyRun:
    """One policy on given tensors."""

    def __init__(self, config: MTrainingConfig, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        self.config = config
        q, k, v, self.dout = tensors
        self.leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        self.index = self.estimate()
        self.out = self.attend()

    def estimate(self) -> Index:
        """The index."""
        return estimate_index(self.leaves[0], self.leaves[1], config=self.config)

    def attend(self) -> Tensor:
        """Forward under the estimated index."""
        out: Tensor = mtraining_attention(*self.leaves, config=self.config, index=self.index)
        return out

    def backward(self) -> tuple[Tensor, ...]:
        """Backward of the first forward pass."""
        return torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)

    def synchronises(self) -> str:
        """What synchronises with the host in a call, or nothing."""
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.estimate()
            self.attend()
            self.backward()
        except RuntimeError as error:
            return str(error).split("\n")[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return ""


def policy_row(config: MTrainingConfig, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> Row:
    """Measures one policy."""
    q, k = tensors[:2]
    run = PolicyRun(config, tensors)
    times: dict[str, Measured] = {
        "index": measure(run.estimate, repeats=5, queued=True),
        "forward": measure(run.attend, repeats=5, queued=True),
        "backward": measure(run.backward, repeats=5, queued=True),
    }
    recall = sampled_recall(q, k, run.index, sample(q.shape[1] // BLOCK))
    pairs = float(run.index.pairs().sum())
    return {
        "policy": config.index_policy, "segments": config.probe_segments, "top_p": config.top_p,
        "seq_len": q.shape[1], "heads": q.shape[2], "kv_heads": k.shape[2], "head_dim": q.shape[3],
        **{f"{name}_ms": round(found.ms, 3) for name, found in times.items()},
        "call_ms": round(sum(found.ms for found in times.values()), 3),
        "index_peak_mib": round(times["index"].peak_mib),
        "forward_tflops": round(4 * q.shape[3] * pairs / times["forward"].ms / 1e9, 1),
        "backward_tflops": round(10 * q.shape[3] * pairs / times["backward"].ms / 1e9, 1),
        "density": round(float(run.index.density()), 4), "recall": round(float(recall.mean()), 4),
        "recall_worst_head": round(float(recall.min()), 4), "synchronises": run.synchronises() or "no",
    }  # fmt: skip


def main() -> None:
    """Measures all policies, and writes the rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=131072)
    parser.add_argument("--heads", default="16/2/128", help="heads/kv_heads/head_dim")
    parser.add_argument("--top-p", type=float, default=0.9, help="the share of top_p, flexprefill and xattention")
    parser.add_argument("--policies", nargs="+", default=list(INDEX_POLICIES), choices=INDEX_POLICIES)
    parser.add_argument("--segments", nargs="+", type=int, default=[1], help="probe segments of policy top_p")
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON and Markdown results")
    args = parser.parse_args()
    heads, kv_heads, dim = map(int, args.heads.split("/"))
    tensors = structured_tensors(args.seq_len, heads, kv_heads, dim, "cuda")
    rows: list[Row] = []
    name = f"policies-DATE-{args.seq_len // 1024}k"
    if args.segments != [1]:
        name = f"segments-DATE-{args.seq_len // 1024}k-{args.heads.replace('/', '-')}"
    for policy, segments in product(args.policies, args.segments):
        if policy != "top_p" and segments != args.segments[0]:
            continue  # it has no segments: once is enough
        torch.cuda.empty_cache()
        config = MTrainingConfig(
            top_p=args.top_p, index_policy=policy, probe_segments=segments if policy == "top_p" else 1
        )
        rows.append(policy_row(config, tensors))
        write(rows, args.out, "benchmarks.bench_policies", name)
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
