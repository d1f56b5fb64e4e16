"""Runs with an agent program, over real engines and trainers: what an agent saw is what is trained on, bit for bit."""

import shutil
from pathlib import Path

from run_megagrpo import metrics, rollouts, run_experiment

from tests import games, sums_agent

LEARNS = {"num_steps": 2, "num_prompts_per_step": 4, "group_size": 4}


def run(folder: Path, **sampling) -> Path:
    for module, name in ((games, "games_of_tests"), (sums_agent, "agents_of_tests")):
        shutil.copy(module.__file__, folder.parent / f"{name}.py")
    # turns end at a digit, too: a random model hardly ever ends them by itself
    sampling |= {"max_response_tokens": 24, "stop_token_ids": [4, 5, 6, 7]}
    run_experiment(folder, train=LEARNS, sampling=sampling, rollout={"deterministic": True})
    return folder


def test_a_program_over_plain_openai_trains_on_the_bits_of_the_same_environment(experiments):
    """Ids, log-probabilities, masks, rewards and advantages, the updates that follow, and the next step's samples."""
    limits = {"max_turns": 4}
    theirs = run(
        experiments / "gateway_environment", environment={"function": "games_of_tests:Sums", "history": "all", **limits}
    )
    ours = run(
        experiments / "gateway_program",
        agent={"function": "agents_of_tests:sums", "truncated_reward": 0.0, "workers": 1, **limits},
    )
    assert rollouts(ours) == rollouts(theirs)
    for step in (1, 2):
        mine, other = metrics(ours)[step], metrics(theirs)[step]
        shared = [name for name in other if name.split("/")[0] in ("loss", "optim", "policy", "reward", "mismatch")]
        assert len(shared) > 10 and {name: mine[name] for name in shared} == {name: other[name] for name in shared}
        assert mine["mismatch/logprob_abs_mean"] <= 5e-6


def test_forks_and_compactions_are_trained_on_once_and_as_the_engine_sampled_them(experiments):
    """One forward of the actor over every sample gives the engine's log-probabilities."""
    folder = run(experiments / "gateway_branches", agent={"function": "agents_of_tests:branches", "workers": 1})
    for step in (1, 2):
        assert metrics(folder)[step]["mismatch/logprob_abs_mean"] <= 5e-6
        for group in rollouts(folder)[step]:
            assert [sample["rollout"] for sample in group["samples"]] == [n for n in range(4) for _ in range(3)]
            assert len({sample["reward"] for sample in group["samples"]}) == 1
