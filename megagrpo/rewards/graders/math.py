"""Grader `math`: compares the response's \\boxed answer with the expected one symbolically, by
math-verify."""

import logging

import math_verify
from math_verify import ExprExtractionConfig, LatexExtractionConfig

_BOXED_FIRST = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
logging.getLogger("math_verify").setLevel(
    logging.ERROR
)  # it warns that its time limits are off; see grade()


def grade(text: str, answer: str, require_boxed: bool = True) -> float:
    """Returns 1.0 if the last \\boxed{...} of the response is equivalent to the answer (sympy),
    else 0.0.

    `require_boxed=False` also accepts an unboxed final answer. `answer` is LaTeX, a number or a
    boxed expression. Raises ValueError if the answer cannot be parsed.

    math-verify's time limits are off: they use signal.alarm, which works only in the main thread
    and not while sympy holds the interpreter lock. The worker pool kills a worker that exceeds the
    grader's time limit.
    """
    gold = _parse(answer if "\\boxed" in answer else f"\\boxed{{{answer}}}")
    if not gold:
        raise ValueError(
            f"the answer {answer[:80]!r} is not mathematics that math-verify can parse"
        )
    boxed = _last_boxed(text)
    if boxed is None and require_boxed:
        return 0.0
    response = text if boxed is None else f"\\boxed{{{boxed}}}"
    return float(math_verify.verify(gold, _parse(response), timeout_seconds=None))


def _parse(text: str) -> list[object]:
    return math_verify.parse(text, extraction_config=_BOXED_FIRST, parsing_timeout=None)


def _last_boxed(text: str) -> str | None:
    """Returns the content of the last complete \\boxed{...} with balanced braces, or None."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth, begin = 0, start + len("\\boxed{")
        for i in range(begin - 1, end):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[begin:i]
        end = start  # this one was cut: the box before it counts
    return None
