"""A whole training step at a fixed sparsity, run as one: ours, the same ring zigzag, the paper's baselines, dense.

    torchrun --nproc-per-node 2 -m benchmarks.bench_step --seq-len 262144 --layers 4 --out benchmarks/results

The first layers of a real model's shape, embedding, output layer and loss (in pieces), backward with every layer
recomputed, gradients summed over the ranks, AdamW with fp32 weights; one sequence of random tokens, random weights. Every
call estimates its index; budgets are fitted so that 5% of the pairs are kept (``benchmarks.ring.systems``). Times are
those of the slowest rank.
``scaled`` is the step of the model with all of its layers, from the measured parts: it was not run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.ring import real
from benchmarks.ring.cases import Row
from benchmarks.ring.output import write
from benchmarks.ring.systems import SYSTEMS, Sparse, System, dense_attend
from benchmarks.ring.transformer import Attend, Transformer
from megatron_mtraining import Layout
from megatron_mtraining.comm import RingGroups
from megatron_mtraining.config import BLOCK
from megatron_mtraining.simulator.memory import MODELS, Model

MODULE = "benchmarks.bench_step"
FITS = 1
"""Steps that fit the budgets; they warm up, too."""


def scaled_ms(times: dict[str, float], model: Model, layers: int) -> float:
    """The step of all layers, from one of a few: the layers' part and the optimizer's grow, the output layer's does not."""
    many = model.layers / layers
    weights = model.hidden * model.vocabulary
    grown = (weights + model.layers * model.layer_parameters) / (weights + layers * model.layer_parameters)
    per_layer = times["forward"] + times["backward"]
    per_weight = times["gradients"] + times["optimizer"]
    return many * per_layer + times["output layer and loss"] + grown * per_weight


class Run:
    """One system's steps on this rank."""

    def __init__(self, args: argparse.Namespace, system: System, groups: RingGroups, device: torch.device) -> None:
        self.args, self.system, self.model = args, system, MODELS[args.model]
        size, self.sparse = groups.cp_size, None
        self.attend: Attend
        if system.policy is None:
            layout = Layout.zigzag(args.seq_len, size)
            self.how, self.attend = dense_attend(self.model, groups)
        else:
            self.sparse = Sparse(system, args.seq_len, args.density, groups)
            layout, self.how, self.attend = self.sparse.layout, "this package", self.sparse
        position = layout.token_position(groups.cp_rank).to(device)
        self.step = Transformer(self.model, args.layers, args.seq_len, position, groups.cp)

    def warm_up(self) -> None:
        """Fits the budgets; dense, or with counted budgets, one layer runs once."""
        if self.sparse is None or not self.system.fitted:
            self.step.step(self.attend, layers=1)
            return
        for _ in range(FITS):
            self.sparse.note(self.args.layers)
            self.step.step(self.attend)
            self.sparse.fit()

    def measure(self) -> Row:
        """The row of this system; collective."""
        steps = []
        for _ in range(self.args.dense_repeats if self.sparse is None else self.args.repeats):
            dist.barrier()
            if self.sparse is not None:
                self.sparse.note(self.args.layers)
            steps.append(self.step.step(self.attend))
        mine = {name: statistics.median(times[name] for _, times in steps) for name in steps[0][1]}
        times = real.slowest(mine)
        loss = torch.tensor([loss for loss, _ in steps], device=self.step.tokens.device)
        dist.all_reduce(loss)
        size = dist.get_world_size()
        density = 1.0 if self.sparse is None else self.sparse.measured_density()
        scaled = scaled_ms(times, self.model, self.args.layers)
        return {
            "system": self.system.name, "attention": self.how, "model": self.args.model, "layers": self.args.layers,
            "seq_len": self.args.seq_len, "cp_size": size, "density": round(density, 4), "steps": len(steps),
            **{f"{name}_ms": round(ms, 2) for name, ms in times.items()},
            "tokens_per_s": round(self.args.seq_len / times["step"] * 1e3),
            "scaled_step_ms": round(scaled, 1), "scaled_tokens_per_s": round(self.args.seq_len / scaled * 1e3),
            "loss": round(float(loss[-1]), 4), "peak_gib": peak_gib(),
        }  # fmt: skip


def peak_gib() -> float:
    """Most memory that this rank's tensors took."""
    return round(torch.cuda.max_memory_allocated() / 2**30, 1) if torch.cuda.is_available() else 0.0


def rows(args: argparse.Namespace, groups: RingGroups, device: torch.device) -> Iterator[Row]:
    """A row a system, as they come."""
    for name in args.systems:
        run = Run(args, SYSTEMS[name], groups, device)
        run.warm_up()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        yield run.measure()
        del run
        if device.type == "cuda":
            torch.cuda.empty_cache()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-3b", choices=sorted(MODELS))
    parser.add_argument("--layers", type=int, default=4, help="so many layers of the model")
    parser.add_argument("--seq-len", type=int, default=262144)
    parser.add_argument("--density", type=float, default=0.05, help="share of the pairs that sparse attention keeps")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dense-repeats", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON and Markdown results")
    args = parser.parse_args()
    if not 0 < args.density < 1:
        parser.error(f"--density {args.density}: must be between 0 and 1")
    if not 1 <= args.layers <= MODELS[args.model].layers:
        parser.error(f"--layers {args.layers}: must be from 1 to {MODELS[args.model].layers}, those of {args.model}")
    for name in ("repeats", "dense_repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    unit = 2 * BLOCK * int(os.environ.get("WORLD_SIZE", "1"))  # two zigzag chunks a rank
    if args.seq_len < 1 or args.seq_len % unit:
        parser.error(f"--seq-len {args.seq_len}: must be a multiple of {unit}, two chunks of {BLOCK} tokens a rank")
    if "WORLD_SIZE" not in os.environ:
        parser.error("run it under torchrun: torchrun --nproc-per-node 1 -m benchmarks.bench_step ...")
    return args


def main() -> None:
    """This process's rank of a run under torchrun; writes the results as they come."""
    args = arguments()
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    size = dist.get_world_size()
    groups = real.ring_groups(size)
    found: list[Row] = []
    for row in rows(args, groups, device):
        found.append(row)
        if dist.get_rank() == 0:
            write(found, args.out, MODULE, f"step-DATE-{args.model}-{args.layers}-layers-{size}-gpu" + "s" * (size > 1))
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
