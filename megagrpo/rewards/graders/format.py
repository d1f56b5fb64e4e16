"""Graders `format` and `exact`: the response matches a regular expression, or equals the answer."""

import re


def grade(
    text: str,
    answer: str,
    pattern: str = r"(?s)(?=.*</answer>\Z)(?:<think>)?.*</think>\s*<answer>.*</answer>",
) -> float:
    """Returns 1.0 if the whole stripped response matches the regular expression; `answer` is
    ignored.

    The default does without the opening tag, which templates of reasoning models put into the
    prompt. It looks at the end first: else it would take the square of the length of a response
    that repeats the tags.
    """
    return float(re.fullmatch(pattern, text.strip()) is not None)


def exact(text: str, answer: str, ignore_case: bool = False) -> float:
    """Returns 1.0 if response and answer are the same text after stripping."""
    text, answer = text.strip(), answer.strip()
    return float(text.casefold() == answer.casefold() if ignore_case else text == answer)
