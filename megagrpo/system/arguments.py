"""Types of command-line arguments."""


def positive(text: str) -> int:
    """Returns a whole number of at least 1; argparse shows this function's name for any other
    text."""
    if (number := int(text)) < 1:
        raise ValueError
    return number
