"""What users of other trainers reported and was wrong here, with relatives that stand in no report."""

import pytest

from megagrpo.sandbox import sandbox
from tests.unit.report_cases import REPORTS


@pytest.mark.parametrize(
    "report, number", [(report, number) for report, (_, cases) in REPORTS.items() for number in range(len(cases))]
)
def test_a_report_and_its_relatives(report, number):
    what, expected, found = REPORTS[report][1][number]
    runs_programs = "program" in report or "tests" in report
    if runs_programs and (reason := sandbox.isolation()):
        pytest.skip(f"no namespaces here: {reason}")
    if "mcp" in report:
        pytest.importorskip("mcp")
    assert found() == expected, what


def test_each_report_has_five_relatives():
    assert len(REPORTS) == 21 and all(len(cases) >= 6 for _, cases in REPORTS.values())
