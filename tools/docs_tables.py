"""Writes the tables of docs/options.md, launching.md and performance.md, from the code and from benchmarks/results.

    python tools/docs_tables.py            rewrite the tables in the pages
    python tools/docs_tables.py --check    exit with 1 if they are not up to date (a test does the same)

A table stands between ``<!-- table: KIND ARGUMENTS -->`` and ``<!-- end -->``; all other text is the page's own. A new option
appears under "Other" until options_tables.py gives it a group; a new measurement is one line in the page.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from options_tables import option_tables  # noqa: E402
from plan_tables import launches  # noqa: E402
from results_tables import KINDS  # noqa: E402

PAGES = tuple(ROOT / "docs" / name for name in ("options.md", "launching.md", "performance.md"))
PLACE = re.compile(r"(<!-- table: ([^\n]*) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(words: list[str]) -> str:
    """The table that a marker names.

    Raises:
        KeyError: for a kind that does not exist.
    """
    kind, *arguments = words
    if kind == "options":
        return option_tables()[arguments[0]]
    if kind == "launches":
        return launches(*arguments)
    return KINDS[kind](*arguments)


def render(page: str) -> str:
    """A page with all its tables made anew."""

    def fill(place: re.Match[str]) -> str:
        text = table(place[2].split())
        return f"{place[1]}{text}\n{place[3]}" if text else f"{place[1]}{place[3]}"

    return PLACE.sub(fill, page)


def main() -> None:
    """Writes the pages, or checks them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for path in PAGES:
        before = path.read_text()
        after = render(before)
        if check and before != after:
            raise SystemExit(f"docs/{path.name} is not up to date: run python tools/docs_tables.py")
        if not check:
            path.write_text(after)


if __name__ == "__main__":
    main()
