"""Grader `gsm8k`: one number after `####`, as in the data set of grade-school problems (Cobbe et
al. 2021)."""

import re
from decimal import Decimal
from typing import Literal

_NUMBER = re.compile(r"(?:[-+]?\$?|\$[-+])(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def grade(text: str, answer: str, format: Literal["hash", "last", "plain"] = "hash") -> float:
    """Returns 1.0 if the response's final number equals the answer's, else 0.0. Commas, $ and a
    final dot are ignored, and U+2212 is a minus.

    `format`: "hash" takes the number after the last `####`, "last" the last number anywhere,
    "plain" requires that the response is nothing but the number. `answer` is a number or a whole
    solution that ends in `#### number`. Raises ValueError if the answer contains no number: then
    the data is wrong, not the response.
    """
    text, answer = (words.replace("\u2212", "-") for words in (text, answer))
    expected = _number(answer.rsplit("####", 1)[-1].strip())
    if expected is None:
        raise ValueError(f"the answer {answer[-80:]!r} is not a number")
    match format:
        case "hash":
            _, mark, end = text.rpartition("####")
            number = _NUMBER.match(re.sub(r"^[*\s]+", "", end))  # it may be **bold**
            got = _number(number[0]) if mark and number else None
        case "last":
            got = _number(["", *_NUMBER.findall(text)][-1])
        case "plain":
            got = _number(text.strip())
        case _:
            raise ValueError(f"format {format!r} is unknown; known: hash, last, plain")
    return float(got == expected)


def _number(text: str) -> Decimal | None:
    """Returns the exact number (0.1 is 1/10, 10 equals 10.00), or None if the text is not one
    number."""
    text = text.strip().removesuffix(".")
    if not _NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", "").replace("$", ""))
