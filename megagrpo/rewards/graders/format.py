"""Graders of a response's form: a regular expression, or the very text of the answer."""

import re


def grade(text: str, answer: str, pattern: str = r"(?s)<think>.*</think>\s*<answer>.*</answer>") -> float:
    """Returns 1.0 if the whole response, outer white space aside, matches the regular expression; the answer plays no
    part.
    """
    return float(re.fullmatch(pattern, text.strip()) is not None)


def exact(text: str, answer: str, ignore_case: bool = False) -> float:
    """Returns 1.0 if response and answer are the same text, outer white space aside."""
    text, answer = text.strip(), answer.strip()
    return float(text.casefold() == answer.casefold() if ignore_case else text == answer)
