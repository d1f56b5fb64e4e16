"""Comparisons within a bound: bench/bounds.py lists how far each test is from its bounds."""

import json
import os
from pathlib import Path

from torch import Tensor

from megagrpo.tools.certify.certificate import FACTOR, LARGEST

# names the file that gets a line for each comparison
RECORD = "MEGAGRPO_TEST_BOUNDS"


def within(quantity: str, difference: float, bound: float) -> bool:
    """Whether the difference is at most the bound; NaN is not."""
    if RECORD in os.environ:
        test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]
        with Path(os.environ[RECORD]).open("a", encoding="utf-8") as file:
            file.write(json.dumps([test, quantity, float(difference), bound]) + "\n")
    return difference <= bound


def bound_of(least: float, rounding: float) -> float:
    """As the certificate's bounds; rounding: what the next floats as weights move."""
    return min(max(least, FACTOR * rounding), LARGEST * least)


def close(quantity: str, found: Tensor, expected: Tensor, rtol: float, atol: float) -> bool:
    """Whether all values are within atol + rtol * |expected|; recorded as a share of that."""
    assert found.shape == expected.shape, f"{quantity}: {found.shape}, not {expected.shape}"
    allowed = atol + rtol * expected.abs()
    return within(quantity, float(((found - expected).abs() / allowed).max()), 1.0)
