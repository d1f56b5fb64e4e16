"""Ranks compute as the tests' process does: a variable that chooses other arithmetic reaches them."""

import os

import torch

from tests.dist.workers.launch import POOL
from tests.run_parts import ARITHMETIC

NAMES = sorted({name for variables in ARITHMETIC.values() for name in variables} - {"OMP_NUM_THREADS"})


def arithmetic(rank: int = 0) -> tuple[str, list[str | None]]:
    """torch's instructions and the variables that choose them."""
    return torch.backends.cpu.get_cpu_capability(), [os.environ.get(name) for name in NAMES]


def test_ranks_compute_as_this_process_does():
    assert POOL.run(2, arithmetic) == [arithmetic()] * 2
