"""Runs with an environment, over real engines and trainers: rollouts of one growing sample, and of a sample a turn."""

import shutil
from pathlib import Path

import pytest
from run_megagrpo import assert_same_run, metrics, rollouts, run_experiment

from tests import games

STEPS = 3
LEARNS = {"num_steps": STEPS, "num_prompts_per_step": 4, "group_size": 4}


def run(folder: Path, history: str, **more) -> Path:
    shutil.copy(games.__file__, folder.parent / "games_of_tests.py")
    environment = {"function": "games_of_tests:Sums", "history": history, "max_turns": 4}
    # turns end at a digit, too: a random model hardly ever ends them by itself
    sampling = {"max_response_tokens": 24, "stop_token_ids": [4, 5, 6, 7], "environment": environment}
    run_experiment(folder, train=LEARNS, sampling=sampling, rollout={"deterministic": True}, **more)
    return folder


@pytest.mark.parametrize("history", ["all", "last"])
def test_what_was_sampled_is_what_is_trained_on(experiments, history):
    """One forward of the actor over every sample gives the engine's log-probabilities; a rollout is counted once."""
    folder = run(experiments / f"environment_{history}", history)
    steps, entries = rollouts(folder), metrics(folder)
    turns = 0
    for step in range(1, STEPS + 1):
        assert entries[step]["mismatch/logprob_abs_mean"] <= 5e-6
        for group in steps[step]:
            samples = group["samples"]
            numbers = [sample.get("rollout", index) for index, sample in enumerate(samples)]
            assert sorted(set(numbers)) == list(range(LEARNS["group_size"]))
            turns += len(samples) - LEARNS["group_size"]
            for number in set(numbers):
                of_rollout = {sample["reward"] for sample, n in zip(samples, numbers, strict=True) if n == number}
                assert len(of_rollout) == 1, "one reward"
            if history == "all":
                assert len(samples) == LEARNS["group_size"]
    assert (turns > 0) == (history == "last")
    assert entries[1]["reward/error_fraction"] == 0.0
    assert entries[1]["response/turns_mean"] > 1.0 and entries[1]["environment/call_s"] > 0.0


@pytest.mark.slow
def test_a_run_with_an_environment_repeats_bit_by_bit(experiments):
    first = run(experiments / "environment_again", "last")
    assert_same_run(run(experiments / "environment_once_more", "last"), first, STEPS)
