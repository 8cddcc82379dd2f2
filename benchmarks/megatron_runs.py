"""Trains with an unmodified Megatron-LM on two GPUs: loss curves, golden values, speed beside dense, and what composes.

    python -m benchmarks.megatron_runs --megatron DIR --older DIR --data PREFIX --out DIR [--groups curves,golden,speed,checks]

DIR are checkouts of Megatron-LM, PREFIX a dataset of `examples/prepare_text.py`. Results are written to OUT/runs.jsonl, a
line per run as it ends, logs to OUT/logs. The functional tests of the group `golden` record their golden values.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .run_pool import Run, run_all

OURS = "--attention-backend mtraining"
TEXT = "--tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 128"
COMMON = (
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 1 --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --weight-decay 0.01 "
    "--clip-grad 1.0 --adam-beta2 0.95 --init-method-std 0.02 --bf16 --log-interval 1 "
    "--eval-interval 1000 --eval-iters 0 --no-create-attention-mask-in-dataloader --no-gradient-accumulation-fusion"
)
# 154 million parameters.
MODEL = (
    "--num-layers 14 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 2 --kv-channels 128"
)
SMALL = (
    "--num-layers 4 --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --kv-channels 128 --seq-length 4096 --max-position-embeddings 4096 --global-batch-size 4 "
    "--train-iters 5 --lr-decay-iters 20 --lr-warmup-iters 1"
)
TE, LOCAL = "--transformer-impl transformer_engine", "--transformer-impl local --no-persist-layer-norm --no-rope-fusion"
P1, P95 = "--mtraining-top-p 1 --mtraining-max-vertical none", "--mtraining-top-p 0.95"
CP2, TP2 = "--context-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm"
SAVE = "--ckpt-format torch_dist --save-interval 5 --save"
LOAD = "--ckpt-format torch_dist --no-load-rng --exit-on-missing-checkpoint --load"

# Tensor-parallel ranks draw their own weights; to compare their curves with one GPU's, they load what one GPU has drawn.
# (Both versions leave a model on the host that was made with --use-cpu-initialization, and then stop.)
DRAWN = (
    f"{TE} --attention-backend auto --lr 0 --min-lr 0 --exit-interval 1 --no-save-optim --no-save-rng {SAVE} OUT/drawn"
)
LOAD_DRAWN = f"{LOAD} OUT/drawn --finetune --no-load-optim"
START_DRAWN = f"{LOAD_DRAWN} --make-vocab-size-divisible-by 64"  # per rank: 384 as on one
CURVES = {
    "dense": ("single", f"{TE} --attention-backend auto"),
    "dense_again": ("single", f"{TE} --attention-backend auto"),
    "dense_third": ("single", f"{TE} --attention-backend auto"),
    "p1": ("single", f"{TE} {OURS} {P1}"),
    "p1_again": ("single", f"{TE} {OURS} {P1}"),
    "p95": ("single", f"{TE} {OURS} {P95}"),
    "p1_cp2": ("curve", f"{TE} {OURS} {P1} {CP2}"),
    "p1_tp2": ("curve", f"{TE} {OURS} {P1} {TP2} {START_DRAWN}"),
    "p95_cp2": ("curve", f"{TE} {OURS} {P95} {CP2}"),
    "p95_tp2": ("curve", f"{TE} {OURS} {P95} {TP2} {START_DRAWN}"),
    "dense_tp2": ("curve", f"{TE} --attention-backend auto {TP2} {START_DRAWN}"),
    "dense_cp2": ("curve", f"{TE} --attention-backend auto {CP2}"),
}
"""50 steps of real text: name -> kind, options. Several dense runs show how far two of them are apart."""

SPARSE = f"{OURS} --mtraining-top-p 0.95 --mtraining-max-vertical 2048 --mtraining-max-slash 64"
SPEED = {
    "speed_dense": f"{TE} --attention-backend auto {CP2}",
    "speed_sparse": f"{TE} {SPARSE} {CP2} --mtraining-dense-steps 6 --mtraining-log none",
    "speed_logged": f"{TE} {SPARSE} {CP2} --mtraining-dense-steps 6 --mtraining-log no-recall",
}
"""One long sequence a step: Transformer Engine's ring; ours, which begins dense, without metrics and with them."""
SPEED_STEPS = 20

