"""``megatron-mtraining plan``: what a Megatron launch would take of every rank, without launching it.

    megatron-mtraining plan --seq-length 524288 --context-parallel-size 32 --model qwen2.5-3b
    megatron-mtraining plan --gpus 64 --tensor-model-parallel-size 2 ... the options of a launch ...

Takes the options of the launch, with Megatron's own parser and the plugin's own checks, and a few of its own. Prints how the
context-parallel ranks form rings, the communicators, ring buffers and other memory of a rank of each pipeline stage, and the
layout and ring that the simulator recommends. Memory is estimated (docs/simulator.md says from what).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from .config import BLOCK, MTrainingConfig
from .integration import RefusedError
from .integration.options import BACKEND
from .launches import chunks_per_launch
from .simulator import H200_LINKS, H200_RATES, Choice, Cluster, Pattern, Predictor, Shape, make_profile
from .simulator.memory import MODELS, Model, Parallel, Training, memory_plan, ring_plans

COMMUNICATOR_MIB = 384.0
"""What a communicator took of each of two H200 on NVLink once ring passes had used it (`benchmarks.communicators`)."""


class PlanError(Exception):
    """What cannot be planned, in one line."""


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, without its usage (Megatron's has hundreds of lines)."""

    def error(self, message: str) -> NoReturn:
        raise PlanError(message)


@dataclass(frozen=True)
class Job:
    """A launch to plan.

    Attributes:
        args: Megatron's parsed arguments.
        config: the attention's config.
        model: the shape of the model, or None where its memory is not modelled (said in ``unknown``).
        gpus: of the job.
        gpus_per_node: of a host.
        communicator_mib: memory of one communicator.
    """

    args: argparse.Namespace
    config: MTrainingConfig
    model: Model | None
    unknown: str
    gpus: int
    gpus_per_node: int
    communicator_mib: float


def own_parser() -> argparse.ArgumentParser:
    """The options that are not Megatron's."""
    made = _Parser(
        prog="megatron-mtraining plan",
        description="What a launch would take of every rank. All other options are those of the launch.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--model", choices=sorted(MODELS), help="shape of the model, instead of Megatron's options for it"
    )
    made.add_argument("--attention-backend", choices=(BACKEND,), default=BACKEND, help="(default: %(default)s)")
    made.add_argument("--gpus", type=int, help="of the job (default: as few as the parallel sizes need)")
    made.add_argument("--gpus-per-node", type=int, default=8, help="(default: %(default)s)")
    made.add_argument(
        "--communicator-mib",
        type=float,
        default=COMMUNICATOR_MIB,
        help="memory of one (default: %(default)s, measured with two ranks on NVLink)",
    )
    made.add_argument("--json", action="store_true", help="print everything as JSON")
    return made


def model_options(model: Model) -> list[str]:
    """Megatron's options for the shape of a preset."""
    options = (
        f"--num-layers {model.layers} --hidden-size {model.hidden} --ffn-hidden-size {model.ffn} --swiglu --bf16 "
        f"--num-attention-heads {model.heads} --group-query-attention --num-query-groups {model.kv_heads} "
        f"--kv-channels {model.head_dim} --vocab-size {model.vocabulary} --position-embedding-type rope "
        "--attention-dropout 0 --recompute-granularity full --use-distributed-optimizer"
    )
    return options.split() + ([] if model.tied else ["--untie-embeddings-and-output-weights"])


def parse(words: Sequence[str]) -> tuple[Job, argparse.Namespace]:
    """A job from the command line, and the options that are not Megatron's.

    Raises:
        PlanError, RefusedError: for what is not valid; one line that names the option and its value.
    """
    own, rest = own_parser().parse_known_args(words)
    if own.model is not None:
        rest = [*model_options(MODELS[own.model]), *rest]
    from .integration import install

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Megatron says of packages that only training needs
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # and torch of a missing GPU
        install()
        from megatron.training import arguments

    parser = _Parser(prog="megatron-mtraining plan", allow_abbrev=False)
    args = arguments.add_megatron_arguments(parser).parse_args(["--attention-backend", own.attention_backend, *rest])
    derive_from_pattern(args)
    check_sizes(args)
    used = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    gpus = used if own.gpus is None else own.gpus
    if gpus < 1 or gpus % used:
        raise PlanError(f"--gpus {gpus}: must be a multiple of tensor x pipeline x context parallel ranks, {used}")
    if own.gpus_per_node < 1:
        raise PlanError(f"--gpus-per-node {own.gpus_per_node}: must be at least 1")
    if not 0 <= own.communicator_mib < math.inf:
        raise PlanError(f"--communicator-mib {own.communicator_mib:g}: must be a number from 0 up")
    model, unknown = model_of(args)
    config = checked_config(args)
    job = Job(args, config, model, unknown, gpus, own.gpus_per_node, own.communicator_mib)
    return job, own


