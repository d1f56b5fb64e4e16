"""Grader `math`: compares the response's \\boxed answer with the expected one symbolically, by
math-verify."""

import logging
import math
import re
import unicodedata
from decimal import Decimal

import math_verify
from math_verify import ExprExtractionConfig, LatexExtractionConfig

_BOXED_FIRST = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
# Numbers are compared to this many digits after the point: with the default of 15, 1/20! is 1/19!.
_DIGITS = 100
_TINY = Decimal("1e-50")  # numbers below it are compared by their logarithms
# It warns that its time limits are off; see grade().
logging.getLogger("math_verify").setLevel(logging.ERROR)

_TOKEN = re.compile(r"\\f?box(?:ed)?(?![a-zA-Z])\s*\{?|\\[\\{}]|[{}]")
_GROUP = r"\s*(?:\{[^{}]*\}|[^\s{}\\$])"
_BARE = re.compile(  # what a box without braces holds
    rf"\\[dt]?frac{_GROUP}{_GROUP}|\\sqrt(?:\[[^\]]*\])?{_GROUP}|\\[a-zA-Z]+|[-+]?\d+(?:\.\d+)?|[a-zA-Z]"
)
_BETWEEN = re.compile(  # boxes that are one answer: "\boxed{2} and \boxed{5}"
    r"[\s$,;]*(?:and|or|\\(?:text|mathrm)\{\s*(?:and|or)\s*\})?[\s$,;]*"
)
_SPELLINGS = (
    (re.compile(r"\\varnothing\b|∅"), r"\\emptyset"),
    (re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\}|\u2009|\u202f)(?=\d{3}(?!\d))"), ""),  # 1\,000
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)"), r"\1 \\times 10^{\2}"),
    (re.compile(r"√\s*(\d+|[a-zA-Z])"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*[({]([^(){}]*)[)}]"), r"\\sqrt{\1}"),
    (re.compile("°"), r"^{\\circ}"),
    (re.compile(r"(?<=[\d)}])\.\s*$"), ""),  # the full stop of a sentence
)
_CHARACTERS = str.maketrans(
    {
        **dict(zip("（），．：−＝", "(),.:-=", strict=True)),
        "π": r"\pi ",
        "∞": r"\infty ",
        "×": r"\times ",
        **{
            sign: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign).split("\u2044"))
            for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅛"
        },
    }
)


def grade(text: str, answer: str, require_boxed: bool = True) -> float:
    r"""Returns 1.0 if the last box of the response is equivalent to the answer (sympy), else 0.0.

    A box is `\boxed` or `\fbox`, with or without braces; boxes joined by a comma, `and` or `or` are
    one answer, the set of their values. `require_boxed=False` also accepts an unboxed final answer.
    `answer` is LaTeX, a number or a text with a box, which is read like the response's box. As in
    math-verify, units are ignored and the right side of an equation counts. Raises ValueError if
    the answer cannot be parsed.

    math-verify's time limits are off: they use signal.alarm, which works only in the main thread
    and not while sympy holds the interpreter lock. The worker pool kills a worker that exceeds the
    grader's time limit.
    """
    expected = _last_boxed(answer)
    gold = _parse(_boxed(answer if expected is None else expected))
    if not gold:
        raise ValueError(
            f"the answer {answer[:80]!r} is not mathematics that math-verify can parse"
        )
    final = _last_boxed(text)
    if final is None and require_boxed:
        return 0.0
    response = _parse(_spelled(text) if final is None else _boxed(final))
    equal = math_verify.verify(gold, response, numeric_precision=_DIGITS, timeout_seconds=None)
    return float(equal and _alike(_tiny(gold), _tiny(response)))


def _parse(text: str) -> list:
    return math_verify.parse(text, extraction_config=_BOXED_FIRST, parsing_timeout=None)


def _tiny(parsed: list) -> list[float]:
    """Returns the logarithms of numbers, also in a set, that are too small for _DIGITS: 1/2004! is
    not 1/2006!."""
    answer = (parsed or [()])[0]
    parts = [answer] if getattr(answer, "is_number", False) else getattr(answer, "args", ())
    values = [part.evalf(20) for part in parts if part.is_number]
    sizes = [abs(Decimal(str(value))) for value in values if value.is_real]
    return sorted(float(size.log10()) for size in sizes if 0 < size < _TINY)


def _alike(logs: list[float], others: list[float]) -> bool:
    return len(logs) == len(others) and all(map(math.isclose, logs, others))


def _boxed(content: str) -> str:
    return f"\\boxed{{{_spelled(content)}}}"


def _spelled(text: str) -> str:
    """Returns the text with one spelling for signs that math-verify does not read."""
    text = text.translate(_CHARACTERS).strip()
    for pattern, spelled in _SPELLINGS:
        text = pattern.sub(spelled, text)
    return text


def _last_boxed(text: str) -> str | None:
    """Returns the content of the last complete box, or of the last ones if they are one answer;
    None without a box."""
    boxes = _boxes(text)
    if not boxes:
        return None
    last = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not _BETWEEN.fullmatch(text, box[1], last[0][0]):
            break
        last.insert(0, box)
    contents = dict.fromkeys(content.strip() for _, _, content in last)
    return ", ".join(contents)


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Returns (start, end, content) of complete boxes by their start, in one pass over the text.

    Boxes with others inside are left out, because the inner ones have the content.
    """
    boxes: list[tuple[int, int, str]] = []
    # for each open brace: (start, content's start) of a box
    opened: list[tuple[int, int] | None] = []
    for token in _TOKEN.finditer(text):
        sign = token[0]
        if sign == "{":
            opened.append(None)
        elif sign == "}" and opened:
            box = opened.pop()
            if box is not None and not (boxes and boxes[-1][0] > box[0]):
                boxes.append((box[0], token.end(), text[box[1] : token.start()]))
        elif sign.endswith("{") and len(sign) > 2:
            opened.append((token.start(), token.end()))
        elif len(sign) > 2:
            bare = _BARE.match(text, token.end())
            if bare:
                boxes.append((token.start(), bare.end(), bare[0]))
    return sorted(boxes)
