"""Tables of options, made from the code: every option of the launcher and every field of MTrainingConfig."""

import argparse
import dataclasses
import re

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.integration.options import PREFIX, add_mtraining_arguments

GROUPS = {
    "lines": "top_p vertical_top_p slash_top_p last_q probe_segments max_vertical max_slash local_blocks sink_tokens dense",
    "plan": "dense_layers dense_steps layer_top_p top_p_schedule",
    "guard": "guard_recall guard_density guard_action guard_scope guard_segments",
    "layout": "layout layout_mode stripe_size stripe_rotation",
    "ring": "ring inner_across_hosts kernel deterministic vertical_backward chunks_per_launch max_compact_columns",
    "policies": "index_policy fixed_vertical fixed_slash flexprefill_tau xattention_stride moba_block_size moba_top_k",
    "output": "log metrics profile_steps dump_index dump_steps dump_layers",
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


def option_tables() -> dict[str, str]:
    """The tables by the names of :data:`GROUPS`; "other" has the options that are in none of them."""
    left = actions()
    made = {}
    for group, names in GROUPS.items():
        made[group] = "\n".join([HEADER, *(row(name, left.pop(name)) for name in names.split())])
    rows = [row(name, action) for name, action in left.items()]
    made["other"] = "\n".join(["", "## Other", "", HEADER, *rows]) if rows else ""
    return made
