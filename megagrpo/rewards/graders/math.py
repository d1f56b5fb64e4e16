"""Grader `math`: compares the response's \\boxed answer with the expected one symbolically, by
math-verify."""

import logging
import math
import re
import unicodedata
from decimal import Decimal

import math_verify
from math_verify import ExprExtractionConfig, LatexExtractionConfig
from sympy import And, Basic, E, Eq, Expr, FiniteSet, Float, I, Rational, Rel, Symbol

# The second takes the last number of what the first cannot read: none for a box.
_BOXED_FIRST = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
# Numbers are compared to this many digits after the point: with the default of 15, 1/20! is 1/19!.
_DIGITS = 100
_TINY = Decimal("1e-50")  # numbers below it are compared by their logarithms
# It warns that its time limits are off; see grade().
logging.getLogger("math_verify").setLevel(logging.ERROR)

_TOKEN = re.compile(r"\\f?box(?:ed)?(?![a-zA-Z])\s*\{?|\\[\\{}]|[{}]")
_GROUP = r"\s*(?:\{[^{}]*\}|[^\s{}\\$])"
_BARE = re.compile(  # what a box without braces holds
    rf"\\[dt]?frac{_GROUP}{_GROUP}|\\sqrt(?:\[[^\]]{{0,30}}\])?{_GROUP}|\\[a-zA-Z]+|[-+]?\d+(?:\.\d+)?|[a-zA-Z]"
)
_BETWEEN = re.compile(  # boxes that are one answer: "\boxed{2} and \boxed{5}"
    r"[\s$,;]*+(?:and|or|\\(?:text|mathrm)\{\s*(?:and|or)\s*\})?[\s$,;]*+"
)
_STYLE = re.compile(r"\\(?:text|math)(?:bf|rm|it)?\s*\{([^{}]*)\}")
# a choice and its text: (B) 12, B. 12; not several, as (A) and (C), A: 3, B: 5, A:B=2:3
_CHOICE = re.compile(
    r"\s*(?:\(([A-J])\)|([A-J])(?:[.)]|:(?!\s*[A-J]\s*=)))(?!.*(?<!\w)(?:\([A-J]\)|[A-J]\s*[.):]))"
    r"(?:\\[ ;,]|\\q?quad|[\s~:.])*+([^+*/^=_,)].*)",
    re.DOTALL,
)
_QUALIFIER = re.compile(  # 2x \text{ for all real } x; math-verify multiplies by such words
    r"(?:\\(?:text|mathrm|mbox)\s*\{[\s,;]*|\s)"
    r"(?:for (?:all|any|every|each|some)|where|when|such that|if)\b"
)
# what stands before a last letter that is a factor: math-verify takes c, d, g, h, l, m, o, s, t for units
_EXPRESSION = re.compile(
    r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])|[\w)}]\s*[-+]|\\(?:sin|cos|tan|ln|log|exp|[bt]h?eta|omega|alpha|lambda)"
)
# Words: of three capital letters or more, as an order of choices, and answers of four letters or more.
_WORD = re.compile(r"(?<![\\a-zA-Z])(?:[A-Z] ?){3,}(?![a-z])|(?<=^\\boxed\{)[a-zA-Z]{4,}(?=\}$)")
_PERCENT = re.compile(r"(?:\\ )?\\?%")
_BASE = re.compile(r"\d_\{?(\d+)")
_CLOCK = re.compile(r"(?<![\d:.])(\d{1,2}):([0-5]\d)(?![\d:])")


def _repeated(match: re.Match[str]) -> str:
    """Returns a repeating decimal as a fraction."""
    whole, fixed, period = match.groups()
    top = int(whole + fixed + period) - int(whole + fixed or "0")
    return rf"\frac{{{top}}}{{{10 ** len(fixed) * (10 ** len(period) - 1)}}}"


