"""Graders of the runs that bench/faults.py disturbs: a file beside them says when one is to
hang."""

import random
import time
from pathlib import Path


def low_digits(text, answer):
    """The share of small digits; hangs once when a file asks for it."""
    asked = Path(__file__).with_name("hang_in_reward")
    if asked.exists():
        asked.unlink()
        time.sleep(3600)
    return sum(c in "01234" for c in text) / max(len(text), 1)


def late_low_digits(text, answer):
    """The same after a random time."""
    time.sleep(random.uniform(0.0, 0.2))
    return low_digits(text, answer)