def checked_config(args: argparse.Namespace) -> MTrainingConfig:
    """The attention's config, after a look at every option of the plugin; no file or folder is made.

    Raises:
        RefusedError: for what a launch would refuse.
    """
    from .integration.dumping import read_dump_options
    from .integration.guard import guard_from_args
    from .integration.layer_plan import plan_from_args
    from .integration.options import config_from_args
    from .integration.profiling import profiler_from_args

    config = config_from_args(args)
    plan_from_args(args, config)
    guard_from_args(args, config)
    read_dump_options(args, config)
    profiler_from_args(args, None if args.mtraining_metrics is None else Path(args.mtraining_metrics))
    return config


def derive_from_pattern(args: argparse.Namespace) -> None:
    """Does what Megatron's validation does first: a hybrid model's pattern says how many layers there are, also of MTP.

    Raises:
        ValueError: for a pattern that Megatron does not take; one line.
    """
    from megatron.core.models.hybrid.hybrid_layer_allocation import get_hybrid_total_layer_count, parse_hybrid_pattern

    pattern = args.hybrid_layer_pattern
    if pattern is None:
        return
    try:
        args.num_layers = get_hybrid_total_layer_count(pattern)
        args.mtp_num_layers = parse_hybrid_pattern(pattern).mtp_num_depths or args.mtp_num_layers
    except ValueError as error:
        raise PlanError(f"--hybrid-layer-pattern {pattern}: {' '.join(str(error).split())}") from error


STAGE_OPTIONS = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
)  # fmt: skip
"""Options with which pipeline stages hold unequal numbers of layers, or several chunks of them."""


def stage_option(args: argparse.Namespace) -> str:
    """The first of :data:`STAGE_OPTIONS` that is given; empty if none is."""
    return next((f"--{name.replace('_', '-')}" for name in STAGE_OPTIONS if getattr(args, name, None)), "")


def check_sizes(args: argparse.Namespace) -> None:
    """Refuses sizes that are missing or below 1."""
    shape = ("num_layers", "hidden_size", "num_attention_heads")
    parallel = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    others = (
        "ffn_hidden_size", "kv_channels", "num_query_groups", "vocab_size", "padded_vocab_size",
        "make_vocab_size_divisible_by", "micro_batch_size",
    )  # fmt: skip
    for name in ("seq_length", *shape, *parallel, *others):
        option, value = f"--{name.replace('_', '-')}", getattr(args, name)
        if value is None and name in shape:
            raise PlanError(f"{option}: must be given (or --model, for the shape of a known model)")
        if value is None and name == "seq_length":
            raise PlanError(f"{option}: must be given")
        if value is not None and value < 1:
            raise PlanError(f"{option} {value}: must be at least 1")


