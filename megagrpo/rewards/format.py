"""Graders of the response's form rather than its mathematics."""

import re


def grade(text: str, answer: str, pattern: str = r"(?s)<think>.*</think>\s*<answer>.*</answer>") -> float:
    """1.0 if the whole response, outer white space aside, matches the regular expression; the answer plays no part."""
    return float(re.fullmatch(pattern, text.strip()) is not None)


def exact(text: str, answer: str, ignore_case: bool = False) -> float:
    """1.0 if response and answer are the same text, outer white space aside."""
    text, answer = text.strip(), answer.strip()
    return float(text.casefold() == answer.casefold() if ignore_case else text == answer)
