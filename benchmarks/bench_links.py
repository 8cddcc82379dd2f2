"""Flat against hierarchical rings on links of different speed: two "nodes" of two ranks on one Linux machine, as root.

    python -m benchmarks.bench_links --out benchmarks/results

Two network namespaces stand for two nodes. Every rank has a link of its own to the other node (a veth pair) and one within
its node (loopback); `tc tbf` limits their rates. Four gloo ranks run the package's rings over them:

1. with the reference operators: every rank's output and gradients are compared bit by bit with all ranks played in one
   process, for both rings;
2. with a sleep in place of each attention kernel, as long as the paper's compute : intra-node : inter-node times of
   0.51 : 0.13 : 0.98 ask for. The sleep stands for a GPU's kernel; transfers, schedule and executor are the real ones.

Needs `ip` and `tc` (iproute2). The namespaces are removed at the end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_mtraining import Layout, MTrainingConfig, VerticalSlashIndex
from megatron_mtraining.attention import attention_on_groups
from megatron_mtraining.comm import GroupExchange, RingGroups
from megatron_mtraining.documents import Documents
from megatron_mtraining.launches import Launch, forward_plan
from megatron_mtraining.ops import Operators
from megatron_mtraining.ring import RingForward, run
from megatron_mtraining.ring_call import RingCall
from megatron_mtraining.ring_profile import PassTimes, profile_ring
from megatron_mtraining.testing import run_virtual

COMPUTE, INTRA, INTER = 0.51, 0.13, 0.98
"""The paper's times of one step at 512K on 4 x 8 GPUs, in ms: only their ratio counts here."""

RANKS, INNER = 4, 2
WARM_UP = 8
SET = "import sys, pathlib; pathlib.Path('/proc/sys/net/ipv4', sys.argv[1]).write_text(sys.argv[2])"
"""Program that sets a TCP option of the namespace that it runs in."""

NODES = ("mtraining0", "mtraining1")
DIM, KV_HEADS = 64, 2
SMALLEST_MIB = 64 * 2 * KV_HEADS * DIM * 4 / 2**20


def shell(*command: str) -> None:
    """Runs a command.

    Raises:
        SystemExit: with its error output, if it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


def set_up(inter_mbit: float) -> None:
    """Makes the namespaces, a link between them for each of a node's ranks, and limits all rates."""
    intra_mbit = inter_mbit * INTER / INTRA
    for node in NODES:
        shell("ip", "netns", "add", node)
        shell("ip", "-n", node, "link", "set", "lo", "up")
        # Windows as large as a chunk from the start, as a network for this work has them.
        for setting in (
            "tcp_rmem=4096 8388608 33554432",
            "tcp_wmem=4096 8388608 33554432",
            "tcp_slow_start_after_idle=0",
        ):
            name, value = setting.split("=")
            shell("ip", "netns", "exec", node, sys.executable, "-c", SET, name, value)
        # A node's two ranks send at the same time, and share its loopback.
        limit(node, "lo", 2 * intra_mbit)
    for link in range(INNER):
        ends = [f"link{link}n{side}" for side in range(2)]
        shell("ip", "-n", NODES[0], "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        shell("ip", "-n", NODES[0], "link", "set", ends[1], "netns", NODES[1])
        for side, node in enumerate(NODES):
            shell("ip", "-n", node, "addr", "add", f"10.77.{link}.{side + 1}/24", "dev", ends[side])
            shell("ip", "-n", node, "link", "set", ends[side], "up")
            limit(node, ends[side], inter_mbit)


def limit(node: str, device: str, mbit: float) -> None:
    """Limits what a device sends."""
    rate = f"{mbit:.0f}mbit"
    queue = ("tbf", "rate", rate, "burst", "256kb", "latency", "500ms")
    shell("ip", "netns", "exec", node, "tc", "qdisc", "add", "dev", device, "root", *queue)


def tear_down() -> None:
    """Removes the namespaces; the links go with them."""
    for node in NODES:
        subprocess.run(["ip", "netns", "del", node], capture_output=True)


class Sleeping:
    """Operators that take a GPU's time and compute nothing: forward sleeps so many seconds per chunk."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def attention_forward_(self, q: torch.Tensor, k: torch.Tensor, *_: Any) -> None:
        """Sleeps for the chunks of ``k``."""
        time.sleep(self.seconds * k.shape[0])


def make_groups(inner_size: int) -> RingGroups:
    """Groups of a flat or hierarchical ring over all ranks, one communicator a channel; collective."""
    everyone = list(range(RANKS))
    if inner_size == RANKS:
        return RingGroups(dist.new_group(everyone), inner_grad=dist.new_group(everyone))
    rings = [everyone[i : i + inner_size] for i in range(0, RANKS, inner_size)]
    columns = [everyone[i::inner_size] for i in range(inner_size)]
    made = []
    for lists in (rings, rings, columns, columns):
        groups = [(ranks, dist.new_group(ranks)) for ranks in lists]
        made.append(next(group for ranks, group in groups if dist.get_rank() in ranks))
    return RingGroups(dist.new_group(everyone), made[0], made[2], made[1], made[3])


def exchange_ms(groups: RingGroups, channel_ring: tuple[int, int], chunk: torch.Tensor, outer: bool) -> float:
    """Time of one exchange of a chunk by all ranks at once on a channel, median of 5."""
    plan = forward_plan(dist.get_rank(), *channel_ring)
    launch = plan.launches[0]
    move = launch.outer if outer else launch.keys[0]
    assert move is not None
    exchange, received, times = GroupExchange(groups), torch.empty_like(chunk), []
    for _ in range(WARM_UP + 5):
        dist.barrier()
        began = time.perf_counter()
        exchange.wait(exchange.post([(move.transfer, chunk, received)]))
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[WARM_UP:])


def slowest(value: float) -> float:
    """The largest over the ranks."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def check_bits(groups: dict[str, RingGroups]) -> dict[str, Any]:
    """Both rings with the reference operators, forward and backward, against one process that plays all ranks."""
    rank, layout, config = dist.get_rank(), Layout.striped(2048, RANKS), MTrainingConfig(top_p=0.8)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2048, h, DIM, dtype=torch.float64, generator=generator) for h in (4, 2, 2, 4)]
    found: dict[str, Any] = {}
    results = {}
    for name, ring in groups.items():
        leaves = [layout.shard(x, rank).requires_grad_() for x in whole[:3]]
        began = time.perf_counter()
        out = attention_on_groups(*leaves, config=config, groups=ring, layout=layout)
        mine = [out, *torch.autograd.grad(out, leaves, layout.shard(whole[3], rank))]
        seconds = time.perf_counter() - began
        leaves = [x.clone().requires_grad_() for x in whole[:3]]
        inner = INNER if ring.inner is not None else RANKS
        out = run_virtual(*leaves, layout=layout, config=config, inner_size=inner)
        expected = [layout.shard(x, rank) for x in (out, *torch.autograd.grad(out, leaves, whole[3]))]
        same = all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
        results[name] = mine
        found[name] = {"bits_equal_one_process": slowest(float(not same)) == 0, "reference_s": slowest(seconds)}
    pairs = zip(results["flat"], results["hierarchical"], strict=True)
    found["flat_minus_hierarchical"] = slowest(max(float((a - b).detach().abs().max()) for a, b in pairs))
    return found


