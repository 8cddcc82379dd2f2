"""``megatron-mtraining enable``: in a virtual environment of its own, from the installed wheel to its removal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_mtraining import cli, launch, opt_in, startup_hook

from .test_launch import OPTIONS, ROOT, SCRIPT

ARMED = (
    "import sys; print(any(type(finder).__qualname__ == 'Finder' for finder in sys.meta_path), 'torch' in sys.modules)"
)


class Environment:
    """A virtual environment that sees the packages of this one, and has the plugin installed itself."""

    def __init__(self, folder):
        self.folder = folder
        venv.create(folder, with_pip=False)
        self.site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (self.site / "packages_of_the_tests.pth").write_text("\n".join({sysconfig.get_path("purelib"), *_megatron()}))
        self.untouched = self.files()

    def files(self):
        return {path.name for path in self.site.iterdir()}

    def python(self, *words, **variables):
        base = {name: value for name, value in os.environ.items() if not name.startswith(("NVTE_", "PYTHON"))}
        return subprocess.run(
            [str(self.folder / "bin" / "python"), *map(str, words)], env=base | {"WORLD_SIZE": "4"} | variables,
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    def command(self, name):
        return self.python("-m", "megatron_mtraining.cli", name)

    def pip(self, *words):
        command = [sys.executable, "-m", "pip", "--python", str(self.folder / "bin" / "python"), *words]
        subprocess.run(command, capture_output=True, text=True, check=True)


def _megatron():
    """The folder of a Megatron that is on the import path rather than installed."""
    import megatron.training

    return {str(Path(megatron.training.__file__).parents[2])}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opt_in")
    environment = Environment(folder / "venv")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "-C", "cmake.define.MTRAINING_CUDA=OFF"]
    build = [sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), str(ROOT)]
    subprocess.run(build, capture_output=True, text=True, check=True)
    environment.pip("install", "--no-deps", "--no-index", *map(str, folder.glob("*.whl")))
    return environment


@pytest.fixture
def enabled(environment):
    done = environment.command("enable")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    yield environment
    environment.command("disable")


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper_beside_the_script.py").write_text("VALUE = 42\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_plain_script_gets_the_plugin(enabled, script):
    """As under the launcher; the processes that it spawns are left alone."""
    done = enabled.python(script, *OPTIONS.split(), "--attention-backend", "mtraining")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))[7:])
    assert result == {
        "argv": ["--num-layers", "2"],
        "worker": [False, "__mp_main__", "train.py"],
        "backend": "auto",
        "slicer replaced": True,
        "script has it too": True,
        "helper": 42,
    }
    assert "> megatron_mtraining: layout striped, native" in done.stdout


def test_a_refusal_is_one_line(enabled, script):
    words = ["--attention-backend", "mtraining", "--softmax-type", "learnable"]
    done = enabled.python(script, *OPTIONS.split(), *words)
    assert done.returncode == 1
    assert "RESULT" not in done.stdout
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("megatron_mtraining: error: --softmax-type learnable: not supported")


def test_without_the_option_nothing_is_touched(enabled, script):
    """Megatron's parser is its own: it does not know the plugin's word, and no module of the plugin is loaded."""
    probe = script.with_name("probe.py")
    probe.write_text(
        "import sys\nfrom megatron.training import arguments\n"
        "print('PLUGIN', [name for name in sys.modules if 'mtraining' in name], arguments.validate_args.__module__)\n"
    )
    done = enabled.python(probe, *OPTIONS.split(), "--attention-backend", "flash")
    assert "PLUGIN [] megatron.training.arguments" in done.stdout, done.stderr[-2000:]


@pytest.mark.full
def test_the_launcher_may_be_used_all_the_same(enabled, script):
    words = ["-m", "megatron_mtraining.launch", script, *OPTIONS.split(), "--attention-backend", "mtraining"]
    done = enabled.python(*words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("> megatron_mtraining: layout striped, native") == 1


@pytest.mark.parametrize(
    ("words", "armed"),
    [
        (["--attention-backend", "mtraining"], True),
        (["--attention-backend=mtraining"], True),
        (["--mtraining-top-p", "0.9"], True),
        (["--attention-backend", "flash", "--save", "/data/mtraining"], False),
        (["mtraining"], False),
        ([], False),
    ],
)
def test_only_a_command_line_that_asks_for_it_arms_the_hook(enabled, words, armed):
    """And Python starts without torch."""
    done = enabled.python("-c", ARMED, *words)
    assert (done.stdout, done.stderr) == (f"{armed} False\n", "")
    assert startup_hook.is_requested(words) == armed


def test_status_says_whether_it_is_enabled(environment):
    before = environment.command("status").stdout
    environment.command("enable")
    during = environment.command("status").stdout
    environment.command("disable")
    assert "enabled:             no (megatron-mtraining enable)" in before
    assert f"enabled:             {environment.site / opt_in.PTH}" in during
    for fact in ("python:", "torch:", "megatron-core:", "CUDA library:", "GPUs:"):
        assert fact in before


def test_asking_for_the_module_is_not_loading_it(enabled, tmp_path):
    """Programs look whether Megatron's training package is there before they import it."""
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import importlib.util, sys\nfrom megatron_mtraining import launch\n"
        "launch.take_over = lambda: print('TAKEN OVER')\n"
        "print([importlib.util.find_spec('megatron.training') is not None for _ in range(2)])\n"
        "import megatron.training\nimport megatron.training.arguments\n"
    )
    done = enabled.python(probe, "--attention-backend", "mtraining")
    assert done.stdout.splitlines() == ["[True, True]", "TAKEN OVER"], done.stderr[-2000:]


