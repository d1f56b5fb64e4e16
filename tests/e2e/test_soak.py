"""Seven publishes of bench/soak.py: a run under faults finishes with every sample, and leaves nothing behind."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from faults import prepare
from soak import soak

NUM_STEPS, EVERY = 7, 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_seven_steps_in_which_engines_and_a_trainer_are_killed(experiments, tmp_path):
    prepare(tmp_path / "soak", made=experiments)
    faults = ["engine killed in prefill", "engine killed in a weight update", "trainer rank 1 killed in the optimizer"]
    result = soak(tmp_path / "soak" / "run", NUM_STEPS, EVERY, faults)
    assert result["samples_lost"] == 0 and len(result["memory"]) == NUM_STEPS
    assert all(row["recovered_s"] > 0 for row in result["faults"])
