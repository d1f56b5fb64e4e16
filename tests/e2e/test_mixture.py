"""A mixture of three sources with keys and graders of their own, one of which rewards parts of a response.

What a user sees of it: ratios, metrics by source, rewards of tokens; and a run killed in it is the same run.
"""

import json
import statistics
from collections import Counter
from pathlib import Path

import pytest
from run_megagrpo import assert_agrees, assert_killed_run_is_the_same, metrics, rollouts, run_experiment

from megagrpo.rewards.graders.format import exact

pytestmark = pytest.mark.verifies(
    "algorithms", "mixture of sources: ratios in every step; killed and run again bit by bit"
)

STEPS, PROMPTS, RATIOS = 4, 8, {"a": 4.0, "b": 3.0, "openai/c": 1.0}
GRADERS = '''
def low_digits(text, answer):
    return sum(c in "01234" for c in text) / max(len(text), 1)

def parts(text, answer, extra_info):
    """0.25 for the first half of the text, and `bonus` of the row for the whole."""
    half = [[0, max(len(text) // 2, 1), 0.25]] if text else []
    return {"score": extra_info["bonus"] * (len(text) % 2), "spans": half}
'''


def sections(folder: Path) -> dict:
    """The experiment's sections, and its three files beside the run folder: text, messages as JSON, dotted keys."""
    rows = [json.loads(line) for line in (folder.parent / "data" / "train.jsonl").read_text().splitlines()][:30]
    (folder.parent / "mixture_graders.py").write_text(GRADERS)
    files = {source: folder.parent / f"mixture_{source[-1]}.jsonl" for source in RATIOS}
    made = {
        "a": [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows[:7]],
        "b": [{"question": row["prompt"], "solution": row["answer"]} for row in rows[7:20]],
        "openai/c": [
            {"prompt": row["prompt"], "reward_model": {"ground_truth": row["answer"]}, "extra_info": {"bonus": 0.5}}
            for row in rows[20:]
        ],
    }
    for source, path in files.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in made[source]))
    keys = {
        "a": {"grader": "low"},
        "b": {"prompt_key": "question", "answer_key": "solution", "grader": "exact"},
        "openai/c": {"answer_key": "reward_model.ground_truth", "extra_key": "extra_info", "grader": "parts"},
    }
    sources = [{"source": s, "path": str(files[s]), "ratio": ratio, **keys[s]} for s, ratio in RATIOS.items()]
    graders = [
        {"grader": "mixture_graders:low_digits", "name": "low"},
        {"grader": "exact"},
        {"grader": f"{folder.parent}/mixture_graders.py:parts", "name": "parts"},
    ]
    return {
        "data": {"path": None, "sources": sources},
        "reward": {"grader": "gsm8k", "graders": graders},
        "algorithm": {"advantage": {"name": "reinforce"}, "reward": {"mean": "group", "clip": 2.0}},
        "train": {"num_steps": STEPS, "num_prompts_per_step": PROMPTS},
        "rollout": {"deterministic": True},
        "checkpoint": {"every": 1, "keep": 20},
    }


@pytest.fixture(scope="module")
def whole(experiments) -> Path:
    folder = experiments / "mixture"
    run_experiment(folder, **sections(folder))
    return folder


@pytest.mark.slow  # in CI: unit/test_prompts.py, and the graders of rows in unit/test_rewards.py
def test_every_step_has_the_ratios_and_each_source_its_grader(whole):
    assert_agrees(whole)
    for step, groups in rollouts(whole).items():
        assert Counter(group["source"] for group in groups) == RATIOS
        for group in groups:
            for sample in group["samples"]:
                text, value = sample["text"], sample["reward"]
                match group["source"]:
                    case "a":
                        assert value == sum(c in "01234" for c in text) / max(len(text), 1)
                    case "b":
                        assert value == exact(text, group["answer"])
                    case _:
                        assert value == 0.5 * (len(text) % 2) + (0.25 if text else 0)
                        placed = sample["outcome"].get("token_rewards", [])
                        assert [reward for _, reward in placed] == ([0.25] if text else [])
        entry = metrics(whole)[step]
        for name, source in (("a", "a"), ("b", "b"), ("openai_c", "openai/c")):
            of_source = [
                sample["reward"] for group in groups if group["source"] == source for sample in group["samples"]
            ]
            assert entry[f"source/{name}_reward_mean"] == pytest.approx(statistics.fmean(of_source), rel=1e-12)
            assert entry[f"source/{name}_fraction"] == RATIOS[source] / PROMPTS


@pytest.mark.slow
def test_killed_in_a_mixture_and_run_again_it_is_the_same_run(whole):
    folder = whole.parent / "mixture-resumed"
    assert_killed_run_is_the_same(folder, whole, STEPS, 1, STEPS - 1, **sections(folder))