def model_of(args: argparse.Namespace) -> tuple[Model | None, str]:
    """The shape of the model that the options describe, or why it is not modelled."""
    for name, what in (
        ("num_experts", "experts"), ("multi_latent_attention", "latent attention"), ("mtp_num_layers", "MTP"),
        ("hybrid_layer_pattern", "a hybrid model"), ("heterogeneous_layers_config_path", "heterogeneous layers"),
        ("heterogeneous_layers_config_encoded_json", "heterogeneous layers"),
    ):  # fmt: skip
        if getattr(args, name, None):
            return None, f"memory of the model is not estimated with {what}"
    heads, hidden = args.num_attention_heads, args.hidden_size
    if hidden % heads and args.kv_channels is None:
        raise PlanError(f"--hidden-size {hidden}: must be a multiple of --num-attention-heads {heads}")
    ffn = args.ffn_hidden_size or (int(4 * hidden * 2 / 3) // 64 * 64 if args.swiglu else 4 * hidden)
    groups = args.num_query_groups if args.group_query_attention else heads
    if heads % groups:
        raise PlanError(f"--num-query-groups {groups}: must divide --num-attention-heads {heads}")
    tp = args.tensor_model_parallel_size
    if heads % tp:
        raise PlanError(f"--num-attention-heads {heads}: must be a multiple of --tensor-model-parallel-size {tp}")
    if groups % tp and tp % groups:  # fewer groups than ranks: some ranks hold the same one
        raise PlanError(
            f"--num-query-groups {groups}: must be a multiple or divisor of --tensor-model-parallel-size {tp}"
        )
    if args.num_layers % args.pipeline_model_parallel_size and not stage_option(args):
        raise PlanError(
            f"--num-layers {args.num_layers}: must be a multiple of --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size}"
        )
    unit = args.make_vocab_size_divisible_by * tp
    vocabulary = args.padded_vocab_size or -(-(args.vocab_size or 0) // unit) * unit
    unknown = "" if vocabulary else "no --vocab-size or --padded-vocab-size: embeddings and logits are left out"
    if stage_option(args):
        unknown = f"memory of pipeline stages is not estimated with {stage_option(args)}"
    head_dim = args.kv_channels or hidden // heads
    tied = not args.untie_embeddings_and_output_weights
    return Model(args.num_layers, hidden, ffn, heads, groups, head_dim, vocabulary, tied, bool(args.swiglu)), unknown


def hosts_of_groups(job: Job) -> set[tuple[int, ...]]:
    """Where context-parallel groups lie: the distinct patterns of hosts, in Megatron's order of ranks (tp-cp-ep-dp-pp)."""
    tp, cp = job.args.tensor_model_parallel_size, job.args.context_parallel_size
    found = set()
    for first in range(0, job.gpus, tp * cp):
        for place in range(tp):
            hosts = [(first + place + tp * rank) // job.gpus_per_node for rank in range(cp)]
            found.add(tuple(host - hosts[0] for host in hosts))
    return found


def plan(job: Job) -> dict[str, Any]:
    """Everything that is printed.

    Raises:
        RefusedError, PlanError, ValueError: for a launch that the plugin would refuse; one line.
    """
    from .integration.groups import groups_to_make, plan_rings
    from .integration.layout_mode import check_sequence_length, choose_layout_mode

    args, config = job.args, job.config
    tp, cp, pp = args.tensor_model_parallel_size, args.context_parallel_size, args.pipeline_model_parallel_size
    mode = choose_layout_mode(args.mtraining_layout_mode, args, config)
    check_sequence_length(args.seq_length, args, config, mode)
    sizes = args.hierarchical_context_parallel_sizes
    patterns = hosts_of_groups(job)
    rings = {hosts: plan_rings(config.ring, list(map(str, hosts)), sizes, args.mtraining_inner_across_hosts)
             for hosts in patterns}  # fmt: skip
    if len({ring.inner_size for ring in rings.values()}) > 1:
        raise PlanError(
            f"--gpus-per-node {job.gpus_per_node}: context-parallel groups lie differently on the hosts; give "
            "--hierarchical-context-parallel-sizes or --mtraining-ring flat"
        )
    hosts, ring = next(iter(rings.items()))
    nodes = len(set(hosts))
    parallel = Parallel(tp, cp, job.gpus // (tp * cp * pp), ring.inner_size, pp, nodes)
    made = groups_to_make(cp, ring.inner_size, bool(sizes))
    megatrons = (("cp",) if cp > 1 else ()) + (("inner", "outer") if sizes and ring.inner_size < cp else ())
    forward, backward = ring_plans(args.seq_length // cp, parallel, config.chunks_per_launch)
    return {
        "gpus": job.gpus, "tp": tp, "cp": cp, "pp": pp, "dp": parallel.dp, "seq_len": args.seq_length,
        "local_seq_len": args.seq_length // cp, "layout": config.layout, "layout_mode": mode.mode,
        "inner_size": ring.inner_size, "ring_reason": ring.reason, "hosts": nodes,
        "launches": {"forward": len(forward.launches), "backward": len(backward.launches)},
        "communicators": {"made": list(made), "megatron": list(megatrons)},
        "communicator_mib": job.communicator_mib * len(made),
        "stages": stages(job, parallel), "unknown": job.unknown, "recommended": recommendation(job, parallel),
    }  # fmt: skip


def stages(job: Job, parallel: Parallel) -> list[dict[str, Any]]:
    """GiB of a rank of each pipeline stage; all ranks of a stage hold the same."""
    if job.model is None or stage_option(job.args):
        return []
    args, per_stage = job.args, job.gpus // parallel.pp
    training = Training(
        args.micro_batch_size or 1,
        args.recompute_granularity == "full",
        bool(args.use_distributed_optimizer),
        bool(args.bf16 or args.fp16),
        job.config.max_vertical if job.config.index_policy == "top_p" and not job.config.dense else 0,
        job.config.chunks_per_launch,
    )
    found = []
    seq_len = -(-args.seq_length // BLOCK) * BLOCK  # one rank may hold any length
    for stage in range(parallel.pp):
        parts = memory_plan(job.model, seq_len, parallel, training, stage)
        # With --use-tp-pp-dp-mapping the ranks of a stage are not neighbours.
        ranks = None if args.use_tp_pp_dp_mapping else [stage * per_stage, (stage + 1) * per_stage - 1]
        found.append({"stage": stage, "ranks": ranks, "gib": parts})
    return found


def recommendation(job: Job, parallel: Parallel) -> dict[str, Any] | None:
    """The simulator's choice, and what it predicts for the one of the launch; None where there is no ring to simulate: one
    rank, a model of unknown shape, or hosts that hold unequal parts of a context-parallel group.
    """
    model = job.model
    node = parallel.cp if parallel.nodes == 1 else max(job.gpus_per_node // parallel.tp, 1)
    if parallel.cp == 1 or model is None or parallel.cp % node or parallel.cp // node != parallel.nodes:
        return None
    kv_heads = max(model.kv_heads // parallel.tp, 1)
    shape = Shape(job.args.seq_length, model.heads // parallel.tp, kv_heads, model.head_dim)
    cluster = Cluster(parallel.cp, node, H200_LINKS, H200_RATES)
    predictor = Predictor(shape, make_profile(Pattern(), shape.seq_len, shape.heads), cluster)
    best = predictor.recommend()[0]
    config, kind = job.config, "hierarchical" if parallel.inner_size < parallel.cp else "flat"
    chunks = min(config.chunks_per_launch or chunks_per_launch(shape.seq_len // parallel.cp, False), parallel.cp)
    chosen = Choice(config.layout, kind, config.stripe_size, config.stripe_rotation, chunks)
    if kind == "hierarchical":
        predictor.cluster = replace(cluster, node_size=parallel.inner_size)
    return {"choice": best.summary(), "this": predictor.predict(chosen).summary()}


def text(result: dict[str, Any]) -> str:
    """A plan for people."""
    kind = "flat" if result["inner_size"] == result["cp"] else "hierarchical"
    made, megatrons = result["communicators"]["made"], result["communicators"]["megatron"]
    lines = [
        f"{result['gpus']} GPUs: tp {result['tp']}, cp {result['cp']}, pp {result['pp']}, dp {result['dp']}; "
        f"{result['seq_len']} tokens, {result['local_seq_len']} a rank; layout {result['layout']}, {result['layout_mode']}",
        f"{kind} ring, inner size {result['inner_size']} ({result['ring_reason']}); context-parallel ranks on "
        f"{result['hosts']} hosts; {result['launches']['forward']} launches forward, {result['launches']['backward']} backward",
        f"communicators of a rank: {len(made)} made ({', '.join(made) or 'none'}; about {result['communicator_mib']:.0f} MiB), "
        f"{len(megatrons)} of Megatron's used ({', '.join(megatrons) or 'none'})",
    ]
    for stage in result["stages"]:
        ranks = " {}-{}".format(*stage["ranks"]) if stage["ranks"] else ""
        parts = ", ".join(f"{name} {size:.2f}" for name, size in stage["gib"].items())
        lines.append(f"GiB of each of the ranks{ranks} (pipeline stage {stage['stage']}): {parts}")
    if result["unknown"]:
        lines.append(f"note: {result['unknown']}")
    if result["recommended"]:
        best, this = result["recommended"]["choice"], result["recommended"]["this"]
        lines.append(
            f"simulated for H200 and a made-up index of 5%: {this['ms']:.1f} ms an attention call, forward and backward; "
            f"best {best['ms']:.1f} ms with --mtraining-layout {best['layout']} --mtraining-ring {best['ring']} "
            f"--mtraining-stripe-size {best['stripe_size']} --mtraining-stripe-rotation {best['stripe_rotation']} "
            f"--mtraining-chunks-per-launch {best['chunks_per_launch']}"
        )
    return "\n".join(lines)


def main(words: Sequence[str]) -> None:
    """Prints a plan.

    Raises:
        SystemExit: with one line, for what cannot be planned.
    """
    try:
        job, own = parse(words)
        result = plan(job)
    except (PlanError, RefusedError, ValueError) as error:
        raise SystemExit(f"megatron-mtraining plan: error: {error}") from None
    print(json.dumps(result, indent=1) if own.json else text(result))
