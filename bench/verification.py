"""Tables of docs/evidence/verification.md, which `python bench/readme.py` writes: what a test
verifies stands in its mark, on the test or in the `pytestmark` of its file.

    pytest.mark.verifies(SECTION, CLAIM, *OTHER_TEST_FILES, see=LINK)

Files are parsed, not imported.
"""

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
SLOW, CLAIM = "pytest.mark.slow", "pytest.mark.verifies"
BY_HAND = {  # what programs of bench/ verify
    "actor": [],
    "algorithms": [
        "| 36 planted faults are found; [table](../../bench/results/plant.md) | `bench/plant.py` "
        "| by hand |"
    ],
    "weights": [],
    "runs": [
        "| every fault of [the table](faults.md), in one run | `bench/faults.py` | by hand |",
        "| the seconds of `plan` are below those of [published steps]"
        "(../planning.md#published-runs) | `bench/plan_published.py` | by hand |",
    ],
}


class ParsedTests:
    """The tests of a file, its marks, and its fixtures and lists of cases some of which are
    slow."""

    def __init__(self, path: Path):
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.tests, self.marks, self.partly_slow = [], [], set()
        for node in self.tree.body:
            targets = getattr(node, "targets", [getattr(node, "target", node)])
            names = {getattr(x, "id", getattr(x, "name", None)) for x in targets} - {None}
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                self.tests.append(node)
            elif "pytestmark" in names:
                self.marks = getattr(node.value, "elts", [node.value])
            elif self._has_slow(node):
                self.partly_slow |= names

    def _has_slow(self, node: ast.AST) -> bool:
        return any(
            getattr(inner, "id", getattr(inner, "arg", None)) in self.partly_slow
            or (isinstance(inner, ast.Attribute) and ast.unparse(inner) == SLOW)
            for inner in ast.walk(node)
        )

    def run_by(self, test: ast.FunctionDef) -> str:
        """Returns what CI, `launch/test.sh` without --full, runs of a test."""
        if SLOW in map(ast.unparse, [*self.marks, *test.decorator_list]):
            return "`--full`"
        return "part" if any(map(self._has_slow, [*test.decorator_list, test.args])) else "CI"

    def rows(self) -> list[tuple[str, str]]:
        """Returns (section, row of the table) for every claim."""
        marked = [(mark, self.tests) for mark in self.marks if self.tests]
        marked += [(mark, [test]) for test in self.tests for mark in test.decorator_list]
        rows = [self._row(mark, tests) for mark, tests in marked if _is_claim(mark)]
        if len(rows) != sum(map(_is_claim, ast.walk(self.tree))):
            raise ValueError(f"{self.path}: a claim without a test")
        return rows

    def _row(self, mark: ast.Call, tests: list[ast.FunctionDef]) -> tuple[str, str]:
        section, claim, *others = map(ast.literal_eval, mark.args)
        if section not in BY_HAND:
            raise ValueError(f"{self.path}: no section {section}; there are {', '.join(BY_HAND)}")
        claim += "".join(f"; {ast.literal_eval(keyword.value)}" for keyword in mark.keywords)
        run_by = {self.run_by(test) for test in tests}
        for other in (ParsedTests(TESTS / name) for name in others):
            run_by |= {other.run_by(test) for test in other.tests}
        own = f"{self.path.parent.name}/{self.path.name}"
        files = ", ".join(f"`tests/{file}`" for file in (own, *others))
        return section, f"| {claim} | {files} | {run_by.pop() if len(run_by) == 1 else 'part'} |"


def _is_claim(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == CLAIM


@cache
def all_rows() -> list[tuple[str, str]]:
    """Returns (section, row) of all tests, by folder and file."""
    return [row for path in sorted(TESTS.glob("*/test_*.py")) for row in ParsedTests(path).rows()]


def table(section: str) -> str:
    """Returns the table of one section, the rows of programs last."""
    rows = [row for its_section, row in all_rows() if its_section == section]
    return "\n".join(
        ["| claim | verified by | run by |", "|---|---|---|", *rows, *BY_HAND[section]]
    )
