"""Make the virtual environment that `make` works in and install the project into it, with the pinned versions.

    python3.12 tools/setup_env.py .venv [--cuda AUTO|ON|OFF]

Shows one line per package, keeps pip's whole output in VENV/install.log, and ends with one clear message on failure.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
TAIL_LINES = 15


def show(message: str) -> None:
    """One line of our own progress."""
    print(f"[setup] {message}", flush=True)


def run_pip(python: Path, log: Path, arguments: Sequence[str]) -> None:
    """Run pip, show what it downloads and builds, log everything; SystemExit with the log's end if it fails."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off", *arguments]
    with log.open("a") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if line.lstrip().startswith(("Downloading", "Building", "Installing collected")):
                show(line.strip()[:110])
        code = process.wait()
    if code != 0:
        fail(log, f"Installation failed (pip exit {code})", "check the network and the free disk space (8 GB)")


def fail(log: Path, what: str, advice: str) -> NoReturn:
    """End with the log's last lines, what failed and what to do."""
    tail = "\n".join(log.read_text().splitlines()[-TAIL_LINES:])
    raise SystemExit(f"{tail}\n[setup] {what}. The lines above are the end of {log}; {advice}, then run make again.")


def has_gpu() -> bool:
    """Whether an NVIDIA GPU answers."""
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


def resolve_cuda(choice: str) -> str:
    """ON or OFF: AUTO builds the CUDA library where there is both a GPU to run it and an nvcc to build it."""
    if choice != "AUTO":
        return choice
    has_nvcc = shutil.which("nvcc") is not None or Path("/usr/local/cuda/bin/nvcc").exists()
    return "ON" if has_gpu() and has_nvcc else "OFF"


def install(folder: Path, cuda: str) -> None:
    """Create `folder` if need be and install the project, editable, with everything that make's targets use."""
    python = folder / "bin" / "python"
    if not python.exists():
        show(f"creating {folder} with Python {sys.version.split()[0]}")
        venv.create(folder, with_pip=True, clear=folder.exists())
    log = folder / "install.log"
    log.write_text("")
    constraints = ["-c", "constraints.txt"]
    show("installing torch, megatron-core and the tools (about 3 GB to download; minutes)")
    run_pip(python, log, [*constraints, "scikit-build-core", "torch"])
    run_pip(python, log, [*constraints, "--no-build-isolation", "-e", ".[dev]"])
    if cuda == "ON":
        run_pip(python, log, [*constraints, "cmake", "ninja"])
        build_cuda(folder, log)


def build_cuda(folder: Path, log: Path) -> None:
    """Build the CUDA library into the source tree, where an editable install looks for it."""
    show("building the CUDA library (minutes)")
    build = ["make", "cuda", f"VENV={folder}"]
    with log.open("a") as file:
        code = subprocess.run(build, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, check=False).returncode
    if code != 0:
        fail(log, "Building the CUDA library failed", "or set up without it: make setup CUDA=OFF")


def main() -> None:
    """Parse the command line, install, and leave the stamp that makes the next run instant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cuda", choices=("AUTO", "ON", "OFF"), default="AUTO")
    options = parser.parse_args()
    started = time.monotonic()
    os.environ.pop("PYTHONPATH", None)
    install(options.folder, resolve_cuda(options.cuda))
    (options.folder / "installed").touch()
    show(f"done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
