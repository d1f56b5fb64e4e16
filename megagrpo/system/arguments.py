"""Types of command-line arguments."""


def positive(text: str) -> int:
    """Returns a whole number of at least 1; argparse shows this function's name for any other
    text."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def numbers(text: str) -> list[int]:
    """Returns positive numbers that commas separate."""
    return [positive(part) for part in text.split(",")]
