"""Tries bug reports of other trainers' users, and relatives of each, on this tree, and writes what
was expected and what came.

The cases are those of tests/unit/report_cases.py, which tests/unit/test_reports.py holds.

    python bench/reports.py          # a minute; writes bench/results/reports.md
"""

import sys
from pathlib import Path

from common import provenance, write_results

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.unit.report_cases import REPORTS

HEADER = ("report", "before", "case", "expected", "got", "")


def cell(value: object) -> str:
    return "`" + repr(value).replace("|", "\\|").replace("`", "'") + "`"


def main() -> None:
    lines = []
    for report, (before, cases) in REPORTS.items():
        for what, expected, found in cases:
            got = found()
            verdict = "" if got == expected else "**differs**"
            name = what.replace("|", "\\|").replace("\n", " ")
            lines.append([report, before, name, cell(expected), cell(got), verdict])
            report = before = ""
    data = provenance() | {"cases": lines}
    write_results("reports", data, HEADER, lines)
    if wrong := [line for line in lines if line[-1]]:
        raise SystemExit(f"{len(wrong)} cases differ")


if __name__ == "__main__":
    main()
