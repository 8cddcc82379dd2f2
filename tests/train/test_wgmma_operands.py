"""The checker of compiled kernels tells a harmful write to a wgmma operand from a harmless one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_wgmma_operands.py"
KERNEL = """
/*0010*/ LDSM.16.M88.4 R8, [R2] ;
/*0020*/ {inside}
/*0030*/ HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], R24 ;
/*0040*/ @P0 BRA 0x0020 ;
/*0050*/ {after}
/*0060*/ @P1 BRA 0x0010 ;
/*0070*/ EXIT ;
"""


@pytest.mark.parametrize(
    ("inside", "after", "expected"),
    [
        ("NOP ;", "MUFU.EX2 R9, R3 ;", []),  # loaded anew before the next product
        ("MUFU.EX2 R9, R3 ;", "NOP ;", ["MUFU.EX2 R9, R3 ;"]),
        ("FADD R12, R3, R4 ;", "NOP ;", []),  # no operand
        ("STS [R9], R3 ;", "NOP ;", []),  # no write
    ],
)
def test_overwritten_operands(inside: str, after: str, expected: list[str]) -> None:
    """Only a value that a product may still read counts."""
    spec = importlib.util.spec_from_file_location("check_wgmma_operands", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    found = tool.overwritten(KERNEL.format(inside=inside, after=after).strip().splitlines())
    assert [line.split("*/ ")[1] for line in found] == expected