def test_a_sitecustomize_that_prints_is_no_obstacle(environment):
    other = environment.site / "sitecustomize.py"
    other.write_text("print('good morning')\n")
    try:
        done = environment.command("enable")
    finally:
        other.unlink()
        environment.command("disable")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("missing", [opt_in.PTH, opt_in.HOOK, "another version"])
def test_a_hook_that_is_not_whole_is_pointed_out(monkeypatch, tmp_path, capsys, missing):
    monkeypatch.setattr(opt_in, "site_folders", lambda: [tmp_path])
    monkeypatch.setattr(opt_in, "_check_works", lambda _: None)
    opt_in.enable()
    cli.status()
    assert "run enable again" not in capsys.readouterr().out
    if missing == "another version":
        (tmp_path / opt_in.HOOK).write_text("# an older one\n")
    else:
        (tmp_path / missing).unlink()
    cli.status()
    assert f"{tmp_path / opt_in.PTH} (not whole, or of another version: run enable again)" in capsys.readouterr().out
    assert opt_in.enable().folder == tmp_path and opt_in.is_whole(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_record_that_cannot_be_written_stays_as_it_was(monkeypatch, tmp_path):
    """A disk that is full must not cost the package its list of files."""
    record = tmp_path / "RECORD"
    record.write_text("megatron_mtraining/__init__.py,,\n")
    (tmp_path / "RECORD.new").symlink_to("/dev/full")
    located = SimpleNamespace(name="RECORD", locate=lambda: record)
    monkeypatch.setattr(opt_in, "_distribution_folder", lambda: tmp_path)
    monkeypatch.setattr(opt_in.importlib.metadata, "distribution", lambda _: SimpleNamespace(files=[located]))
    with pytest.raises(OSError, match="No space left"):
        opt_in._record(tmp_path, present=True)
    assert record.read_text() == "megatron_mtraining/__init__.py,,\n"
    assert not (tmp_path / "RECORD.new").is_symlink()
    assert opt_in._record(tmp_path, present=True)
    assert record.read_text().splitlines()[1:] == [f"{opt_in.PTH},,", f"{opt_in.HOOK},,"]


def test_disable_takes_everything_out_and_can_be_repeated(environment):
    before = environment.files()
    record = next(environment.site.glob("*.dist-info")) / "RECORD"
    lines = set(record.read_text().splitlines())
    assert environment.command("enable").returncode == 0
    assert environment.files() - before == {opt_in.PTH, opt_in.HOOK, "__pycache__"} - before
    first, second = environment.command("disable"), environment.command("disable")
    assert (first.returncode, second.returncode) == (0, 0)
    assert "disabled: removed" in first.stdout
    assert "not enabled: nothing to do" in second.stdout
    assert not {opt_in.PTH, opt_in.HOOK} & environment.files()
    assert set(record.read_text().splitlines()) == lines


@pytest.mark.full
def test_a_hook_without_the_package_says_so_in_one_line(environment, script):
    """It was copied, or the package was deleted by hand."""
    (environment.site / opt_in.HOOK).write_text(Path(startup_hook.__file__).read_text())
    (environment.site / opt_in.PTH).write_text(opt_in.LINE)
    package = environment.site / "megatron_mtraining"
    hidden = package.rename(environment.site / "hidden")
    try:
        assert environment.python("-c", "pass", "--attention-backend=mtraining").stderr == ""
        done = environment.python(script, *OPTIONS.split(), "--attention-backend", "mtraining")
    finally:
        hidden.rename(package)
        environment.command("disable")
    assert done.returncode == 1
    assert "megatron_mtraining: error: enabled by" in done.stderr.splitlines()[-1]


def test_a_folder_that_cannot_be_written_is_one_line(monkeypatch):
    monkeypatch.setattr(opt_in.os, "access", lambda *_: False)
    monkeypatch.setattr(opt_in, "enabled_folders", list)
    with pytest.raises(opt_in.OptInError, match="can be written") as raised:
        opt_in.enable()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("fails", ["record", "pth"])
def test_what_fails_half_way_leaves_nothing(monkeypatch, tmp_path, fails):
    """Not enabled after a command that ended with an error."""
    monkeypatch.setattr(opt_in, "site_folders", lambda: [tmp_path])

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "RECORD")

    if fails == "record":
        monkeypatch.setattr(opt_in, "_record", refuse)
    else:
        (tmp_path / opt_in.PTH).mkdir()
    with pytest.raises(opt_in.OptInError, match=r"^enable: \[Errno .*; it is not enabled$"):
        opt_in.enable()
    assert not (tmp_path / opt_in.HOOK).exists() and not (tmp_path / opt_in.PTH).is_file()


def test_refusals_alone_lose_their_traceback(capsys):
    seen = []
    hook = launch._refusals_in_one_line(lambda kind, error, where: seen.append(kind))
    hook(launch.RefusedError, launch.RefusedError("--x 1: must be 2"), None)
    hook(ValueError, ValueError("other"), None)
    assert capsys.readouterr().err == "megatron_mtraining: error: --x 1: must be 2\n"
    assert seen == [ValueError]


def test_uninstall_removes_it_while_enabled(environment):
    """Last: the package is gone afterwards. Python starts without a word, whatever its command line."""
    assert environment.command("enable").returncode == 0
    environment.pip("uninstall", "-y", opt_in.DISTRIBUTION)
    assert {name for name in environment.files() if "mtraining" in name} == set()
    for words in ([], ["--attention-backend", "mtraining"]):
        done = environment.python("-c", ARMED, *words)
        assert (done.stdout, done.stderr) == ("False False\n", "")
