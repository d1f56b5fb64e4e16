"""The environment `calculator`: exact values of arithmetic expressions, without a reward."""

import ast
import re
from collections.abc import Mapping
from decimal import Context, Decimal, Inexact, localcontext
from fractions import Fraction
from operator import add, mul, sub, truediv

_OPERATORS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}
_MAX_DIGITS = 5000  # more than an expression's value can have
_MAX_PLACES = 12  # after the decimal point
_MAX_CHARS = 200  # of an expression: a model may write any
_MAX_EXPONENT = 20  # of a number
_LAST_CALL = re.compile(r"<([^<>]*)>[^\w>]*$")  # the last token may hold more than the stop


class Calculator:
    """Answers a turn that ends with <an expression> by its value; any other turn is the last.

    Graders reward the whole response (`rewards: false`), and the model stops at each ">"
    (`sampling.stop_token_ids` or `sampling.stop`).
    """

    def __init__(self, row: Mapping[str, object], seed: int):
        pass

    def reset(self) -> None:
        """Leaves the prompt of the data as it is."""

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Returns the value, no reward, and whether the rollout is over."""
        call = _LAST_CALL.search(text)
        value = exact_value(call[1]) if call else None
        return value, 0.0, value is None


def exact_value(expression: str) -> str | None:
    """Returns the value of + - * / ( ) over decimal numbers as the shortest decimal text.

    Returns None if it is unreadable, not a finite decimal, or long.
    """
    expression = expression.strip()
    if len(expression) > _MAX_CHARS:
        return None
    try:
        value = _evaluate(ast.parse(expression, mode="eval").body, expression)
        with localcontext(Context(prec=_MAX_DIGITS, traps=[Inexact])):
            quotient = Decimal(value.numerator) / value.denominator
    except (SyntaxError, ZeroDivisionError, ValueError, Inexact):
        return None
    text = f"{quotient:f}"
    return text if len(text.partition(".")[2]) <= _MAX_PLACES else None


def _evaluate(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, source), _evaluate(right, source))
        case ast.UnaryOp(ast.USub(), operand):
            return -_evaluate(operand, source)
        case ast.Constant(int() | float()):
            text = ast.get_source_segment(source, node)
            assert text is not None, "parsed from this very source"
            if abs(int(text.lower().partition("e")[2] or 0)) > _MAX_EXPONENT:
                raise ValueError(f"{text} is a large number")
            return Fraction(text)  # from the text: 0.1 is one tenth
    raise ValueError(f"{ast.dump(node)} is not arithmetic")
