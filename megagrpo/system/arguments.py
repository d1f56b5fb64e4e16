"""Types of command-line arguments."""


def positive(text: str) -> int:
    """Returns an integer of at least 1. For any other text argparse shows this function's name."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def natural(text: str) -> int:
    """Returns an integer of at least 0, likewise."""
    number = int(text)
    if number < 0:
        raise ValueError
    return number