def ring_call(ring: RingGroups, seq_len: int, seconds: float) -> RingCall:
    """A forward call whose kernels sleep; diagonal alone, no columns."""
    index = VerticalSlashIndex.from_lines([[[0]] * KV_HEADS], [[[]] * KV_HEADS], seq_len=seq_len)
    assert index.documents == Documents.single(seq_len)
    config = MTrainingConfig(chunks_per_launch=1)
    inner = INNER if ring.inner is not None else RANKS
    ops = Operators(Sleeping(seconds), 0)
    layout = Layout.from_config(config, seq_len, RANKS)
    return RingCall(index, layout, config, 1.0, dist.get_rank(), inner, ops, GroupExchange(ring))


def time_ring(ring: RingGroups, chunk: torch.Tensor, seconds: float, repeats: int) -> dict[str, Any]:
    """Forward passes over the links, profiled."""
    call = ring_call(ring, chunk.shape[2] * RANKS, seconds)
    q = torch.zeros(1, chunk.shape[2], KV_HEADS, DIM)
    passes: list[PassTimes] = []
    for _ in range(repeats + 1):
        dist.barrier()
        with profile_ring() as profile:
            run([RingForward(call, q, chunk[0], chunk[1])])
        passes += profile.read()
    passes = passes[1:]
    launches: tuple[Launch, ...] = call.plan(backward=False).launches
    waits = [n for n, launch in enumerate(launches) if launch.awaits_outer]
    outer = [(sum(t.end - t.begin for t in p.transfers if t.channel == "outer"), p) for p in passes]
    row = {
        "ms": slowest(statistics.median(p.total_ms for p in passes)),
        "compute_ms": slowest(statistics.median(p.compute_ms for p in passes)),
        "exposed_ms": slowest(statistics.median(p.exposed_ms for p in passes)),
    }
    if waits:
        row["outer_ms"] = slowest(statistics.median(ms for ms, _ in outer))
        row["outer_exposed_ms"] = slowest(statistics.median(sum(p.launches[n].stall_ms for n in waits) for p in passes))
        row["outer_hidden"] = 1 - row["outer_exposed_ms"] / row["outer_ms"]
    return {name: round(value, 3) for name, value in row.items()}


