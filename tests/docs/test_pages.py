"""The documentation says what is so: options, messages, files, symbols and commands that it names exist in the code."""

import argparse
import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from megatron_mtraining.integration.options import add_mtraining_arguments

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
SOURCES = [
    *(ROOT / "megatron_mtraining").rglob("*.py"),
    ROOT / "tools" / "build_backend.py",
]
LAUNCHER_OPTIONS = {"--mtraining-cpu"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_tables_made_from_code_and_results_are_up_to_date():
    done = subprocess.run(
        [sys.executable, "tools/docs_tables.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def existing_options() -> set[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_mtraining_arguments(parser)
    return {flag for action in parser._actions for flag in action.option_strings} | LAUNCHER_OPTIONS


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_option_that_a_page_names_exists(page):
    named = set(re.findall(r"--(?:no-)?mtraining-[a-z-]*[a-z]", page.read_text()))
    assert named <= existing_options()


def test_every_option_is_on_the_page_of_options():
    page = (DOCS / "options.md").read_text()
    missing = [option for option in existing_options() if f"`{option}`" not in page]
    assert not missing


# Messages


class Templates(ast.NodeVisitor):
    """Every string of a module, with a NUL for each value that is put in."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.found.append(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
        self.found.append("".join(map(str, parts)))
        self.generic_visit(node)


@lru_cache
def templates() -> tuple[str, ...]:
    visitor = Templates()
    for path in SOURCES:
        visitor.visit(ast.parse(path.read_text()))
    return tuple(visitor.found)


def quoted_messages() -> Iterator[str]:
    """First cells of the tables of troubleshooting.md that are under a heading of messages."""
    for section in (DOCS / "troubleshooting.md").read_text().split("\n## ")[1:]:
        if section.startswith("No message"):
            continue
        for line in section.splitlines():
            if line.startswith("| `"):
                yield re.match(r"\| `([^`]*)`", line)[1]


def is_said_by(message: str, template: str) -> bool:
    """Whether the fixed parts of a message, between its dots, stand in the template in their order."""
    place, fragments = 0, [part.strip() for part in message.split("...") if part.strip()]
    assert sum(map(len, fragments)) > 15, f"{message}: too little to find"
    for fragment in fragments:
        place = template.find(fragment, place)
        if place < 0:
            return False
        place += len(fragment)
    return True


@pytest.mark.parametrize("message", list(quoted_messages()))
def test_every_message_on_the_page_exists_in_the_source(message):
    assert any(is_said_by(message, template) for template in templates()), message


def test_a_message_that_does_not_exist_is_found():
    assert not any(is_said_by("seq_len=...: the ... layout is not amused", template) for template in templates())


# Paper map


TOP = r"(?:megatron_mtraining|csrc|benchmarks|tests|examples|tools)/[\w/.-]+"


def mapped() -> Iterator[tuple[str, str]]:
    """(path, symbol or "") of every `path` and `path`: `symbol`, `symbol` of the paper map."""
    page = (DOCS / "paper_map.md").read_text()
    for path, symbols in re.findall(rf"`({TOP})`((?:(?:: |, )`[A-Za-z_.0-9]+`)*)", page):
        yield from ((path, name) for name in re.findall(r"`([^`]+)`", symbols) or [""])


def defined_in(path: Path) -> set[str]:
    """Names defined in a file: top-level ones, and Class.member."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        for target in getattr(node, "targets", [getattr(node, "target", node)]):
            name = getattr(node, "name", getattr(target, "id", None))
            names.add(name)
        if isinstance(node, ast.ClassDef):
            members = [getattr(item, "name", getattr(getattr(item, "target", None), "id", "")) for item in node.body]
            names |= {f"{node.name}.{member}" for member in members}
    return names


@pytest.mark.parametrize(("path", "symbol"), sorted(set(mapped())))
def test_every_file_and_symbol_of_the_paper_map_exists(path, symbol):
    assert (ROOT / path).exists()
    assert not symbol or symbol in defined_in(ROOT / path)


def test_the_paper_map_names_most_of_the_package():
    assert len({path for path, _ in mapped()}) > 20


# Links and commands


def links(page: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    yield from re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_to_a_file_leads_to_one(page):
    broken = [link for link in links(page) if "://" not in link and not (page.parent / link).exists()]
    assert not broken


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


def test_the_python_of_the_quick_start_runs():
    for code in blocks("quickstart.md", "python"):
        exec(compile(code, "quickstart.md", "exec"), {})


def test_every_page_is_in_the_navigation():
    index = (DOCS / "index.md").read_text()
    trees = re.findall(r"```{toctree}(.*?)```", index, re.DOTALL)
    listed = {re.sub(r".*<(.*)>", r"\1", line.strip()) for tree in trees for line in tree.splitlines()}
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")} - {"index"}
    assert pages <= listed


def guide_command() -> list[str]:
    """The arguments of the script in the Megatron guide's command."""
    command = next(block for block in blocks("megatron.md", "sh") if "pretrain_gpt.py" in block)
    words = shlex.split(command.replace("\\\n", " "))
    return words[words.index("pretrain_gpt.py") + 1 :]


def test_the_command_of_the_megatron_guide_is_accepted(monkeypatch, tmp_path):
    pytest.importorskip("megatron.training", reason="needs megatron-core 0.19 or newer")
    from megatron.training import arguments

    from megatron_mtraining.integration import install, runtime, uninstall

    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
    monkeypatch.setenv("WORLD_SIZE", "32")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *guide_command()])
    monkeypatch.chdir(tmp_path)  # it makes the file of its metrics
    install()
    try:
        args = arguments.parse_args()
        arguments.validate_args(args)
        state = runtime.current()
        assert (state.config.top_p, state.layout_mode.mode, args.data_parallel_size) == (0.9, "native", 1)
    finally:
        uninstall()
