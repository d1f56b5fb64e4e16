"""One thought a line: statements that assign unrelated values at once, and conditional expressions
inside others, are few."""

import ast

import pytest

from tests.unit.package_source import PACKAGE, all_nodes, sources

# In a thousand lines. Lower them whenever the code allows it, never raise them.
MAX_UNRELATED = 2.3
MAX_NESTED = 0.12


def is_unrelated(node: ast.AST) -> bool:
    """Tells `a, b = x, y` from `a, b = b, a` and from parts of one thing: `shape[0], shape[1]`."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    names = [name for target in node.targets for name in getattr(target, "elts", [target])]
    values = node.value.elts
    if not all(isinstance(target, ast.Tuple) for target in node.targets):
        return False  # one name for the whole tuple
    swapped = {ast.unparse(name) for name in names} == {ast.unparse(value) for value in values}
    owners = {
        ast.unparse(value.value) if isinstance(value, ast.Attribute | ast.Subscript) else ast.unparse(value)
        for value in values
    }
    return not swapped and len(owners) > 1


def is_nested(node: ast.AST) -> bool:
    """Tells a conditional expression that has another one inside."""
    return isinstance(node, ast.IfExp) and any(
        isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node
    )


def per_1000_lines(found: list[str]) -> float:
    lines = sum(len((PACKAGE / path).read_text().splitlines()) for path in sources())
    return 1000 * len(found) / lines


@pytest.mark.parametrize("unwanted, most", [(is_unrelated, MAX_UNRELATED), (is_nested, MAX_NESTED)])
def test_few_lines_hold_two_thoughts(unwanted, most):
    found = [f"{path}:{node.lineno}" for path, node in all_nodes() if unwanted(node)]
    assert per_1000_lines(found) <= most, f"{per_1000_lines(found):.2f} a thousand lines: {found}"


@pytest.mark.parametrize(
    "statement, unwanted",
    [
        ("a, b = 1, f(x)", True),
        ("a, b = x.size, y.size", True),
        ("self.a, self.b = a, b", True),
        ("a, b = b, a", False),
        ("x[i], x[j] = x[j], x[i]", False),
        ("tp, pp = shape[0], shape[1]", False),
        ("low, high = loss.clip_low, loss.clip_high", False),
        ("a, b = None, None", False),
        ("a, b = f(x)", False),
        ("pair = 1, f(x)", False),
    ],
)
def test_unrelated_values(statement, unwanted):
    assert is_unrelated(ast.parse(statement).body[0]) == unwanted


@pytest.mark.parametrize("text, unwanted", [("a if b else c if d else e", True), ("a if b else c", False)])
def test_nested_conditions(text, unwanted):
    assert is_nested(ast.parse(text, mode="eval").body) == unwanted
