"""Texts of users and models on a line of a file or a terminal."""

import re

# what a terminal obeys, what ends a line, and what YAML has not even in a comment
_CONTROL = re.compile("[\x00-\x08\n-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """Returns a text in one line, with spaces for control characters."""
    return _CONTROL.sub(" ", text)