def work(rank: int, store: str, options: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    groups = {"flat": make_groups(RANKS), "hierarchical": make_groups(INNER)}
    result: dict[str, Any] = {"reference": check_bits(groups)}
    tokens = int(options.chunk_mib * 2**20 / (2 * KV_HEADS * DIM * 4)) // 64 * 64
    chunk = torch.randn(2, 1, tokens, KV_HEADS, DIM)
    flat_ms = slowest(exchange_ms(groups["flat"], (RANKS, 1), chunk, outer=False))
    intra_ms = slowest(exchange_ms(groups["hierarchical"], (INNER, INNER), chunk, outer=False))
    inter_ms = slowest(exchange_ms(groups["hierarchical"], (INNER, INNER), chunk, outer=True))
    compute_ms = inter_ms * COMPUTE / INTER
    result["links"] = {
        "chunk_mib": round(chunk.numel() * 4 / 2**20, 3), "intra_ms": round(intra_ms, 2), "inter_ms": round(inter_ms, 2),
        "flat_hop_ms": round(flat_ms, 2), "compute_ms": round(compute_ms, 2),
        "ratio": [round(x * INTER / inter_ms, 3) for x in (compute_ms, intra_ms, inter_ms)],
    }  # fmt: skip
    for name, ring in groups.items():
        result[name] = time_ring(ring, chunk, compute_ms / 1e3, options.repeats)
    result["speed_up"] = round(result["flat"]["ms"] / result["hierarchical"]["ms"], 3)
    # Flat: every step but the last waits for a slow hop. Hierarchical: compute alone.
    bound = ((RANKS - 1) * max(inter_ms, compute_ms) + compute_ms) / (RANKS * compute_ms)
    result["bound"] = round(bound, 3)
    if rank == 0:
        Path(f"{store}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def start_ranks(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the four ranks in their namespaces; the result of rank 0."""
    store = folder / "store"
    ranks = []
    for rank in range(RANKS):
        node, link = divmod(rank, INNER)
        command = ["ip", "netns", "exec", NODES[node], sys.executable, "-m", "benchmarks.bench_links"]
        command += ["--rank", str(rank), "--store", str(store), "--chunk-mib", str(options.chunk_mib)]
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": f"link{link}n{node}", "OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen([*command, "--repeats", str(options.repeats)], env=variables))
    try:
        codes = [process.wait(timeout=options.timeout) for process in ranks]
        if any(codes):
            raise SystemExit("a rank failed; its error is above")
    finally:
        for process in ranks:
            process.kill()
    found: dict[str, Any] = json.loads(Path(f"{store}.json").read_text())
    return found


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    links, reference = result["links"], result["reference"]
    flat, hier = result["flat"], result["hierarchical"]
    same = all(reference[name]["bits_equal_one_process"] for name in ("flat", "hierarchical"))
    return "\n".join([
        f"# Flat and hierarchical ring on shaped links, {result['date']}", "",
        f"`{result['command']}`: 2 nodes x 2 gloo ranks,",
        f"chunks of {links['chunk_mib']} MiB. A sleep stands for each attention kernel; transfers and executor are real.", "",
        f"Compute : intra : inter measured {' : '.join(map(str, links['ratio']))} (asked for 0.51 : 0.13 : 0.98).", "",
        "| ring | ms | compute ms | exposed ms | outer transfer ms | of it exposed ms | hidden |",
        "|---|---|---|---|---|---|---|",
        f"| flat | {flat['ms']} | {flat['compute_ms']} | {flat['exposed_ms']} | | | |",
        f"| hierarchical | {hier['ms']} | {hier['compute_ms']} | {hier['exposed_ms']} | {hier['outer_ms']} | "
        f"{hier['outer_exposed_ms']} | {100 * hier['outer_hidden']:.1f} % |", "",
        f"Speed-up {result['speed_up']}; {result['bound']} if the flat ring's hops took as long as single exchanges.", "",
        f"Reference operators over the same links, forward and backward, fp64: equal bit by bit to one process: {same}; "
        f"largest difference between the two rings {reference['flat_minus_hierarchical']:.1e} (they merge chunks in another "
        "order).", "",
    ])  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the JSON and Markdown results")
    parser.add_argument("--inter-mbit", type=float, default=200, help="rate of a rank's link between the nodes")
    parser.add_argument("--chunk-mib", type=float, default=4.0, help="size of a K|V chunk")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=300, help="seconds until the ranks are stopped")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in ("inter_mbit", "chunk_mib", "repeats", "timeout"):
        value = getattr(options, name)
        if not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} {value}: must be above 0")
    if options.chunk_mib < SMALLEST_MIB:
        parser.error(f"--chunk-mib {options.chunk_mib}: must be at least {SMALLEST_MIB}, 64 tokens")
    return options


def main() -> None:
    """Sets the links up, runs, takes them down, writes the result."""
    options = arguments()
    if options.rank is not None:
        work(options.rank, options.store, options)
        return
    missing = [f"{tool} (package iproute2)" for tool in ("ip", "tc") if shutil.which(tool) is None]
    missing += ["root"] * (os.geteuid() != 0) + ["--out"] * (options.out is None)
    if missing:
        raise SystemExit(f"bench_links: needs {', '.join(missing)}")
    tear_down()
    try:
        set_up(options.inter_mbit)
        with tempfile.TemporaryDirectory() as folder:
            result = start_ranks(Path(folder), options)
    finally:
        tear_down()
    date = datetime.date.today().isoformat()
    given = " ".join(sys.argv[1:]).replace(str(options.out), "benchmarks/results")
    result = {"date": date, "command": f"python -m benchmarks.bench_links {given}", **result}
    options.out.mkdir(parents=True, exist_ok=True)
    name = options.out / f"links-{date}-netns"
    name.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    name.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
