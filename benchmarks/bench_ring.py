"""Rings compared in one run: layouts, hierarchy and density, on real ranks or on ranks played on one GPU.

    torchrun --nproc-per-node 2 -m benchmarks.bench_ring --seq-lens 65536 262144 --out benchmarks/results
    python -m benchmarks.bench_ring --virtual 4x8 --seq-lens 524288 --out benchmarks/results

Real ranks: time of a pass (slowest rank), exposed communication, share of the transfers hidden. Virtual ranks (NODESxRANKS):
compute time of every rank and launch without traffic, and its imbalance. Both: imbalance in pairs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.problems import Problem
from megatron_mtraining import Layout, MTrainingConfig, VerticalSlashIndex
from megatron_mtraining.attention import attention_on_groups
from megatron_mtraining.comm import RingGroups
from megatron_mtraining.metrics import imbalance_degrees, work_table
from megatron_mtraining.ring_profile import PassTimes, profile_ring
from megatron_mtraining.testing import run_virtual

Row = dict[str, object]


@dataclass(frozen=True)
class Case:
    """One way to run the ring.

    Attributes:
        layout: striped or zigzag.
        inner_size: ranks of an inner ring.
        dense: every distance on.
        chunks: chunks a launch; ``None``: the automatic choice.
    """

    name: str
    layout: str
    inner_size: int
    dense: bool = False
    chunks: int | None = None

    def config(self) -> MTrainingConfig:
        """The attention's options."""
        return MTrainingConfig(layout=self.layout, dense=self.dense, chunks_per_launch=self.chunks)


def cases(cp_size: int, inner_size: int, with_dense: bool) -> list[Case]:
    """The rings to compare; the first is ours."""
    found = [Case("striped", "striped", cp_size), Case("zigzag", "zigzag", cp_size)]
    if cp_size > 2:
        found.append(Case("striped, one chunk a launch", "striped", cp_size, chunks=1))
    if inner_size < cp_size:
        found.insert(0, Case("striped, hierarchical", "striped", inner_size))
        found.append(Case("zigzag, hierarchical", "zigzag", inner_size))
    if with_dense:
        found += [Case("dense striped", "striped", cp_size, True), Case("dense zigzag", "zigzag", cp_size, True)]
    return found


def problem_of(seq_len: int, heads: str) -> Problem:
    """The reference pattern at a length; ``heads`` is heads/kv_heads/head_dim."""
    return Problem(seq_len, *map(int, heads.split("/")))


def describe(problem: Problem, case: Case, index: VerticalSlashIndex, layout: Layout) -> Row:
    """What both kinds of run say of a case."""
    row: Row = {
        "case": case.name, "seq_len": problem.seq_len, "heads": problem.heads, "kv_heads": problem.kv_heads,
        "head_dim": problem.head_dim, "cp_size": layout.cp_size, "inner_size": case.inner_size,
        "density": round(float(index.density()), 4),
    }  # fmt: skip
    pairs = imbalance_degrees(work_table(index, layout, case.inner_size))
    return row | {f"pairs_{name}": round(value, 3) for name, value in pairs.items()}


def index_of(problem: Problem, case: Case) -> VerticalSlashIndex:
    """The reference pattern, or everything."""
    if not case.dense:
        return problem.index()
    return VerticalSlashIndex.dense(1, problem.heads, problem.index().documents, torch.device("cuda"))


def time_table(passes: list[PassTimes], phase: str) -> torch.Tensor:
    """Compute time ``[ranks, launches]`` in ms of one pass of every rank."""
    mine = sorted((p for p in passes if p.phase == phase), key=lambda p: p.cp_rank)
    return torch.tensor([[launch.compute_ms for launch in p.launches] for p in mine])


def virtual(problem: Problem, case: Case, size: int) -> list[Row]:
    """All ranks played on this GPU."""
    layout = Layout.from_config(case.config(), problem.seq_len, size)
    index = index_of(problem, case)
    q, k, v, dout = problem.tensors()
    for x in (q, k, v):
        x.requires_grad_()
    tables: dict[str, list[torch.Tensor]] = {"forward": [], "backward": []}
    for _ in range(3):
        with profile_ring() as profile:
            out = run_virtual(q, k, v, layout=layout, config=case.config(), inner_size=case.inner_size, index=index)
            torch.autograd.grad(out, (q, k, v), dout)
        passes = profile.read()
        for phase, found in tables.items():
            found.append(time_table(passes, phase))
        del out
    rows = []
    flops = problem.head_dim * float(index.pairs().sum()) / size
    for phase, found in tables.items():
        table = torch.stack(found[1:]).amin(0)  # the first run warms up
        busy = float(table.sum(1).mean())
        row = describe(problem, case, index, layout) | {"pass": phase, "launches": table.shape[1]}
        row |= {
            "compute_ms": round(busy, 3),
            "slowest_ms": round(float(table.amax(0).sum()), 3),
            "tflops": round((4 if phase == "forward" else 10) * flops / busy / 1e9, 1),
            **{f"time_{name}": round(value, 3) for name, value in imbalance_degrees(table).items()},
            "per_launch_ms": [round(x, 4) for x in table.mean(0).tolist()],
        }
        rows.append(row)
    return rows


