"""What docs/evidence/verification.md lists, which `python bench/readme.py` writes. What tests verify
stands in a mark, on a test or in the `pytestmark` of its file; the other files may be patterns:

    pytest.mark.verifies(SECTION, CLAIM, *OTHER_FILES, see=LINK)

Files are parsed, not imported.
"""

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
SLOW = "pytest.mark.slow"
RUN_BY = {  # in the order of the page
    "CI": "In every CI run:",
    "part": "A part in every CI run, all with `--full`:",
    "full": "With `--full`:",
    "hand": "By hand:",
}
# What programs of bench/ verify.
BY_HAND = {
    "actor": [],
    "algorithms": [
        "`bench/plant.py` plants 78 faults, all found: [table](../../bench/results/plant.md)",
        "`bench/bounds.py`: how far the tests of several ranks are from their bounds "
        "([table](../../bench/results/bounds.md))",
    ],
    "weights": [],
    "runs": [
        "every fault of `bench/faults.py`, in one run ([table](faults.md))",
        "`bench/fuzz.py`: of 3,060 drawn experiments `check` accepted 613; 68 were run "
        "([table](../../bench/results/fuzz.md))",
        "`bench/plan_published.py`: seconds below [published ones](../planning.md#published-runs)",
    ],
}
Claim = tuple[str, str, str]  # section, key of RUN_BY, text


class ParsedTests:
    """The tests of a file, its marks, and its fixtures and lists of cases that are partly slow."""

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
        if SLOW in map(ast.unparse, [*self.marks, *test.decorator_list]):
            return "full"
        return "part" if any(map(self._has_slow, [*test.decorator_list, test.args])) else "CI"

    def claims(self) -> list[Claim]:
        marked = [(mark, self.tests) for mark in self.marks if self.tests]
        marked += [(mark, [test]) for test in self.tests for mark in test.decorator_list]
        claims = [self._claim(mark, tests) for mark, tests in marked if _is_claim(mark)]
        if len(claims) != sum(map(_is_claim, ast.walk(self.tree))):
            raise ValueError(f"{self.path}: a claim without a test")
        return claims

    def _claim(self, mark: ast.Call, tests: list[ast.FunctionDef]) -> Claim:
        section, text, *files = map(ast.literal_eval, mark.args)
        if section not in BY_HAND:
            raise ValueError(f"{self.path}: no section {section}; there are {', '.join(BY_HAND)}")
        run_by = {self.run_by(test) for test in tests}
        for path in [path for pattern in files for path in TESTS.glob(pattern)]:
            run_by |= {other.run_by(test) for other in [ParsedTests(path)] for test in other.tests}
        if not any(map(self.path.match, files)):
            files.insert(0, f"{self.path.parent.name}/{self.path.name}")
        text += "".join(f"; {ast.literal_eval(keyword.value)}" for keyword in mark.keywords)
        text += f" ({', '.join(f'`tests/{file}`' for file in files)})"
        return section, run_by.pop() if len(run_by) == 1 else "part", text


def _is_claim(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.verifies"


@cache
def all_claims() -> list[Claim]:
    """Returns the claims of all tests, by folder and file, and then those of programs."""
    files = [ParsedTests(path) for path in sorted(TESTS.glob("*/test_*.py"))]
    by_hand = [(section, "hand", text) for section in BY_HAND for text in BY_HAND[section]]
    return [*(claim for file in files for claim in file.claims()), *by_hand]


def lists(section: str) -> str:
    """Returns the claims of a section, by what runs them."""
    parts = []
    for kind, title in RUN_BY.items():
        items = [f"- {text}" for of, by, text in all_claims() if (of, by) == (section, kind)]
        parts += ["\n".join([title, "", *items])] * bool(items)
    return "\n\n".join(parts)
