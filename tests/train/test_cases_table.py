"""The table of known faults: every case is there, and every test that it names exists."""

import re

from .conftest import ROOT

TABLE = (ROOT / "docs" / "cases.md").read_text()
CASES = """A2 A3 B2 B3 C1 C2 C3 C4 D1 D3 D4 D5 D6 D7 E1 F1 F2 G2 H2 H3 H4 I1 I3 J2 K1 K2 K3 K5 L1 M1 M2 M3 M4 M5 N1""".split()


def rows() -> dict[str, str]:
    return {line.split()[1]: line for line in TABLE.splitlines() if re.match(r"\| [A-N]\d ", line)}


def test_every_case_has_a_row() -> None:
    assert list(rows()) == CASES


def test_every_named_test_exists() -> None:
    """`file::function`, or `::function` of the file before it; a file alone must be there."""
    for case, row in rows().items():
        tests = row.rsplit("|", 2)[1]
        found = re.findall(r"`((?:[a-z_]+/[a-z_]+\.py)?)(?:::)?((?:[a-z_]\w*)?)(?:\[\w+\])?`", tests)
        assert found, case
        text = ""
        for file, function in found:
            if file:
                path = ROOT / "tests" / file
                assert path.exists(), f"{case}: {file}"
                text = path.read_text()
            if function:
                assert f"def {function}(" in text, f"{case}: {function} is not in {path}"


def test_tests_name_their_case() -> None:
    """So that who breaks one knows which fault is back: a file that a row names has the case in it."""
    for case, row in rows().items():
        files = re.findall(r"`([a-z_]+/[a-z_]+\.py)", row.rsplit("|", 2)[1])
        named = [file for file in files if re.search(rf"\b{case}\b", (ROOT / "tests" / file).read_text())]
        assert named, f"{case}: none of {files} names it"
