"""docs/evidence/verification.md is what the marks of tests say; test_docs.py compares the texts."""

import re
from pathlib import Path

import pytest

from bench.verification import BY_HAND, ParsedTests
from tests.experiments import ROOT

CLAIM = '@pytest.mark.verifies("runs", "it ends")\n'
TEST, SLOW = "def test_it(): ...\n", "@pytest.mark.slow\n"
CASES = "CASES = [1, pytest.param(2, marks=pytest.mark.slow)]\n@pytest.fixture(params=CASES)\n"


def parsed(tmp_path: Path, source: str) -> ParsedTests:
    (tmp_path / "test_it.py").write_text(source)
    return ParsedTests(tmp_path / "test_it.py")


def test_the_page_has_every_section_once():
    page = (ROOT / "docs" / "evidence" / "verification.md").read_text()
    assert re.findall(r"<!-- verified:(\w+) -->", page) == list(BY_HAND)
    assert not [name for name in re.findall(r"`(tests/\S+)`", page) if not list(ROOT.glob(name))]


@pytest.mark.parametrize(
    "source, run_by",
    [
        (CLAIM + TEST, "CI"),
        (CLAIM + SLOW + TEST, "full"),
        ("pytestmark = [pytest.mark.slow]\n" + CLAIM + TEST, "full"),
        (f"pytestmark = {CLAIM[1:]}{TEST}{SLOW}{TEST}", "part"),
        (f"{CASES}def case(): ...\n{CLAIM}def test_it(case): ...\n", "part"),
    ],
)
def test_a_claim_knows_what_ci_runs(tmp_path, source, run_by):
    text = f"it ends (`tests/{tmp_path.name}/test_it.py`)"
    assert parsed(tmp_path, source).claims() == [("runs", run_by, text)]


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
        parsed(tmp_path, source).claims()
