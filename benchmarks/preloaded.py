"""Starts training scripts from a process that has loaded Megatron-LM already: most of a short run is loading it.

    python -m benchmarks.preloaded serve SOCKET CHECKOUT             load once, then fork a process for each run
    python -m benchmarks.preloaded run SOCKET RANKS SCRIPT [ARGUMENT ...]
                                                                     one run, with this command's environment and output

A run does in RANKS forked processes what `python -m megatron_mtraining.launch SCRIPT ARGUMENT ...` does on each rank, in the
same order: the launcher, too, loads all of Megatron before it hooks anything. CUDA is not touched before the fork; should it
have been, the forked process starts a new one.

With the variable BENCHMARK_GATE=FILE a run stops before its first step, makes FILE.ready, and goes on when FILE is there:
so a timed run can start up beside others and train alone.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NoReturn

GATE = "BENCHMARK_GATE"
LAUNCHER = "megatron_mtraining.launch"
PATIENCE = 50.0  # seconds that a run waits for the server to have loaded everything


def preload(checkout: Path) -> None:
    """Loads what a training script of `checkout` loads, up to the point where the launcher hooks it."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else the question for a GPU initializes CUDA
    sys.path.insert(0, str(checkout.resolve()))
    import megatron.training
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx

    import megatron_mtraining.launch  # noqa: F401

    if torch.cuda.is_initialized():
        print(f"loading {megatron.training.__file__} initialized CUDA: nothing is gained by forking", flush=True)


def serve(address: str, checkout: Path) -> NoReturn:
    """Loads Megatron-LM, then answers runs until it is ended. Requests made before are kept waiting."""
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        begin = time.monotonic()
        preload(checkout)
        Path(address).unlink(missing_ok=True)
        listener.bind(address)
        listener.listen(64)
        print(f"{checkout}: loaded in {time.monotonic() - begin:.1f} s", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forked processes here
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _run_forked(connection)
            connection.close()


def _run_forked(connection: socket.socket) -> NoReturn:
    """The forked process: takes over output, environment and arguments of the client, runs, tells the status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    status = 1
    try:
        request, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        for target, descriptor in zip((1, 2), descriptors, strict=True):
            os.dup2(descriptor, target)
        told = json.loads(request)
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        os.environ.clear()
        os.environ.update(told["environment"])
        os.chdir(told["folder"])
        status = _train(told["arguments"])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.sendall(bytes([status]))
    os._exit(status)


def _train(arguments: list[str]) -> int:
    """Runs the launcher; returns the status that Python would exit with."""
    import torch

    from megatron_mtraining import launch

    if torch.cuda.is_available():
        try:
            torch.cuda.init()
        except RuntimeError as error:
            print(f"CUDA after the fork: {error}; starting a new process", flush=True)
            return subprocess.run([sys.executable, "-m", LAUNCHER, *arguments], check=False).returncode
    if GATE in os.environ:
        _wait_before_training(Path(os.environ[GATE]))
    try:
        launch.main(arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _wait_before_training(gate: Path) -> None:
    from megatron.training import training

    train = training.train

    def wait_and_train(*args: Any, **kwargs: Any) -> Any:
        ready_file(gate).touch()
        while not gate.exists():
            time.sleep(0.02)
        return train(*args, **kwargs)

    training.train = wait_and_train


def ready_file(gate: Path) -> Path:
    """What a run makes when it is about to train."""
    return gate.with_name(f"{gate.name}.ready")


def _end_with(connection: socket.socket) -> None:
    """Ends this process, and those that it forked, with its client."""
    if not connection.recv(1):
        os.killpg(0, signal.SIGKILL)


def run(address: str, ranks: int, arguments: list[str]) -> int:
    """Has `arguments` (a script and its own) run by the server at `address`, or by new processes; returns the status.

    The first rank that fails ends the others.
    """
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    servers = [_connect(address) for _ in range(ranks)]
    if None in servers:
        print(f"no server at {address}; starting new processes", flush=True)
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return subprocess.run([*start, "-m", LAUNCHER, *arguments], check=False).returncode
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    with ExitStack() as stack, selectors.DefaultSelector() as running:
        for rank, server in enumerate(servers):
            assert server is not None
            stack.enter_context(closing(server))
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            request = {"arguments": arguments, "environment": dict(os.environ) | world | numbers, "folder": os.getcwd()}
            socket.send_fds(server, [json.dumps(request).encode()], [1, 2])
            running.register(server, selectors.EVENT_READ)
        while running.get_map():
            for key, _ in running.select():
                status = key.fileobj.recv(1)  # type: ignore[union-attr]
                running.unregister(key.fileobj)
                if status != b"\0":
                    return status[0] if status else 1
    return 0


def _connect(address: str) -> socket.socket | None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
        except OSError:
            connection.close()
            time.sleep(0.1)
        else:
            return connection
    return None


def main() -> None:
    """Command line; see the module's docstring."""
    match sys.argv[1:]:
        case ["serve", address, checkout]:
            serve(address, Path(checkout))
        case ["run", address, ranks, script, *arguments] if ranks.isdigit() and int(ranks) > 0:
            raise SystemExit(run(address, int(ranks), [script, *arguments]))
    raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
