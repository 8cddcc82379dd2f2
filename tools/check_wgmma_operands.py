"""Checks compiled kernels for overwritten wgmma operands.

ptxas 13.0 was seen giving the registers of an A operand, loaded once before a loop, to other values inside the loop. The
sm_90a kernels load such operands with ldmatrix only, so every other write to a register that an LDSM filled and an HGMMA
reads as A operand is reported. Usage: `check_wgmma_operands.py [--cuobjdump PATH] OBJECT...`; exits 1 on a finding.
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


def overwritten(lines: list[str]) -> list[str]:
    """The instructions that write to a register which holds an operand loaded by ldmatrix."""
    held = quads(LOAD, lines) & quads(PRODUCT, lines)
    writes = ((line, WRITE.search(line)) for line in lines)
    return [
        line for line, match in writes if match and not match[1].startswith(NO_DESTINATION) and int(match[2]) in held
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
