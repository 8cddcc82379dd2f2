"""Writes the tables of docs/options.md from the code: every option of the launcher and every field of MTrainingConfig.

    python tools/options_page.py            rewrite the tables in the page
    python tools/options_page.py --check    exit with 1 if they are not up to date (a test does the same)

Text around the tables is the page's own. A new option appears under "Other" until it is given a group here.
"""

import argparse
import dataclasses
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_mtraining import MTrainingConfig  # noqa: E402
from megatron_mtraining.integration.options import PREFIX, add_mtraining_arguments  # noqa: E402

PAGE = ROOT / "docs" / "options.md"

GROUPS = {
    "lines": "top_p vertical_top_p slash_top_p last_q max_vertical max_slash local_blocks sink_tokens dense",
    "plan": "dense_layers dense_steps layer_top_p top_p_schedule",
    "guard": "guard_recall guard_density guard_action",
    "layout": "layout layout_mode stripe_size stripe_rotation",
    "ring": "ring inner_across_hosts kernel deterministic vertical_backward chunks_per_launch max_compact_columns",
    "policies": "index_policy fixed_vertical fixed_slash flexprefill_tau xattention_stride moba_block_size moba_top_k",
    "output": "metrics dump_index dump_steps dump_layers",
}
"""Tables of the page and the options in them, in order."""

HEADER = "| option | default | valid | meaning |\n|---|---|---|---|"


def actions() -> dict[str, argparse.Action]:
    """Every ``--mtraining-*`` option of Megatron's parser under the plugin, by its name without the prefix."""
    parser = argparse.ArgumentParser(add_help=False)
    add_mtraining_arguments(parser)
    return {action.dest.removeprefix(PREFIX): action for action in parser._actions}


def valid_values(name: str, action: argparse.Action) -> str:
    """What an option takes, as the config says when it refuses a wrong value."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return "on, off"
    if action.choices:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    if name not in {item.name for item in dataclasses.fields(MTrainingConfig)}:
        return f"`{action.metavar}`"
    try:
        dataclasses.replace(MTrainingConfig(), **{name: -1})  # type: ignore[arg-type]
    except ValueError as refusal:
        said = re.fullmatch(rf"{name}=-1: must be (.*)", str(refusal))
        if said:
            return said[1].replace(", or None", ", or `none`").replace(" up", " on")
    raise SystemExit(f"MTrainingConfig does not say what {name} may be")


def shown_default(action: argparse.Action) -> str:
    """The default as a user would give it."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return "on" if action.default else "off"
    return "none" if action.default is None else f"`{action.default}`"


def row(name: str, action: argparse.Action) -> str:
    """One line of a table."""
    # Both forms of a switch: the one that does something comes first.
    forms = list(action.option_strings)
    flags = " ".join(f"`{flag}`" for flag in (forms[::-1] if action.default is True else forms))
    text = re.sub(r" \(default: [^()]*\)$", "", str(action.help)).replace("%%", "%").replace("|", "\\|")
    return f"| {flags} | {shown_default(action)} | {valid_values(name, action)} | {text} |"


def tables() -> dict[str, str]:
    """The tables by their names."""
    left = actions()
    made = {}
    for group, names in GROUPS.items():
        made[group] = "\n".join([HEADER, *(row(name, left.pop(name)) for name in names.split())])
    made["other"] = "\n".join([HEADER, *(row(name, action) for name, action in left.items())]) if left else ""
    return made


def render(page: str) -> str:
    """The page with its tables between ``<!-- table: NAME -->`` and ``<!-- end -->`` made anew.

    Raises:
        SystemExit: if the page lacks a table.
    """
    for name, table in tables().items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        heading = "\n## Other\n\n" if name == "other" and table else ""
        body = f"{heading}{table}\n" if table else ""
        places = pattern.findall(page)
        if len(places) != 1:
            raise SystemExit(f"{PAGE.name}: the table {name!r} is there {len(places)} times, not once")
        start, end = places[0]
        page = pattern.sub((start + body + end).replace("\\", r"\\"), page)
    return page


def main() -> None:
    """Writes the page, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    before = PAGE.read_text()
    after = render(before)
    if check and before != after:
        raise SystemExit(f"docs/{PAGE.name} is not up to date: run python tools/options_page.py")
    if not check:
        PAGE.write_text(after)


if __name__ == "__main__":
    main()
