"""A run with data.curriculum that samples ahead: solved rows are left out, and killed and run again
it is the same run."""

from pathlib import Path

import pytest
from run_megagrpo import assert_killed_run_is_the_same, metrics, rollouts, run_experiment

from tests.curricula import assert_left_out

pytestmark = pytest.mark.verifies("runs", "`data.curriculum` with `max_staleness` 1: killed and run again bit by bit")

STEPS, ROWS, PASS, EASY, RETURN_AFTER = 6, 14, 0.4, 0.5, 2
SECTIONS = {
    "data": {
        "limit": ROWS,
        "curriculum": {
            "name": "drop_solved",
            "args": {"return_after": RETURN_AFTER},
            "pass_reward": PASS,
            "easy_at_least": EASY,
        },
    },
    "train": {"num_steps": STEPS, "num_prompts_per_step": 4},
    "algorithm": {"mismatch": {"weight": {"name": "tis"}}},
    "rollout": {"max_staleness": 1, "deterministic": True},
    "weights": {"in_flight": "drain"},
    "checkpoint": {"every": 1, "keep": 20},
}


@pytest.mark.slow  # in CI: unit/test_curriculum.py, dist/test_curriculum_ranks.py
def test_killed_in_a_curriculum_and_run_again_it_is_the_same_run(experiments: Path):
    whole = experiments / "curriculum"
    run_experiment(whole, **SECTIONS)
    taken = []
    for _, groups in sorted(rollouts(whole).items()):
        rewards = {g["prompt_id"]: [s["reward"] for s in g["samples"]] for g in groups}
        taken.append([(row, sum(r >= PASS for r in of) >= EASY * len(of)) for row, of in rewards.items()])
    assert_left_out(taken, staleness=1, return_after=RETURN_AFTER)
    entry = metrics(whole)[STEPS]
    pools = ("unseen", "hard", "medium", "easy")
    assert sum(entry[f"curriculum/{pool}_rows"] for pool in pools) == ROWS
    assert sum(entry[f"curriculum/{pool}_fraction"] for pool in pools) == 1

    folder = experiments / "curriculum-resumed"
    assert_killed_run_is_the_same(folder, whole, STEPS, kill_after=3, middle=3, **SECTIONS)
