"""What the parts share: a line of JSON per result, steps that may fail, Bridge's modules, and a look into its training loop."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Session:
    """One process.

    Attributes:
        part: which part of the whole it runs; names its file of results.
        out: folder of results.
        work: folder of models and checkpoints, shared by the processes.
        cpu: whether this is a trial without a GPU: local layers over gloo, Transformer Engine stood in for.
        logits: by run, of the fixed tokens after its last step.
    """

    part: str
    out: Path
    work: Path
    cpu: bool = False
    begin: float = field(default_factory=time.time)
    logits: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The rank that `torchrun` gave."""
        return int(os.environ.get("RANK", "0"))

    @property
    def device(self) -> str:
        """Where models that are compared run."""
        return "cpu" if self.cpu else "cuda"

    def say(self, **values: Any) -> None:
        """Adds a line of JSON, from rank 0."""
        if self.rank:
            return
        line = json.dumps({"part": self.part, "seconds": round(time.time() - self.begin, 1), **values})
        with (self.out / f"{self.part}.jsonl").open("a") as file:
            file.write(line + "\n")
        print(">>>", line, flush=True)

    def attempt(self, step: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Runs a step; a failure is noted, with its trace in the log, and None returned."""
        name = " ".join([step.__name__, *(str(a) for a in args if isinstance(a, (str, int, float)))])
        try:
            return step(self, *args, **named)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            self.say(failed=name, error=f"{type(error).__name__}: {error}"[:600])
            return None
        finally:
            end_groups()

    def wait_for(self, path: Path) -> None:
        """Waits for what another process makes."""
        seconds = 1000 if self.cpu else 100
        while not path.exists():
            if time.time() - self.begin > seconds:
                raise TimeoutError(str(path))
            time.sleep(0.2)


def block_ours() -> None:
    """Makes this package impossible to import, as if it were not installed.

    Raises:
        RuntimeError: if it has been imported.
    """
    if "megatron_mtraining" in sys.modules:
        raise RuntimeError("megatron_mtraining has been imported")
    sys.modules["megatron_mtraining"] = None  # type: ignore[assignment]


def load(session: Session) -> None:
    """Imports Bridge, with stand-ins for what is not installed; nothing of this package where there is a GPU."""
    if os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None):
        # Each step meets at a port of its own, where no earlier step has left anything.
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    utils = importlib.import_module("megatron.core.datasets.utils")
    utils.compile_helpers = lambda: None  # type: ignore[attr-defined]  # a wheel has no Makefile; Bridge alone exits
    if session.cpu:
        _load_on_cpu()
        session.say(loaded=True)
        return
    for name in ("megatron.core", "megatron.training.training", "megatron.core.models.gpt.gpt_model"):
        importlib.import_module(name)
    stand_ins = importlib.import_module("tests.bridge.stand_ins")
    missing = stand_ins.install()
    names = ("torch", "transformer_engine", "transformers", "megatron.bridge", "megatron.core")
    versions = {name: importlib.import_module(name).__version__ for name in names}
    importlib.import_module("megatron.bridge.training.pretrain")
    importlib.import_module("megatron.bridge.training.gpt_step")
    session.say(loaded=True, stubbed=missing, cuda_initialized=torch.cuda.is_initialized(), **versions)


def _load_on_cpu() -> None:
    on_cpu = importlib.import_module("tests.bridge.on_cpu")
    on_cpu.activate()
    from megatron.bridge import AutoBridge

    original = AutoBridge.to_megatron_provider

    def to_megatron_provider(self: Any, *args: Any, **named: Any) -> Any:
        return on_cpu.prepare_model(original(self, *args, **named))

    AutoBridge.to_megatron_provider = to_megatron_provider


def end_groups() -> None:
    """What the end of a process does: the page runs each step in one of its own."""
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    os.environ["MASTER_PORT"] = str(int(os.environ.get("MASTER_PORT", "29500")) + 1)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def begin_groups(session: Session) -> None:
    """What Bridge does itself where there is a GPU, over NCCL, when a model is built outside training."""
    if session.cpu:
        from megatron.core import parallel_state

        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(0)


def watch(session: Session, run: str, tokens: torch.Tensor | None = None) -> None:
    """Makes the next `pretrain` of Bridge note losses, gradient norms, step times, memory and the kinds of attention.

    Args:
        session: the process.
        run: name of the run in the results.
        tokens: [1, seq], whose logits are kept after the last step (one rank).
    """
    module = importlib.import_module("megatron.bridge.training.pretrain")
    original = module.pretrain
    callback = _watcher(session, run, tokens)

    def pretrain(cfg: Any, step: Any, callbacks: Any = None) -> None:
        module.pretrain = original
        if session.cpu:
            importlib.import_module("tests.bridge.on_cpu").prepare(cfg)
            if callbacks:
                importlib.import_module("megatron_mtraining.bridge").apply_overrides(cfg, [])
        original(cfg, step, callbacks=[*(callbacks or []), callback])

    module.pretrain = pretrain


def _watcher(session: Session, run: str, tokens: torch.Tensor | None) -> Any:
    """The callback of `watch`; its class can only be made once Bridge is imported."""
    from megatron.bridge.training.callbacks import Callback

    class Watcher(Callback):
        def on_train_start(self, context: Any) -> None:
            self.losses: list[float] = []
            self.norms: list[float] = []
            self.times: list[int] = []
            self.first = context.state.train_state.step + 1
            self.attention = kinds_of_attention(context.model)
            self.weights = {
                n: p.detach().clone() for n, p in context.model[0].named_parameters() if not p.requires_grad
            }
            self.stamp = time.time()
            faulthandler.dump_traceback_later(8, repeat=True)  # where a slow first step waits

        def on_train_step_end(self, context: Any) -> None:
            faulthandler.cancel_dump_traceback_later()
            self.losses.append(float((context.loss_dict or {}).get("lm loss", math.nan)))
            self.norms.append(float(context.grad_norm or 0))
            if not session.cpu:
                torch.cuda.synchronize()
            self.times.append(round(1000 * (time.time() - self.stamp)))
            self.stamp = time.time()

        def on_train_end(self, context: Any) -> None:
            peak = None if session.cpu else round(torch.cuda.max_memory_allocated() / 2**30, 2)
            frozen = {n: p for n, p in context.model[0].named_parameters() if n in self.weights}
            changed = [n for n, p in frozen.items() if not torch.equal(p, self.weights[n])]
            extra = {"frozen_tensors": len(frozen), "frozen_changed": changed} if frozen else {}
            losses = _of_last_stage(self.losses)
            session.say(
                run=run,
                first_step=self.first,
                losses=losses,
                grad_norms=self.norms,
                milliseconds=self.times,
                peak_gib=peak,
                attention=self.attention,
                **extra,
            )
            if tokens is not None:
                session.logits[run] = logits_of(context.model[0], tokens.to(session.device))

    return Watcher()


def _of_last_stage(losses: list[float]) -> list[float]:
    """The losses where this rank's pipeline stage has none. Collective."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, losses)
    return next((got for got in everyone if not any(map(math.isnan, got))), losses)


def kinds_of_attention(model: Any) -> dict[str, int]:
    """How many layers have which class of core attention."""
    from megatron.core.transformer.attention import Attention

    counts: dict[str, int] = {}
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        for module in chunk.modules():
            if isinstance(module, Attention):
                kind = f"{type(module.core_attention).__module__}.{type(module.core_attention).__name__}"
                counts[kind] = counts.get(kind, 0) + 1
    return counts


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [seq, vocabulary], fp32 on the host, of a Megatron model for tokens [1, seq]."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(tokens, positions, None)
    model.train(training)
    return logits[0].float().cpu()
