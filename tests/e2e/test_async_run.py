"""Runs that sample ahead of the weights: the bound, nothing lost or twice, the same bits where they are drained."""

from pathlib import Path

import pytest
from run_megagrpo import assert_same_run, metrics, rollouts, run_experiment

STEPS = 4
AHEAD = {
    "train": {"num_steps": STEPS, "num_prompts_per_step": 4, "group_size": 4},
    "algorithm": {"mismatch": {"weight": {"name": "tis"}}},
    "sampling": {"max_response_tokens": 96},
}


def run(folder: Path, **sections) -> Path:
    run_experiment(folder, **AHEAD | sections)
    return folder


def prompts_of(steps: dict[int, list[dict]]) -> list[int]:
    return [group["prompt_id"] for _, groups in sorted(steps.items()) for group in groups]


def test_samples_outlive_the_weights_that_began_them(experiments):
    few = {"max_staleness": 1, "max_running_requests": 2}  # so that sampling a batch outlasts training on one
    folder = run(experiments / "ahead", rollout=few, actor={"routing_replay": "rollout"})
    steps, entries = rollouts(folder), metrics(folder)
    mixed = 0
    for step, groups in steps.items():
        for sample in (sample for group in groups for sample in group["samples"]):
            versions = [sample["weight_version"], *(version for _, version in sample.get("newer_weights", []))]
            assert versions == sorted(versions) and step - 2 <= versions[0] and versions[-1] <= step - 1
            mixed += len(versions) > 1
    assert mixed, "no publish met a response on its way"
    trained = prompts_of(steps)
    assert len(trained) == len(set(trained)) == STEPS * 4, "every prompt once"
    assert all(entries[step]["lag/max"] <= 1 for step in range(1, STEPS + 1))
    assert any(entries[step]["lag/max"] == 1 for step in range(2, STEPS + 1))
    for step in range(1, STEPS + 1):
        assert entries[step].get("mismatch/logprob_abs_mean_lag_0", 0.0) <= 1e-5, "of lag 0 it is numerics alone"
        assert entries[step]["router/replay_differs"] < 0.2, "experts of other tokens: almost all would differ"


DRAINED = {"rollout": {"max_staleness": 1, "deterministic": True}, "weights": {"in_flight": "drain"}}


@pytest.mark.slow
def test_drained_runs_repeat_bit_by_bit(experiments):
    drained = run(experiments / "drained", **DRAINED)
    assert_same_run(run(experiments / "drained_again", **DRAINED), drained, STEPS)
    for step, groups in rollouts(drained).items():
        versions = {sample["weight_version"] for group in groups for sample in group["samples"]}
        assert versions == {max(step - 2, 0)} and all("newer_weights" not in s for g in groups for s in g["samples"])