_TYPE = r"\\(?:text|mathrm|mbox|mathbf|mathit)\s*"
_UNIT = rf"{_TYPE}\{{(?:[^{{}}]|\{{[^{{}}]*\}})*+\}}(?:\s*\^\s*\{{?-?[\d/]++\}}?)?+"
_UNITS = rf"(?:{_UNIT}(?:[\s/]|\\(?:[,;:! ]|cdot|times))*+)"
_SPELLINGS = (
    # a word but infinity; math-verify takes the e of even for Euler's number, that of Even for a name, and
    # no true
    (r"^(?!infinity$)(?=.*[a-z])[a-zA-Z]{4,}$", r"\\text{\g<0>}"),
    (r"[,;]\s*(?:\\[lc]?dots(?![a-zA-Z])|\.{3,})", ",…"),  # in a list
    (r"\\varnothing\b|∅", r"\\emptyset"),
    (r"\\mathbb\s+(\w)", r"\\mathbb{\1}"),
    (r"(?<![\w)}])\*\*([^*\n]+)\*\*(?![\w({])", r"\1"),  # **bold**
    # the full stop of a sentence, or one before a unit
    (r"(?<=[\d)}])\.\s*(?=\\%|\\(?:text|mathrm)\s*\{\D|$)", ""),
    # no units: bold or italic letters, upright e, i, and letters behind a sign
    (
        r"\\math(?:bf|it)\s*\{\s*([a-zA-Z])\s*\}|\\(?:mathrm|text)\s*\{\s*([ei])\s*\}"
        r"|(?<=[-+])\s*\\(?:mathrm|text)\s*\{\s*([a-zA-Z])\s*\}",
        r"{\1\2\3}",
    ),
    # units; math-verify drops them with all that follows, if that ends with a brace: 3 cm, 4 cm; 5 ft 6 in
    (
        rf"(?<=[\d}})])\s*(?!{_TYPE}\{{[^}}]*\(){_UNIT}\s*(?:[,;]|(?=\d|(?:\\text\s*\{{\s*)?(?:and|or)\b))",
        ", ",
    ),
    (rf"(?<=[\d}})])\s*{_UNIT}(?=\s*(?:[)\]]|\\\}}))", ""),
    # other words inside, not before an equation or in parentheses: a space for the last units
    (
        rf"^(?!{_TYPE})(?=.*\}}$)((?>.*?(?={_TYPE}\{{(?!\s*(?:and|or)\b)))"
        rf"(?!{_UNITS}*(?:$|=|\\approx|{_TYPE}\{{[^}}]*\()).*?)(?:(?<=[\d}})])\s*{_UNITS}{{1,9}}+)?$",
        r"\1\\,",
    ),
    (r"(?<=\d)(?:\\[,!;: ]|\{,\}|\u2009|\u202f)(?=\d{3}(?!\d))", ""),  # 1\,000
    (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)", r"\1 \\times 10^{\2}"),
    (r"√\s*(\d+|[a-zA-Z])|(?:√|\\sqrt)\s*[({]([^(){}]*)[)}]", r"\\sqrt{\1\2}"),
    # sympy takes names for coprime: gcd(m, n) would be 1, and lcm(m, n) their product
    (
        r"(?:\\(?:operatorname|text|mathrm)\s*\{|\\|(?<![\\a-zA-Z]))(gcd|lcm)\}?\s*(?:\\left)?"
        r"\((?=[^()]*?[a-zA-Z])([^()]*?)(?:\\right)?\)",
        lambda match: (
            rf"\text{{{match[1]}}}({','.join(sorted(match[2].replace(' ', '').split(',')))})"
        ),
    ),
    # as calculators and sympy write: exp(2*x)
    (r"(?<![\\a-zA-Z{])(sin|cos|tan|ln|log|exp|pi)(?![a-zA-Z])", r"\\\1 "),
    (r"\*\*\s*(-?(?:\d*\.)?\d+|[a-zA-Z]|\([^()]*\))", r"^{\1}"),
    # no units, and Euler's number and the imaginary unit as physicists write them
    (r"(?<=[\d}])(ab|bc)$|\\mathrm\s*([ei])(?![a-zA-Z])", r"{\1\2}"),
    (r"(?<![\d.])(\d{0,30})\.(\d{0,30})\\(?:overline|bar|dot)\{(\d{1,30})\}", _repeated),
    (r"(?<![\d./])(\d+) +(\d+)/(\d+)(?![\d/])", r"\1\\frac{\2}{\3}"),  # 1 1/2
    # 33 1/3 %, of which math-verify reads 1/3 %
    (
        r"(?<![\d.,}])(\d{1,30}) *\\[dt]?frac *\{?(\d{1,30})\}? *\{?(\d{1,30})\}?(?= *\\?%)",
        lambda match: rf"\frac{{{int(match[1]) * int(match[3]) + int(match[2])}}}{{{match[3]}}}",
    ),
)
_CHARACTERS = str.maketrans(
    {
        **dict(zip("（），．：−＝", "(),.:-=", strict=True)),
        "~": " ",
        "²": "^2",
        "³": "^3",
        "°": r"^{\circ}",
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
    A choice, (B) 12, equals its letter and its text, and another text with that letter. An inequality
    equals its interval, and a time of day or a numeral with a base only itself. So does a list with
    an ellipsis, or a box that math-verify cannot read: a number in it is no answer. Words of the
    same letters, ABC and BCA, differ; two capital letters are a segment, or a product.
    `answer` is LaTeX, a number, or a text with a box or with ####, and is read like a box. As in
    math-verify, units behind a number are ignored and the right side of an equation counts, unless it is false. A
    condition in words behind only one of the two (2x for all x) is ignored.
    Raises ValueError if the answer cannot be parsed.

    math-verify's time limits are off: they use signal.alarm, which works only in the main thread
    and not while sympy holds the interpreter lock. The worker pool kills a worker that exceeds the
    grader's time limit.
    """
    last = _last_boxed(answer)
    final = _last_boxed(text)
    right = answer.rpartition("####")[2] if last is None else last
    letter, its_text = _choice(right)
    other, other_text = _choice(final or "")
    if letter and other:
        return float(letter == other)
    final = other_text or final
    right = its_text or right
    expected = _boxed(_unqualified(right, final or ""))
    gold = _parse(expected)
    if not gold:
        raise ValueError(
            f"the answer {answer[:80]!r} is not mathematics that math-verify can parse"
        )
    if final is None and require_boxed:
        return 0.0
    found = _spelled(text) if final is None else _boxed(_unqualified(final, right))
    if found.replace(" ", "") == expected.replace(" ", ""):  # sympy could take for ever
        return 1.0
    response = _parse(found)
    equal = any(
        math_verify.verify(
            read(gold),
            read(response),
            numeric_precision=_DIGITS,
            allow_set_relation_comp=True,
            timeout_seconds=None,
        )
        for read in (list, _exact)[: 1 + (_exact(gold + response) != gold + response)]
    )
    if not equal and ("%" in found) != (
        "%" in expected
    ):  # a unit: math-verify drops it of integers
        return grade(_PERCENT.sub("", text), _PERCENT.sub("", answer), require_boxed)
    if not equal or (_is_false(response) and "circ" not in found):
        return 0.0
    # math-verify compares 1 < x < 2 as (1, 2), which it takes for {1, 2}, too
    both = gold[0], response[0]
    mixed = any(map(_is_range, both)) and any(isinstance(answer, FiniteSet) for answer in both)
    logs, others = _tiny(gold), _tiny(response)
    same_size = len(logs) == len(others) and all(map(math.isclose, logs, others))
    return float(not mixed and same_size and _same_numerals(expected, found))


def _choice(content: str) -> tuple[str, str]:
    """Returns the letter of a choice and its text; no letter for another answer."""
    plain = _STYLE.sub(r"\1 ", content)
    bare = re.fullmatch(r"\s*\(?([A-J])\)?[\s.]*", plain)
    if bare:
        return bare[1], ""
    match = _CHOICE.fullmatch(plain)
    return (match[1] or match[2], match[3].strip()) if match else ("", "")


def _unqualified(content: str, other: str) -> str:
    """Returns an answer without the condition behind it, if the other has none. Several with
    conditions stay as they are, and a name, such as x where x = 4."""
    head, *conditions = _QUALIFIER.split(content)
    is_name = re.fullmatch(r"[\sa-zA-Z]*", head)
    if len(conditions) != 1 or "&" in content or is_name or _QUALIFIER.search(other):
        return content
    # 3 \text{ hours if they work alone}
    return head.rstrip(" ,;(~\\") + "}" * (head.count("{") - head.count("}"))


def _parse(text: str) -> list:
    configs = _BOXED_FIRST[: 2 - text.startswith("\\boxed")]
    return math_verify.parse(text, extraction_config=configs, parsing_timeout=None)


def _exact(parsed: list) -> list:
    """Returns answers with the imaginary unit for the name i, all other names as real ones, which
    math-verify says of none in a text with a separate i, and fractions for the decimals in
    expressions, of which sympy has 15 digits."""
    return [
        answer.xreplace({part: Rational(str(part)) for part in answer.atoms(Float)}).subs(
            {
                each: I if each.name == "i" else Symbol(each.name, real=True)
                for each in answer.free_symbols
            }
        )
        if isinstance(answer, Expr)
        else answer
        for answer in parsed
    ]


def _tiny(parsed: list) -> list[float]:
    """Returns the logarithms of numbers, also in a set, that are too small for _DIGITS: 1/2004! is
    not 1/2006!."""
    answer = parsed[0]
    parts = [answer] if getattr(answer, "is_number", False) else getattr(answer, "args", ())
    values = [part.evalf(20) for part in parts if part.is_number]
    sizes = [abs(Decimal(str(value))) for value in values if value.is_Float]  # no 7 mod 3
    return sorted(float(size.log10()) for size in sizes if 0 < size < _TINY)


def _same_numerals(gold: str, response: str) -> bool:
    """Returns whether bases agree, words, which math-verify reads as products, and times of day,
    which it reads as ratios."""
    for pattern in (_BASE, _WORD):
        wanted, said = (
            {part.replace(" ", "").lower() for part in pattern.findall(text)}
            for text in (gold, response)
        )
        if said and not wanted <= said:
            return False
    times, found = (
        [(int(hour), int(minute)) for hour, minute in _CLOCK.findall(text)]
        for text in (gold, response)
    )
    ratio = all(math.gcd(hour, minute) == 1 and minute > 9 for hour, minute in times)
    return ratio or found == times


def _is_range(answer: object) -> bool:
    return isinstance(answer, And | Rel) and not isinstance(answer, Eq)


def _is_false(parsed: list) -> bool:
    """Returns whether an equation of numbers does not hold, not even roughly; e may be a name."""
    answer = parsed[0]
    equations = answer.atoms(Eq) if isinstance(answer, Basic) else ()
    sides = [e.args for e in equations if e.lhs.is_number and e.rhs.is_number and not e.has(E)]
    return any((abs(a - b) - abs(b) / 100).doit().evalf(5).is_positive for a, b in sides)


def _boxed(content: str) -> str:
    text = _spelled(content)
    head = re.split("[=,]", text)[-1][:-1]
    # not i, which in braces is a name
    if re.search(r"(?<![a-zA-Z\\])[cdghlmost]$", text) and _EXPRESSION.search(head):
        text = f"{text[:-1]}{{{text[-1]}}}"
    return f"\\boxed{{{text}}}"


def _spelled(text: str) -> str:
    """Returns the text with one spelling for signs that math-verify does not read."""
    # a last backslash is of a space behind the number, `5\ `
    text = text.translate(_CHARACTERS).strip().rstrip("\\")
    for pattern, spelled in _SPELLINGS:
        text = re.sub(pattern, spelled, text)
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
