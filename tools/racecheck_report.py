"""Judges what compute-sanitizer's racecheck reports of the Hopper kernels.

Words that threads poll (relaxed stores and loads) are reported by racecheck, which knows barriers only; they are
the one kind of hazard that these kernels are meant to have. Every other hazard is listed and makes the exit status 1.
Needs a library built with `MTRAINING_RACECHECK` (source lines), and `--racecheck-report hazard` or `all`. Usage:
`racecheck_report.py LOG...`
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator

HAZARD = re.compile(r"(RAW|WAR|WAW) hazard detected")
ACCESS = re.compile(r"(Read|Write) Thread \([\d,]+\) at (.+?)(?:\+0x[0-9a-f]+)? in (\S+)")
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
POLLED = ("store_word", "load_word")
"""The functions of `csrc/sm90/ptx.cuh` that write and poll words."""

Hazard = tuple[str, tuple[str, ...]]


def hazards(lines: list[str]) -> Iterator[Hazard]:
    """The (kind, accesses) of every hazard of a log; an access is "Read function file:line"."""
    kind, accesses = "", list[str]()
    for line in [*lines, "hazard detected"]:
        if "hazard detected" in line:
            if kind:
                yield kind, tuple(accesses)
            match = HAZARD.search(line)
            kind, accesses = (match[1] if match else ""), []
        elif match := ACCESS.search(line):
            accesses.append(f"{match[1]} {short(match[2])} {match[3]}")


def short(function: str) -> str:
    """The name of a function without scopes, template arguments and parameters."""
    while "<" in function and function != (function := re.sub(r"<[^<>]*>", "", function)):
        pass
    return function.split("(")[0].split("::")[-1]


def is_polled(hazard: Hazard) -> bool:
    """Do both accesses belong to polled words?"""
    return len(hazard[1]) == 2 and all(access.split()[1] in POLLED for access in hazard[1])


def report(name: str, text: str) -> bool:
    """Prints the hazards of one log by place; whether all of them are explained."""
    lines = text.splitlines()
    summary = SUMMARY.search(text)
    if summary is None:
        print(f"{name}: racecheck came to no end")
        return False
    found = Counter(hazards(lines))
    polled = sum(count for hazard, count in found.items() if is_polled(hazard))
    others = {hazard: count for hazard, count in found.items() if not is_polled(hazard)}
    analyses = text.count("Race reported between")  # summaries of hazards (--racecheck-report all), counted as well
    hidden = int(summary[2]) + int(summary[3]) - sum(found.values()) - analyses
    print(f"{name}: {polled} reports of polled words, {sum(others.values())} others, {max(hidden, 0)} not displayed")
    for (kind, accesses), count in sorted(others.items(), key=lambda item: -item[1]):
        print(f"  {count} x {kind}: {' / '.join(accesses)}")
    return not others and hidden <= 0


def main() -> int:
    """Reads the logs named on the command line."""
    good = True
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8", errors="replace") as log:
            good &= report(path, log.read())
    return 0 if good and len(sys.argv) > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
