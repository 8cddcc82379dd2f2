"""Starts training scripts from a process that has loaded Megatron-LM already: most of a short run is loading it.

    python -m benchmarks.preloaded serve SOCKET CHECKOUT             load once, then fork a process for each run
    python -m benchmarks.preloaded run SOCKET RANKS SCRIPT [ARGUMENT ...]
                                                                     one run, with this command's environment and output
    python -m benchmarks.preloaded agents RANKS SCRIPT [ARGUMENT ...]
                                                                     the same by torchrun, an agent on each host

A run does in RANKS forked processes what `python -m megatron_mtraining.launch SCRIPT ARGUMENT ...` does on each rank, in the
same order: the launcher, too, loads all of Megatron before it hooks anything. CUDA is not touched before the fork: modules
that ask for the device while they are loaded are told what another process was. Should CUDA have been touched all the same, or
no server be there, a run loads everything itself.

With the variable BENCHMARK_GATE=FILE a run stops before its first step, makes FILE.ready, and goes on when FILE is there:
so a timed run can start up beside others and train alone. With BENCHMARK_HOSTS=N its ranks are on N pretended hosts
(`benchmarks.run_hosts`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from . import run_hosts

GATE = "BENCHMARK_GATE"
FORK = multiprocessing.get_context("fork")
FIRST_PORT, PORTS = 12000, 20000  # below those that the system gives to connections
PATIENCE = 50.0  # seconds that a run waits for the server to have loaded everything


def preload(checkout: Path) -> None:
    """Loads what a training script of `checkout` loads, up to the point where the launcher hooks it."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else the question for a GPU initializes CUDA
    sys.path.insert(0, str(checkout.resolve()))
    import torch

    with device_described(torch.cuda):
        import megatron.training
        import torch._dynamo
        import torch._inductor.compile_fx

        import megatron_mtraining.launch  # noqa: F401
    if torch.cuda.is_initialized():
        print(f"loading {megatron.training.__file__} initialized CUDA: nothing is gained by forking", flush=True)


@contextmanager
def device_described(cuda: Any) -> Iterator[None]:
    """Answers questions for the GPU's name and properties without CUDA, with what a forked process found out.

    Args:
        cuda: ``torch.cuda``.
    """
    if not cuda.is_available():
        yield
        return
    with FORK.Pool(1) as pool:
        name, capability, properties = pool.apply(_describe_device)
    known = {
        "get_device_name": name,
        "get_device_capability": capability,
        "get_device_properties": SimpleNamespace(**properties),
    }
    originals = {what: getattr(cuda, what) for what in known}
    for what, value in known.items():
        setattr(cuda, what, lambda *_, value=value, **__: value)
    try:
        yield
    finally:
        for what, original in originals.items():
            setattr(cuda, what, original)


def _describe_device() -> tuple[str, tuple[int, int], dict[str, Any]]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    plain = {what: getattr(properties, what) for what in dir(properties) if not what.startswith("_")}
    plain = {what: value for what, value in plain.items() if isinstance(value, (int, str, float))}
    return torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0), plain


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
            return subprocess.run((sys.executable, "-m", *fresh(arguments)), check=False).returncode
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
    servers = [_connect(address) for _ in range(ranks)]
    if None in servers:
        print(f"no server at {address}; starting new processes", flush=True)
        return run_agents(ranks, arguments)
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack, selectors.DefaultSelector() as running:
        for rank, server in enumerate(servers):
            assert server is not None
            stack.enter_context(closing(server))
            environment = dict(os.environ) | world | run_hosts.place(rank, ranks)
            request = {"arguments": arguments, "environment": environment, "folder": os.getcwd()}
            socket.send_fds(server, [json.dumps(request).encode()], [1, 2])
            running.register(server, selectors.EVENT_READ)
        while running.get_map():
            for key, _ in running.select():
                status = key.fileobj.recv(1)  # type: ignore[union-attr]
                running.unregister(key.fileobj)
                if status != b"\0":
                    return status[0] if status else 1
    return 0


def run_agents(ranks: int, arguments: list[str]) -> int:
    """Has `arguments` run by torchrun; returns the status. The first agent that fails ends the others."""
    commands = run_hosts.agents(ranks, free_port(), fresh(arguments))
    agents = [subprocess.Popen(command, env=os.environ | own) for command, own in commands]
    statuses: list[int | None] = [None]
    while None in statuses and not any(statuses):
        time.sleep(0.1)
        statuses = [agent.poll() for agent in agents]
    for agent in agents:
        agent.terminate()  # of those that are left, each ends its ranks
        agent.wait()
    return next(filter(None, statuses), 0)


def free_port() -> int:
    """Where the ranks of this process' run meet: no other run of this time has the same."""
    return FIRST_PORT + os.getpid() % PORTS


def fresh(arguments: list[str]) -> tuple[str, ...]:
    """The module, and what to tell it, of a rank that loads everything itself."""
    return ("benchmarks.preloaded", "fresh", *arguments)


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
        case ["fresh", script, *arguments]:
            sys.path.insert(0, str(Path(script).resolve().parent))
            raise SystemExit(_train([script, *arguments]))
        case ["run", address, ranks, script, *arguments] if ranks.isdigit() and int(ranks) > 0:
            raise SystemExit(run(address, int(ranks), [script, *arguments]))
        case ["agents", ranks, script, *arguments] if ranks.isdigit() and int(ranks) > 0:
            raise SystemExit(run_agents(int(ranks), [script, *arguments]))
    raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
