"""What `tools/racecheck_report.py` makes of logs of compute-sanitizer."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "racecheck_report.py"
HAZARD = """\
========= Error: Potential {kind} hazard detected at __shared__ 0x31100 in block (0,0,0) :
=========     {first} Thread (223,0,0) at {first_place}+0x4c90 in ptx.cuh:74
=========     {second} Thread (0,0,0) at {second_place}+0x9f0 in key_walk.cuh:69
=========     Current Value : 255, Incoming Value : 0
"""
POLLED = HAZARD.format(
    kind="WAR",
    first="Read",
    first_place="mtraining::sm90::load_word(const unsigned int *)",
    second="Write",
    second_place="mtraining::sm90::store_word(unsigned int *, unsigned int)",
)
COPY = HAZARD.format(
    kind="WAR",
    first="Read",
    first_place="mtraining::sm90::DkdvConsumer<__nv_bfloat16, mtraining::sm90::KeyPlan<(int)128>>::weigh(float (&)[32], int)",
    second="Write",
    second_place="mtraining::sm90::bulk_load(void *, const void *, unsigned int, unsigned long *)",
)
ANALYSIS = """\
========= Error: Race reported between Write access at mtraining::sm90::store_word(unsigned int *, unsigned int) in ptx.cuh:69
=========     and Read access at mtraining::sm90::load_word(const unsigned int *)+0x4d0 in ptx.cuh:74 [2 hazards]
"""


def summary(count: int) -> str:
    return f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)\n"


@pytest.mark.parametrize(
    ("log", "status", "expected"),
    [
        (summary(0), 0, "0 reports of polled words, 0 others, 0 not displayed"),
        (POLLED * 3 + summary(3), 0, "3 reports of polled words, 0 others, 0 not displayed"),
        (POLLED + COPY * 2 + summary(3), 1, "2 x WAR: Read weigh ptx.cuh:74 / Write bulk_load key_walk.cuh:69"),
        (POLLED * 2 + ANALYSIS + summary(3), 0, "2 reports of polled words, 0 others, 0 not displayed"),
        (POLLED + summary(5), 1, "1 reports of polled words, 0 others, 4 not displayed"),
        (POLLED, 1, "racecheck came to no end"),
    ],
    ids=["clean", "polled", "copy", "analysis", "hidden", "cut off"],
)
def test_verdict(tmp_path: Path, log: str, status: int, expected: str) -> None:
    path = tmp_path / "log"
    path.write_text("========= COMPUTE-SANITIZER\n" + log)
    done = subprocess.run([sys.executable, TOOL, path], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert expected in done.stdout