def real_groups(inner_size: int) -> RingGroups:
    """The groups of a ring over the whole world, one communicator a channel; collective."""
    size, rank = dist.get_world_size(), dist.get_rank()
    everyone = list(range(size))
    if inner_size == size:
        return RingGroups(dist.group.WORLD, inner_grad=dist.new_group(everyone))
    made = []
    for lists in (
        [everyone[i : i + inner_size] for i in range(0, size, inner_size)],
        [everyone[i::inner_size] for i in range(inner_size)],
    ):
        for _ in range(2):
            groups = [(ranks, dist.new_group(ranks)) for ranks in lists]
            made.append(next(group for ranks, group in groups if rank in ranks))
    return RingGroups(dist.group.WORLD, made[0], made[2], made[1], made[3])


def real(problem: Problem, case: Case, groups: RingGroups, repeats: int) -> list[Row]:
    """This rank's part of a measured ring; the rows are those of the slowest rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    layout = Layout.from_config(case.config(), problem.seq_len, size)
    index = index_of(problem, case)
    torch.manual_seed(0)
    tensors = [layout.shard(x, rank) for x in problem.tensors()]
    leaves = [x.requires_grad_() for x in tensors[:3]]
    kept: dict[str, list[PassTimes]] = {"forward": [], "backward": []}
    wall: dict[str, list[float]] = {"forward": [], "backward": []}
    for number in range(2 * repeats + 1):
        profiled = number > repeats  # times without profiling first
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        dist.barrier()
        torch.cuda.synchronize()
        # Behind other work, as in a model whose launches run ahead of the device.
        torch.cuda._sleep(20_000_000)
        if profiled:
            with profile_ring() as profile:
                out = attention_on_groups(*leaves, config=case.config(), groups=groups, layout=layout, index=index)
                torch.autograd.grad(out, leaves, tensors[3])
            for times in profile.read():
                kept[times.phase].append(times)
            continue
        events[0].record()
        out = attention_on_groups(*leaves, config=case.config(), groups=groups, layout=layout, index=index)
        events[1].record()
        torch.autograd.grad(out, leaves, tensors[3])
        events[2].record()
        torch.cuda.synchronize()
        if number:
            wall["forward"].append(events[0].elapsed_time(events[1]))
            wall["backward"].append(events[1].elapsed_time(events[2]))
    rows = []
    for phase, found in kept.items():
        mine = {
            "ms": statistics.median(wall[phase]),
            "exposed_ms": statistics.median(p.exposed_ms for p in found),
            "transfer_ms": statistics.median(p.transfer_ms for p in found),
            "hidden": statistics.median(p.hidden for p in found),
            "tail_ms": statistics.median(p.tail_ms for p in found),
            "compute": [statistics.median(p.launches[i].compute_ms for p in found) for i in range(len(found[0].launches))],
        }  # fmt: skip
        ranks: list[dict] = [{}] * size
        dist.all_gather_object(ranks, mine)
        table = torch.tensor([r["compute"] for r in ranks])
        rows.append(
            describe(problem, case, index, layout) | {"pass": phase, "ms": round(max(r["ms"] for r in ranks), 3)}
            | {name: round(max(r[name] for r in ranks), 3) for name in ("exposed_ms", "transfer_ms", "tail_ms")}
            | {"hidden": round(min(r["hidden"] for r in ranks), 3)}
            | {f"time_{name}": round(value, 3) for name, value in imbalance_degrees(table).items()}
            | {"per_launch_ms": [[round(x, 3) for x in r["compute"]] for r in ranks]}
        )  # fmt: skip
    return rows


def markdown(rows: list[Row], header: str) -> str:
    """All rows as one table; lists stay in the JSON file."""
    keys = [key for key in dict.fromkeys(k for row in rows for k in row) if key != "per_launch_ms"]
    lines = [header, "", "| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    lines += ["| " + " | ".join(str(row.get(key, "")) for key in keys) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write(rows: list[Row], folder: Path, where: str) -> None:
    """The dated JSON and Markdown files."""
    folder.mkdir(parents=True, exist_ok=True)
    date = datetime.date.today().isoformat()
    options = " ".join(sys.argv[1:]).replace(str(folder), "benchmarks/results")
    command = f"python -m benchmarks.bench_ring {options}"
    name = folder / f"ring-{date}-{where}"
    head = {"date": date, "command": command, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    name.with_suffix(".json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    title = f"# Rings on {head['device']}, {date}\n\n`{command}`, {where}, torch {head['torch']}."
    name.with_suffix(".md").write_text(markdown(rows, title))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[65536])
    parser.add_argument("--heads", default="16/2/128", help="heads/kv_heads/head_dim")
    parser.add_argument("--virtual", help="NODESxRANKS: play all ranks on this GPU, e.g. 4x8")
    parser.add_argument("--inner", type=int, help="ranks of an inner ring, to compare hierarchies on real ranks")
    parser.add_argument("--dense", action="store_true", help="dense attention on the same rings too")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON and Markdown results")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark and writes the results as they come."""
    args = arguments()
    rows: list[Row] = []
    if args.virtual:
        nodes, inner = map(int, args.virtual.split("x"))
        for seq_len in args.seq_lens:
            for case in cases(nodes * inner, inner, args.dense):
                rows += virtual(problem_of(seq_len, args.heads), case, nodes * inner)
                write(rows, args.out, f"virtual-{args.virtual}")
                print(json.dumps(rows[-2:]), flush=True)
        return
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    size = dist.get_world_size()
    groups = {inner: real_groups(inner) for inner in dict.fromkeys((args.inner or size, size))}
    for seq_len in args.seq_lens:
        for case in cases(size, args.inner or size, args.dense):
            rows += real(problem_of(seq_len, args.heads), case, groups[case.inner_size], args.repeats)
            if dist.get_rank() == 0:
                write(rows, args.out, f"{size}-gpus")
                print(json.dumps(rows[-2:]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
