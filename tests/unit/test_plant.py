"""bench/plant.py's faults still fit the source that they are planted in."""

import ast
from pathlib import Path

import pytest

from bench.plant import FAULTS, Fault, planted

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_applies_and_its_tests_exist(fault: Fault):
    ast.parse(planted(fault))
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (TESTS / file).read_text() if name else (TESTS / file).is_file()


def test_faults_are_in_many_rooms():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.file.partition("/")[0] for fault in FAULTS} == {
        *("actor", "algo", "batching", "check", "checkpoint", "cluster", "config", "cpu", "data"),
        *("environments", "models", "rewards", "rollout", "loop", "sandbox", "system", "tools", "weights"),
    }


def test_a_text_that_is_gone_is_refused():
    with pytest.raises(ValueError, match="occurs 0 times"):
        planted(Fault("x", "algo/loss.py", "no such text", "", ()))
