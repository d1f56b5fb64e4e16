"""docs/evidence/verification.md is what the marks of tests say; tests/unit/test_docs.py compares its
tables."""

import re
from pathlib import Path

import pytest

from bench.verification import BY_HAND, ParsedTests
from tests.experiments import ROOT

CLAIM = '@pytest.mark.verifies("runs", "it ends")\n'
TEST = "def test_it(): ...\n"
SLOW = "@pytest.mark.slow\n"


def rows(tmp_path: Path, source: str) -> list[tuple[str, str]]:
    path = tmp_path / "unit" / "test_it.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    return ParsedTests(path).rows()


def test_the_page_has_every_section_once():
    page = (ROOT / "docs" / "evidence" / "verification.md").read_text()
    assert re.findall(r"<!-- verified:(\w+) -->", page) == list(BY_HAND)


@pytest.mark.parametrize(
    "source, run_by",
    [
        (CLAIM + TEST, "CI"),
        (CLAIM + SLOW + TEST, "`--full`"),
        ("pytestmark = [pytest.mark.slow]\n" + CLAIM + TEST, "`--full`"),
        (f"pytestmark = {CLAIM[1:]}{TEST}{SLOW}{TEST}", "part"),
        (
            "CASES = [1, pytest.param(2, marks=pytest.mark.slow)]\n\n@pytest.fixture(params=CASES)\n"
            f"def case(): ...\n\n{CLAIM}def test_it(case): ...\n",
            "part",
        ),
    ],
)
def test_a_row_says_what_ci_runs(tmp_path, source, run_by):
    row = f"| it ends | `tests/unit/test_it.py` | {run_by} |"
    assert rows(tmp_path, source) == [("runs", row)]


@pytest.mark.parametrize(
    "source, message",
    [
        (CLAIM.replace("runs", "walks") + TEST, "no section walks; there are actor, "),
        (CLAIM + TEST.replace("test", "helper"), "a claim without a test"),
        (f"pytestmark = {CLAIM[1:]}", "a claim without a test"),
    ],
)
def test_wrong_marks_are_refused(tmp_path, source, message):
    with pytest.raises(ValueError, match=message):
        rows(tmp_path, source)