CHECKS = {
    "local_spec": f"{LOCAL} {OURS} {P95} {CP2}",
    "mock_data": f"{TE} {OURS} {P95} {CP2} --mock-data",
    "fp8_linear": f"{TE} {OURS} {P95} {CP2} --fp8-format hybrid --fp8-recipe delayed",
    "tp_comm_overlap": f"{TE} {OURS} {P95} {TP2} --tp-comm-overlap --tp-comm-bootstrap-backend nccl",
    "dp2_overlap": f"{TE} {OURS} {P95} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "pp2": f"{TE} {OURS} {P95} --pipeline-model-parallel-size 2",
    "pp2_interleaved": (
        f"{TE} {OURS} {P95} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    ),
    "full_recompute": (
        f"{TE} {OURS} {P95} {CP2} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "ep2": f"{TE} {OURS} {P95} {EXPERTS} --expert-model-parallel-size 2",
    "ep2_cp2": f"{TE} {OURS} {P95} {CP2} {EXPERTS} --expert-model-parallel-size 2",
    "dp2_8_connections": f"{TE} {OURS} {P95} --use-distributed-optimizer",
    "dense_saved": f"{TE} --attention-backend auto --train-iters 12 --exit-interval 5 {SAVE} OUT/from_dense",
    "sparse_from_dense": (
        f"{TE} {OURS} {P1} {CP2} --train-iters 12 --exit-interval 10 {LOAD} OUT/from_dense {SAVE} OUT/from_sparse"
    ),
    "dense_from_sparse": f"{TE} --attention-backend auto --train-iters 12 {LOAD} OUT/from_sparse",
    "fp16": f"{TE} {OURS} {P95} {CP2} --fp16 --initial-loss-scale 4096",
    "per_token_loss_evaluation": f"{TE} {OURS} {P95} {CP2} --calculate-per-token-loss --eval-interval 2 --eval-iters 2",
    "selective_recompute": f"{TE} {OURS} {P95} {CP2} --recompute-granularity selective",
    "qk_norm_yarn": (
        f"{TE} {OURS} {P95} {CP2} --qk-layernorm --position-embedding-type yarn --rotary-scaling-factor 4 "
        "--yarn-original-max-position-embeddings 1024"
    ),
    "mtp": f"{TE} {OURS} {P95} {CP2} --mtp-num-layers 1",
    "hybrid": f"{TE} {OURS} {P95} {CP2} --hybrid-layer-pattern *-*-",
    "fsdp": (
        f"{TE} {OURS} {P95} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor --use-distributed-optimizer"
    ),
}
"""Five steps of a small model each: name -> options."""

NOT_PLAIN = {"local_spec"}  # these go through the launcher, the others through the opt-in
OLDER = {"local_spec", "mock_data", "pp2", "dp2_overlap", "dense_saved", "sparse_from_dense", "dense_from_sparse"}
ONE_GPU = {"dense_saved": "0", "dense_from_sparse": "1"}
AFTER = {"sparse_from_dense": "dense_saved", "dense_from_sparse": "sparse_from_dense"}
SCRIPTS = {"hybrid": "pretrain_hybrid.py"}
MANY = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "8"
}  # Megatron itself asks for 1 with context parallelism, and refuses 1 with FSDP
VARIABLES = {"dp2_8_connections": MANY, "fsdp": MANY, "tp_comm_overlap": {"UB_SKIPMC": "1"}}
GOLDEN = {"gpt_153m_mtraining_1gpu": "single", "gpt_153m_mtraining_cp2": "curve", "gpt_153m_mtraining_tp2_sp": "curve"}


@dataclass(frozen=True)
class Options:
    """Where things are: checkouts of Megatron-LM, the dataset, the results."""

    megatron: Path
    older: Path
    data: str
    out: Path
    speed_length: int
    extra: str

    def training(self, name: str, options: str, nproc: int) -> tuple[str, ...]:
        """The command that trains."""
        launcher = ["-m", "megatron_mtraining.launch"] if name in NOT_PLAIN else []
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        checkout = self.older if name in OLDER else self.megatron
        script = str((checkout / SCRIPTS.get(name, "pretrain_gpt.py")).resolve())
        return (*start, *launcher, script, *self.arguments(name, options))

    def arguments(self, name: str, options: str) -> list[str]:
        """What the script is given: the options, the data, and what all runs have in common."""
        own = options.replace("OUT/", f"{self.out}/").split()
        words = [*TEXT.split(), *COMMON.split(), *own, *self.extra.split()]  # of options given twice the last counts
        if "--mock-data" not in words:
            words += ["--train-data-path", f"{self.data}-train", "--valid-data-path", f"{self.data}-valid"]
        words += ["--data-cache-path", f"{self.out}/cache/{name}"]
        if "--fp16" in words:
            words.remove("--bf16")
        return words


def variables(name: str, device: str | None) -> dict[str, str]:
    """The environment of a run: one GPU or both."""
    chosen = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **VARIABLES.get(name, {})}
    return chosen if device is None else chosen | {"CUDA_VISIBLE_DEVICES": device}


