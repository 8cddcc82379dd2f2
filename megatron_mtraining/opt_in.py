"""``megatron-mtraining enable``: the start-up hook put into site-packages, and taken out again.

Two files make it: a ``.pth`` file, whose one line Python runs at start-up, and ``startup_hook``, which that line imports
if a word of the command line holds ``mtraining``. Both are entered in the package's list of installed files (RECORD), so
that ``pip uninstall`` removes them too.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import os
import shutil
import site
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from . import startup_hook
from .launch import STARTUP_MODULE

DISTRIBUTION = "megatron-mtraining"
PTH = "megatron_mtraining_enable.pth"
HOOK = f"{STARTUP_MODULE}.py"
LINE = f'import sys; any("mtraining" in word for word in sys.orig_argv) and __import__("{STARTUP_MODULE}")\n'


class OptInError(Exception):
    """Enabling or disabling failed; the message is one line and says what to do."""


@dataclass(frozen=True)
class Enabled:
    """What :func:`enable` has done.

    Attributes:
        folder: where the files are.
        removed_by_uninstall: whether ``pip uninstall`` removes them.
    """

    folder: Path
    removed_by_uninstall: bool


def site_folders() -> list[Path]:
    """The folders whose ``.pth`` files this interpreter runs at start-up, the preferred one first.

    Folders of ``PYTHONPATH`` and of ``pip install --target`` are none.
    """
    folders = [sysconfig.get_path("purelib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    home = _distribution_folder()
    ordered = sorted(dict.fromkeys(Path(folder).resolve() for folder in folders), key=lambda path: path != home)
    return [path for path in ordered if path.is_dir()]


def enabled_folders() -> list[Path]:
    """The folders in which the plugin is enabled."""
    return [folder for folder in site_folders() if (folder / PTH).exists() or (folder / HOOK).exists()]


def enable() -> Enabled:
    """Puts the hook where this interpreter, or this virtual environment, finds it at start-up. Again: renews it.

    Raises:
        OptInError: if no such folder can be written, or if the hook does not work there.
    """
    folders = enabled_folders() or [folder for folder in site_folders() if os.access(folder, os.W_OK)]
    if not folders:
        listed = ", ".join(map(str, site_folders())) or "none exists"
        raise OptInError(f"enable: no site-packages folder of {sys.executable} can be written ({listed})")
    folder = folders[0]
    try:
        for name, content in _contents().items():
            (folder / name).write_text(content, encoding="utf-8")
        recorded = _record(folder, present=True)
    except OSError as error:
        for path in (folder / PTH, folder / HOOK):  # else it would be on after a command that failed
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise OptInError(f"enable: {error}; it is not enabled") from None
    _check_works(folder)
    return Enabled(folder, recorded)


def _contents() -> dict[str, str]:
    """The files that make the hook, in the order in which they are written."""
    return {HOOK: Path(startup_hook.__file__).read_text(encoding="utf-8"), PTH: LINE}


def is_whole(folder: Path) -> bool:
    """Whether a folder has the hook of this version of the package, with nothing missing."""
    try:
        return all((folder / name).read_text(encoding="utf-8") == content for name, content in _contents().items())
    except (OSError, UnicodeDecodeError):
        return False


def disable() -> list[Path]:
    """Takes the hook out of every folder that has it, and returns these.

    Raises:
        OptInError: if a file cannot be removed.
    """
    folders = enabled_folders()
    for folder in folders:
        try:
            for path in (folder / PTH, folder / HOOK, *(folder / "__pycache__").glob(f"{STARTUP_MODULE}.*")):
                path.unlink(missing_ok=True)
            _record(folder, present=False)
        except OSError as error:
            raise OptInError(f"disable: {error}") from None
    return folders


def _distribution_folder() -> Path | None:
    """The folder that holds the installed package's metadata; None if it is not installed."""
    try:
        return Path(str(importlib.metadata.distribution(DISTRIBUTION).locate_file(""))).resolve()
    except importlib.metadata.PackageNotFoundError:
        return None


def _record(folder: Path, present: bool) -> bool:
    """Enters the two files in RECORD, or takes them out. Returns whether there is a RECORD that covers the folder."""
    if folder != _distribution_folder():
        return False
    files = importlib.metadata.distribution(DISTRIBUTION).files or []
    record = next((Path(str(file.locate())) for file in files if file.name == "RECORD"), None)
    if record is None or not record.is_file():
        return False
    with record.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.reader(lines) if row and row[0] not in (PTH, HOOK)]
    if present:
        rows += [[PTH, "", ""], [HOOK, "", ""]]
    # A new file in its place: half a RECORD would keep pip from uninstalling, and a package manager may have linked it.
    new = record.with_name("RECORD.new")
    try:
        with new.open("w", encoding="utf-8", newline="") as lines:
            csv.writer(lines, lineterminator="\n").writerows(rows)
        shutil.copymode(record, new)
        new.replace(record)
    finally:
        new.unlink(missing_ok=True)
    return True


def _check_works(folder: Path) -> None:
    """A new interpreter must arm the hook when it is asked to, and only then."""
    code = f"import sys; print(any(type(finder).__module__ == {STARTUP_MODULE!r} for finder in sys.meta_path))"
    option = f"{startup_hook.OPTION}={startup_hook.BACKEND}"
    for words, expected in (([option], "True"), ([], "False")):
        found = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
        if found.stdout.split()[-1:] != [expected]:  # a sitecustomize may have printed something before
            disable()
            detail = found.stderr.strip().splitlines()[-1:] or ["Python did not run the .pth file"]
            raise OptInError(f"enable: the hook does not work in {folder} ({detail[0]}); it is not enabled")
