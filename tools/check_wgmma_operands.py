"""Checks compiled kernels for overwritten wgmma operands.

ptxas 13.0 was seen giving the registers of an A operand, loaded once before a loop, to other values inside the loop. The
sm_90a kernels load such operands with ldmatrix only, so every other write to a register that an LDSM filled is reported if
an HGMMA may read it as A operand before the next LDSM.
Usage: `check_wgmma_operands.py [--cuobjdump PATH] OBJECT...`; exits 1 on a finding.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator

FUNCTION = re.compile(r"Function : (\S+)")
LOAD = re.compile(r"LDSM\.16\.M88\.4 R(\d+),")
PRODUCT = re.compile(r"HGMMA\.\S+ R\d+, R(\d+), gdesc")
WRITE = re.compile(r"\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)\s+(?:!?P\w+, )*R(\d+)\b")
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?([A-Z0-9_.]+)(.*)")
TARGET = re.compile(r"0x([0-9a-f]+)")
NO_DESTINATION = ("ST", "RED", "SYNCS", "R2UR", "BRA", "HGMMA", "LDSM")


def functions(sass: str) -> Iterator[tuple[str, list[str]]]:
    """The (name, instruction lines) of every function in a disassembly."""
    name = ""
    lines: list[str] = []
    for line in sass.splitlines():
        if match := FUNCTION.search(line):
            if name:
                yield name, lines
            name, lines = match[1], []
        elif name:
            lines.append(line.split("/* 0x")[0].strip())
    if name:
        yield name, lines


def quads(pattern: re.Pattern[str], lines: list[str]) -> set[int]:
    """The registers of all four-register groups that `pattern` finds."""
    starts = [int(match[1]) for line in lines if (match := pattern.search(line))]
    return {start + i for start in starts for i in range(4)}


def successors(lines: list[str]) -> list[list[int]]:
    """For every instruction, the instructions that may follow it."""
    parsed = [match for line in lines if (match := INSTRUCTION.search(line))]
    index = {int(match[1], 16): i for i, match in enumerate(parsed)}
    joins: dict[str, int] = {}  # barrier: where the threads that meet at it go on
    follow: list[list[int]] = []
    for i, (_, predicate, name, operands) in enumerate(match.groups() for match in parsed):
        after = [i + 1] if i + 1 < len(parsed) else []
        target = TARGET.search(operands)
        if name == "EXIT" and predicate is None:
            after = []
        elif name == "BSSY" and target:
            joins[operands.split(",")[0].strip()] = index[int(target[1], 16)]
        elif name == "BSYNC" and (barrier := operands.strip(" ;")) in joins:
            after.append(joins[barrier])
        elif name.startswith("BRA") and target:
            always = predicate is None and name == "BRA" and operands.strip().startswith("0x")
            after = [index[int(target[1], 16)], *([] if always else after)]
        follow.append(after)
    return follow


def read_later(lines: list[str], held: set[int]) -> list[set[int]]:
    """For every instruction, the registers of `held` that a product may read after it before ldmatrix fills them."""
    follow = successors(lines)
    reads = [quads(PRODUCT, [line]) & held for line in lines]
    fills = [quads(LOAD, [line]) & held for line in lines]
    before: list[set[int]] = [set() for _ in lines]
    after: list[set[int]] = [set() for _ in lines]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(lines))):
            after[i] = set().union(*(before[j] for j in follow[i]))
            live = reads[i] | (after[i] - fills[i])
            changed |= live != before[i]
            before[i] = live
    return after


def overwritten(lines: list[str]) -> list[str]:
    """The instructions that write to a register which holds an operand loaded by ldmatrix and still to be read."""
    lines = [line for line in lines if INSTRUCTION.search(line)]
    later = read_later(lines, quads(LOAD, lines) & quads(PRODUCT, lines))
    writes = ((line, live, WRITE.search(line)) for line, live in zip(lines, later, strict=True))
    return [
        line
        for line, live, match in writes
        if match and not match[1].startswith(NO_DESTINATION) and int(match[2]) in live
    ]


def main() -> int:
    """Checks the objects named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objects", nargs="+", metavar="OBJECT", help="object file or library with sm_90a code")
    parser.add_argument("--cuobjdump", default="cuobjdump", help="the disassembler (default: %(default)s)")
    options = parser.parse_args()
    found = checked = 0
    for path in options.objects:
        sass = subprocess.run([options.cuobjdump, "-sass", path], check=True, capture_output=True, text=True).stdout
        for name, lines in functions(sass):
            checked += quads(PRODUCT, lines) != set()
            for line in overwritten(lines):
                found += 1
                print(f"{path}: {name}: operand overwritten: {line}")
    print(f"{checked} functions with wgmma operands in registers, {found} overwritten operands")
    return 1 if found or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