def curves(options: Options) -> Iterator[Run]:
    """50 steps, 32,768 tokens each."""
    length = (
        "--seq-length 8192 --max-position-embeddings 8192 --global-batch-size 4 --train-iters 50 --lr-warmup-iters 5"
    )
    drawn = options.training("drawn", f"{MODEL} {length} {DRAWN}", 1)
    yield Run("drawn", "check", drawn, variables("drawn", "0"))
    for number, (name, (kind, words)) in enumerate(CURVES.items()):
        single = kind == "single"
        command = options.training(name, f"{MODEL} {length} {words}", 1 if single else 2)
        after = "drawn" if START_DRAWN in words else None
        yield Run(name, kind, command, variables(name, str(number % 2) if single else None), after=after)


def golden(options: Options) -> Iterator[Run]:
    """Each functional test twice: recorded, and compared with that."""
    start = (sys.executable, "-m", "tests.functional_tests", "run")
    for number, (case, kind) in enumerate(GOLDEN.items()):
        device = str(number % 2) if kind == "single" else None
        for step, flags in (("recorded", ("--record",)), ("repeated", ())):
            output = ("--megatron", str(options.megatron), "--output", str(options.out / "golden" / step))
            extra = ("--extra", options.extra) if options.extra else ()
            after = f"{case}_recorded" if step == "repeated" else None
            chosen = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
            yield Run(f"{case}_{step}", kind, (*start, case, *output, *flags, *extra), chosen, after=after)


def speed(options: Options) -> Iterator[Run]:
    """Steps of one long sequence."""
    length = (
        f"--seq-length {options.speed_length} --max-position-embeddings {options.speed_length} --global-batch-size 1 "
        f"--train-iters {SPEED_STEPS} --lr-warmup-iters 5"
    )
    for name, words in SPEED.items():
        yield Run(name, "alone", options.training(name, f"{words} {MODEL} {length}", 2), variables(name, None))


def checks(options: Options) -> Iterator[Run]:
    """A few steps of each combination."""
    for name, words in CHECKS.items():
        device = ONE_GPU.get(name)
        command = options.training(name, f"{SMALL} {words}", 1 if device else 2)
        yield Run(name, "check", command, variables(name, device), timeout=75, after=AFTER.get(name))


GROUPS = {"curves": curves, "golden": golden, "speed": speed, "checks": checks}


def parser_of(description: str, groups: Iterable[str], speed_length: int) -> argparse.ArgumentParser:
    """The options of all commands that train with Megatron-LM; `speed_length` is the default of --speed-length."""
    parser = argparse.ArgumentParser(description=description.split("\n", maxsplit=1)[0])
    parser.add_argument("--megatron", type=Path, required=True, help="a checkout of Megatron-LM")
    parser.add_argument("--older", type=Path, required=True, help="one of an older release, for some of the runs")
    parser.add_argument("--data", required=True, help="prefix of a dataset of examples/prepare_text.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--groups", default=",".join(groups), help=f"of {', '.join(groups)}")
    parser.add_argument("--only", default="", help="names of runs, separated by commas (default: all)")
    parser.add_argument(
        "--speed-length", type=int, default=speed_length, help="tokens of a sequence of the group speed"
    )
    parser.add_argument("--extra", default="", help="more options of Megatron for every run")
    return parser


def main() -> None:
    """Runs the groups, one after another."""
    parser = parser_of(str(__doc__), GROUPS, 131072)
    parser.add_argument(
        "--at-once", action="store_true", help="start all runs together (their times mean nothing then)"
    )
    given = parser.parse_args()
    options = Options(given.megatron, given.older, given.data, given.out.resolve(), given.speed_length, given.extra)
    given.out.mkdir(parents=True, exist_ok=True)
    only = set(filter(None, given.only.split(",")))
    runs = [run for group in given.groups.split(",") for run in GROUPS[group](options) if not only or run.name in only]

    def note(result: dict[str, Any]) -> None:
        with (given.out / "runs.jsonl").open("a") as lines:
            lines.write(json.dumps(result) + "\n")
        last = [result[name][-1] if result[name] else None for name in ("steps", "loss", "grad_norm", "ms")]
        print(
            f"{result['name']:34} status {result['status']}  {result['seconds']:6.1f} s  step, loss, norm, ms: {last}",
            flush=True,
        )

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the runs are stopped, too
    run_all(runs, given.out / "logs", note, given.at_once)


if __name__ == "__main__":
    main()
