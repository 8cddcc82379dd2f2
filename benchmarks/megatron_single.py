"""Trains with an unmodified Megatron-LM on one GPU: golden values, loss curves, speed beside dense, what composes.

    python -m benchmarks.megatron_single --megatron DIR --older DIR --data PREFIX --out DIR [--groups golden,curves,...]

The same models, options and results as `benchmarks.megatron_runs`. Runs are forked from a process that has loaded
Megatron-LM (`benchmarks.preloaded`), one for each of the two checkouts; the functional test and the runs of `PLAIN` are
started as a user would, by a plain `torch.distributed.run` after `megatron-mtraining enable`. A run whose outcome is to be a
refusal passes if it ended with that message.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .megatron_runs import (
    CURVES,
    EXPERTS,
    LOAD,
    LOCAL,
    MANY,
    MODEL,
    OURS,
    P1,
    P95,
    SAVE,
    SMALL,
    SPARSE,
    TE,
    Options,
    parser_of,
)
from .preloaded import GATE
from .run_pool import Run, run_all

ROOT = Path(__file__).parents[1]
CASE = "gpt_153m_mtraining_1gpu"
RECORDINGS = ("recorded", "again")
CURVE = (
    f"{MODEL} --seq-length 8192 --max-position-embeddings 8192 --global-batch-size 4 --train-iters 50 "
    "--lr-warmup-iters 5"
)
DENSE, SPARSE_SMALL = f"{TE} --attention-backend auto", f"{TE} {OURS} {P95}"
LONGER = "--train-iters 12 --exit-interval"

SPEED = {
    "speed_dense": DENSE,
    "speed_p95": SPARSE_SMALL,
    "speed_sparse": f"{TE} {SPARSE}",
}
"""One long sequence a step: dense; top-p alone, on a model whose attention is flat still; with few lines kept."""

CHECKS = {
    "small_dense": DENSE,
    "dense_saved": f"{DENSE} {LONGER} 5 {SAVE} OUT/from_dense",
    "upstream_attention": "",
    "small_p95": SPARSE_SMALL,
    "small_p95_again": SPARSE_SMALL,
    "fp8_delayed": f"{SPARSE_SMALL} --fp8-format hybrid --fp8-recipe delayed",
    "full_recompute": f"{SPARSE_SMALL} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective_recompute": f"{SPARSE_SMALL} --recompute-granularity selective",
    "offload_layers": f"{SPARSE_SMALL} --cpu-offloading-num-layers 2",
    "sparse_from_dense": f"{TE} {OURS} {P1} {LONGER} 10 {LOAD} OUT/from_dense {SAVE} OUT/from_sparse",
    "offload_modules": (
        f"{SPARSE_SMALL} --fine-grained-activation-offloading --offload-modules core_attn attn_proj "
        "--min-offloaded-tensor-size 1024"
    ),
    "local_spec": f"{LOCAL} {OURS} {P95}",
    "moe": f"{SPARSE_SMALL} {EXPERTS}",
    "hybrid": f"{SPARSE_SMALL} --hybrid-layer-pattern *-*-",
    "opt_in": SPARSE_SMALL,
    "dense_from_sparse": f"{DENSE} {LONGER} 12 {LOAD} OUT/from_sparse",
    "cuda_graph_refused": f"{SPARSE_SMALL} --cuda-graph-impl local",
    "fsdp": (
        f"{SPARSE_SMALL} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor --use-distributed-optimizer"
    ),
    "deterministic": f"{SPARSE_SMALL} --deterministic-mode",
    "connections_8": SPARSE_SMALL,
    "evaluation": f"{SPARSE_SMALL} --calculate-per-token-loss --eval-interval 2 --eval-iters 2",
    "evaluation_longer": (
        f"{SPARSE_SMALL} {LOAD} OUT/from_sparse --skip-train --eval-iters 2 --seq-length 8192 "
        "--max-position-embeddings 8192"
    ),
    "older_p95": SPARSE_SMALL,
    "older_local_spec": f"{LOCAL} {OURS} {P95}",
    "fp8_tensorwise": f"{SPARSE_SMALL} --fp8-format hybrid --fp8-recipe tensorwise",
    "fp16": f"{SPARSE_SMALL} --fp16 --initial-loss-scale 4096",
    "distributed_optimizer": (
        f"{SPARSE_SMALL} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    ),
    "guard_schedule_dump": (
        f"{TE} {OURS} --mtraining-top-p-schedule 1:0.95:4 --mtraining-guard-recall 0.99 --mtraining-dense-layers 0 "
        "--mtraining-dump-index OUT/index --mtraining-dump-steps 2"
    ),
    "convert_mode": f"{SPARSE_SMALL} --mtraining-layout-mode convert",
    "mtp": f"{SPARSE_SMALL} --mtp-num-layers 1",
    "qk_norm_yarn": (
        f"{SPARSE_SMALL} --qk-layernorm --position-embedding-type yarn --rotary-scaling-factor 4 "
        "--yarn-original-max-position-embeddings 1024"
    ),
    "mock_data": f"{SPARSE_SMALL} --mock-data",
    "packed": f"{SPARSE_SMALL} --mock-data",
    "small_p1": f"{TE} {OURS} {P1}",
}
"""A few steps of a small model each, those that matter most first: name -> options."""

OLDER = {"dense_saved", "sparse_from_dense", "dense_from_sparse", "evaluation_longer"}
AFTER = {
    "sparse_from_dense": "dense_saved",
    "dense_from_sparse": "sparse_from_dense",
    "evaluation_longer": "sparse_from_dense",
}
SCRIPTS = {"hybrid": "pretrain_hybrid.py"}
EXACT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
VARIABLES = {
    "connections_8": MANY,
    "fsdp": MANY,
    "deterministic": EXACT,
    "offload_modules": {"NVTE_CPU_OFFLOAD_V1": "1"},
}
PLAIN = {"opt_in", "offload_modules"}  # Transformer Engine reads NVTE_CPU_OFFLOAD_V1 when it is loaded
REFUSED = {"cuda_graph_refused": re.compile(r"megatron_mtraining: error: --cuda-graph-impl")}


@dataclass(frozen=True)
class Single:
    """How runs are started here: what they are given, the servers that have loaded the checkouts, ranks and (pretended)
    hosts of a run.
    """

    options: Options
    sockets: Path
    ranks: int = 1
    hosts: int = 1

    def start(self, name: str, words: str, by_agents: bool = False) -> tuple[str, ...]:
        """The command of a run that is forked, or (`by_agents`) started by torchrun."""
        older = is_older(name)
        checkout = self.options.older if older else self.options.megatron
        script = checkout / SCRIPTS.get(name, "pretrain_gpt.py")
        if name.startswith("packed"):
            script = ROOT / "tests" / "megatron" / "pretrain_packed.py"
        how = ("agents",) if by_agents else ("run", self.socket(older))
        client = (sys.executable, "-m", "benchmarks.preloaded", *how, str(self.ranks))
        return (*client, str(script.resolve()), *self.options.arguments(name, words))

    def functional_test(self, case: str, step: str) -> Run:
        """A functional test.

        Args:
            case: its name.
            step: `recorded` writes the golden values, `again` others beside the run's output, `repeated` compares.
        """
        start = (sys.executable, "-m", "tests.functional_tests", "run", case, "--megatron", str(self.options.megatron))
        output = self.options.out / "golden" / step
        flags = {"recorded": ("--record",), "again": ("--record", "--values", str(output)), "repeated": ()}[step]
        extra = ("--extra", self.options.extra) if self.options.extra else ()
        after = f"{case}_recorded" if step == "repeated" else None
        command = (*start, "--output", str(output), *flags, *extra)
        return Run(f"{case}_{step}", "single", command, timeout=200, after=after)

    def gated(self, name: str, words: str, chosen: dict[str, str]) -> Run:
        """A run that starts up beside others and then has the GPUs to itself."""
        gate = self.options.out / f"{name}.gate"
        command = self.start(name, words)
        return Run(name, "gated", command, chosen | {GATE: str(gate)}, timeout=400, gate=gate)

    def long(self, name: str, words: str, chosen: dict[str, str]) -> Run:
        """One long sequence a step, with the GPUs to itself."""
        length = self.options.speed_length
        one = f"--seq-length {length} --max-position-embeddings {length} --global-batch-size 1"
        logged = OURS in words and "--mtraining-log none" not in words
        metrics = f"--mtraining-metrics {self.options.out}/{name}.jsonl" if logged else ""
        return self.gated(name, f"{words} {MODEL} {one} {metrics}", chosen)

    def socket(self, older: bool) -> str:
        """The address of the server that has loaded one of the checkouts."""
        return str(self.sockets / ("older" if older else "megatron"))

    def serve(self, runs: Sequence[Run]) -> list[subprocess.Popen[bytes]]:
        """Starts the servers that these runs need."""
        checkouts = {False: self.options.megatron, True: self.options.older}
        start = (sys.executable, "-m", "benchmarks.preloaded", "serve")
        needed = sorted({is_older(run.name) for run in runs})
        return [subprocess.Popen((*start, self.socket(older), str(checkouts[older]))) for older in needed]


def is_older(name: str) -> bool:
    """Whether a run takes the checkout of the older release."""
    return name in OLDER or name.startswith(("older_", "packed"))


def variables(name: str) -> dict[str, str]:
    """The environment of a run."""
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **VARIABLES.get(name, {})}


def golden(single: Single) -> Iterator[Run]:
    """The functional test, recorded twice side by side."""
    for step in RECORDINGS:
        yield single.functional_test(CASE, step)


def repeated(single: Single) -> Iterator[Run]:
    """The functional test, compared with the golden values."""
    yield single.functional_test(CASE, "repeated")


def curves(single: Single) -> Iterator[Run]:
    """50 steps, 32,768 tokens each."""
    for name, (kind, words) in CURVES.items():
        if kind == "single":
            command = single.start(name, f"{CURVE} {words}")
            yield Run(name, kind, command, variables(name), timeout=240, after=f"{CASE}_{RECORDINGS[-1]}")


def speed(single: Single) -> Iterator[Run]:
    """Each run of the group has the GPU to itself."""
    for name, words in SPEED.items():
        yield single.long(name, f"{words} --train-iters 8 --lr-warmup-iters 1", variables(name))


def checks(single: Single) -> Iterator[Run]:
    """A few steps of each combination."""
    for name, words in CHECKS.items():
        seconds = 75
        if name == "upstream_attention":
            tests = (str(ROOT / "tools" / "upstream_attention.py"), "--megatron", str(single.options.megatron))
            command: tuple[str, ...] = (sys.executable, *tests)
            seconds = 170
        elif name in PLAIN:
            command = single.options.training(name, f"{SMALL} {words}", 1)
        else:
            command = single.start(name, f"{SMALL} {words}")
        yield Run(name, "small", command, variables(name), timeout=seconds, after=AFTER.get(name))


GROUPS = {"golden": golden, "curves": curves, "speed": speed, "repeated": repeated, "checks": checks}


def judge(result: dict[str, Any], logs: Path) -> dict[str, Any]:
    """Looks closer than the exit status, which becomes 1 for a run without what it was to show.

    That is the refusal of a run that is to be refused, a validation loss of an evaluation, and else finite losses.
    """
    name = result["name"]
    text = (logs / f"{name}.log").read_text(errors="replace")
    if name in REFUSED:
        result["refusal"] = [line for line in text.splitlines() if REFUSED[name].search(line)][:1]
        result["status"] = int(not result["refusal"] or result["status"] == 0)
    elif name == "upstream_attention":
        result["tests"] = re.findall(r"\d+ (?:passed|failed|skipped|errors?)\b", text)
    elif name.startswith("evaluation") and "validation_loss" not in result:
        result["status"] = result["status"] or 1
    elif not name.startswith("gpt_") and name != "evaluation_longer":
        finite = result["loss"] and all(loss is not None and math.isfinite(loss) for loss in result["loss"])
        result["status"] = result["status"] or int(not finite)
    return result


def parse(description: str, groups: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    return parser_of(description, groups, 65536).parse_args()


def run_groups(
    given: argparse.Namespace,
    groups: dict[str, Callable[[Single], Iterator[Run]]],
    ranks: int = 1,
    hosts: int = 1,
    judge: Callable[[dict[str, Any], Path], dict[str, Any]] = judge,
) -> None:
    """Runs the groups; the next begins while the last one ends.

    Args:
        given: the command line.
        groups: what makes the runs of each group.
        ranks: processes of a run.
        hosts: pretended hosts that these are on.
        judge: what looks closer at each result, given the folder of the logs.
    """
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out.resolve()
    options = Options(given.megatron, given.older, given.data, out, given.speed_length, given.extra)
    single = Single(options, out, ranks, hosts)
    only = set(filter(None, given.only.split(",")))
    runs = [run for group in given.groups.split(",") for run in groups[group](single) if not only or run.name in only]

    def note(result: dict[str, Any]) -> None:
        result = judge(result, out / "logs")
        with (out / "runs.jsonl").open("a") as lines:
            lines.write(json.dumps(result) + "\n")
        last = [result[name][-1] if result[name] else None for name in ("steps", "loss", "grad_norm", "ms")]
        print(f"{result['name']:34} status {result['status']}  {result['seconds']:6.1f} s  last {last}", flush=True)

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the runs are stopped, too
    servers = single.serve(runs)
    try:
        run_all(runs, out / "logs", note)
    finally:
        for server in servers:
            server.terminate()


def main() -> None:
    """Runs the groups."""
    run_groups(parse(str(__doc__), list(GROUPS)), GROUPS)


if __name__ == "__main__":
    main()
