"""Reads tests/golden: numbers that public frameworks computed; its README names sources and schema."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "golden"


@cache
def load(name: str) -> tuple[dict, ...]:
    """Cases of one file with `same_as` resolved."""
    cases = json.loads((FOLDER / name).read_text())
    inputs = {case["case"]: case["inputs"] for case in cases if "same_as" not in case["inputs"]}
    return tuple({**case, "inputs": inputs.get(case["inputs"].get("same_as"), case["inputs"])} for case in cases)


def cases(name: str, statuses=("reference",), where=lambda case: True):
    """Parametrization over the cases of a file."""
    chosen = [case for case in load(name) if case["status"] in statuses and where(case)]
    assert chosen, f"{name}: no case is chosen"
    return [pytest.param(case, id=f"{case['source'].split('@')[0]}-{case['case']}") for case in chosen]


def defects(*names: str) -> set[str]:
    """Which defects the cases of these files show."""
    return {d for name in names for case in load(name) if case["status"] == "defect" for d in case["defects"]}


def tensor(values, dtype=torch.float64) -> torch.Tensor:
    """A nested list of numbers or "nan", "inf", "-inf"."""
    return torch.tensor(_numbers(values), dtype=dtype)


def close(
    mine: torch.Tensor, theirs, rtol: float = 1e-5, atol: float = 1e-6, where: torch.Tensor | None = None
) -> None:
    theirs = tensor(theirs)
    mine = mine.detach().double()
    if where is not None:
        mine, theirs = mine[where], theirs[where]
    torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)


def _numbers(values):
    return [_numbers(v) for v in values] if isinstance(values, list) else float(values)
