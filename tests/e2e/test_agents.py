"""Runs with an environment, over real engines and trainers: rollouts of one growing sample, and of a sample a turn."""

import json
import os
import shutil
import signal
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
from run_megagrpo import (
    Job,
    assert_same_run,
    engine,
    killed_and_run_again,
    metrics,
    rollouts,
    run_experiment,
    trainer,
    write_experiment,
)

from tests import games, tree_agent

pytestmark = pytest.mark.verifies(
    "runs",
    "environments, agents: trainer's and engine's log-probabilities agree to 5e-6; killed and run again bit by bit",
)

STEPS = 3
LEARNS = {"num_steps": STEPS, "num_prompts_per_step": 4, "group_size": 4}


def played(folder: Path, history: str, **more) -> dict:
    """Sections of a run with an environment, whose module is put where runs find it."""
    shutil.copy(games.__file__, folder.parent / "games_of_tests.py")
    environment = {"function": "games_of_tests:Sums", "history": history, "max_turns": 4}
    # turns end at a digit, too: a random model hardly ever ends them by itself
    sampling = {"max_response_tokens": 24, "stop_token_ids": [4, 5, 6, 7], "environment": environment}
    return {"train": LEARNS, "sampling": sampling, "rollout": {"deterministic": True}, **more}


@pytest.mark.slow
@pytest.mark.parametrize("history", ["all", "last"])
def test_what_was_sampled_is_what_is_trained_on(experiments, history):
    """One forward of the actor over every sample gives the engine's log-probabilities; a rollout is counted once."""
    folder = experiments / f"environment_{history}"
    run_experiment(folder, **played(folder, history))
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
@pytest.mark.parametrize("history", ["all", "last"])
def test_a_run_with_an_environment_that_is_killed_goes_on_as_the_undisturbed_one(experiments, history):
    """Rollouts of the next step are open when one trainer dies, and when everything does."""
    ahead = {
        "train": LEARNS | {"num_steps": 4},
        "rollout": {"deterministic": True, "max_staleness": 1},
        "algorithm": {"mismatch": {"weight": {"name": "tis"}}},
        "weights": {"in_flight": "drain"},
        "checkpoint": {"every": 1},
    }
    reference, folder = experiments / f"played_{history}", experiments / f"played_killed_{history}"
    run_experiment(reference, **played(reference, history, **ahead))
    experiment = write_experiment(folder, **played(folder, history, **ahead))
    killed_and_run_again(experiment)
    assert_same_run(folder, reference, 4)


def trees(steps: int = STEPS, **more) -> dict:
    agent = {"function": f"{tree_agent.__file__}:tree", "workers": 1, **more}
    return {
        "train": LEARNS | {"num_steps": steps},
        "sampling": {"max_response_tokens": 60, "stop_token_ids": [4, 5, 6, 7], "agent": agent},
        "rollout": {"deterministic": True},
        "checkpoint": {"every": 1},
        "log": {"tensorboard": False, "tokens": LEARNS["num_prompts_per_step"]},
    }


def trained_rollouts(folder: Path, step: int) -> list[list[tuple[float, list[dict]]]]:
    """Of each group of a step, (reward, samples) of its rollouts. Each sampled token was trained on, once.

    Samples have "advantage" added, the mean over their trained tokens.
    """
    lines = [json.loads(line) for file in folder.glob("trained/*.jsonl") for line in file.read_text().splitlines()]
    advantages, trained = {}, defaultdict(int)
    for line in (line for line in lines if line["step"] == step):
        advantages |= dict(zip(line["sample_ids"], line["advantages"], strict=True))
        for sample in line["tokens"]:
            trained[sample["sample_id"]] = sum(value is not None for value in sample["difference"])
    groups = rollouts(folder)[step]
    most, found = max(len(group["samples"]) for group in groups), []
    for group in groups:
        of_rollouts, tokens = defaultdict(list), defaultdict(int)
        for index, sample in enumerate(group["samples"]):
            sample_id, number = group["group_id"] * most + index, sample.get("rollout", index)
            of_rollouts[number].append(sample | {"advantage": advantages[sample_id]})
            tokens[number] += trained[sample_id]
        for number, samples in of_rollouts.items():
            sampled = int(samples[0]["outcome"]["detail"].split("; ")[-1])
            assert tokens[number] == sampled, "all that was sampled"
        found.append([(samples[0]["reward"], samples) for samples in of_rollouts.values()])
    return found


@pytest.mark.slow
def test_a_program_that_forks_and_compacts_is_trained_as_rollouts_on_what_was_sampled(experiments):
    """Whole runs: each sampled token is trained on once, in one branch, with the advantage of its rollout."""
    folder = experiments / "trees"
    run_experiment(folder, **trees())
    entries, num_trees = metrics(folder), 0
    for step in range(1, STEPS + 1):
        assert entries[step]["mismatch/logprob_abs_mean"] <= 5e-6
        assert entries[step]["reward/error_fraction"] == 0.0 and entries[step]["agent/engines_s"] > 0.0
        for group in trained_rollouts(folder, step):
            rewards = [reward for reward, _ in group]
            mean, std = statistics.mean(rewards), statistics.stdev(rewards)
            for reward, samples in group:
                expected = pytest.approx((reward - mean) / (std + 1e-6), rel=1e-4, abs=1e-6)
                assert all(sample["advantage"] == expected for sample in samples)
                num_trees += len(samples) == 3
    assert num_trees > STEPS * 8, "whole trees, most of them"


@pytest.mark.slow
def test_faults_in_the_third_turn_lose_nothing_and_change_no_bit(experiments):
    """Killed in turn 3: the engine, the process of the programs, and a trainer with its gateway, which all resume."""
    reference, folder, steps = experiments / "trees_undisturbed", experiments / "trees_killed", 5
    run_experiment(reference, **trees(steps))
    marks = folder.with_suffix(".marks")
    marks.touch()
    with Job("run", write_experiment(folder, **trees(steps, args={"marks": str(marks)}))) as job:
        for step, victim in enumerate(("engine", "program", "trainer"), 1):
            job.wait_for_step(step)
            seen = len(marks.read_text().splitlines())
            job.wait_for(lambda seen=seen: len(marks.read_text().splitlines()) > seen, "turn 3", poll_s=0.002)
            pids = {
                "engine": lambda: engine(folder)["pid"],
                "program": lambda: int(marks.read_text().split()[-1]),
                "trainer": lambda: trainer(job, 1).pid,
            }
            os.kill(pids[victim](), signal.SIGKILL)
        job.succeed()
    assert_same_run(folder, reference, steps)
    assert "engine-0 died" in (folder / "logs" / "service.log").read_text()
    assert all(entry["reward/error_fraction"] == 0.0 for step, entry in metrics(folder).items() if step)
