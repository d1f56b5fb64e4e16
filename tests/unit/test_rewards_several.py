"""Several graders, a row's own grader, group graders: rewards, records and metrics, in real processes."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
import torch

from megagrpo.check.problems import preflight
from megagrpo.config.schema import ExperimentConfig, RewardConfig
from megagrpo.mesh import make_mesh
from megagrpo.monitor.metrics import Metrics
from megagrpo.monitor.rollouts import RolloutLog
from megagrpo.rewards.group import distinct, rank
from megagrpo.rewards.pool import RewardPool
from megagrpo.rollout.selection import grader_metrics
from megagrpo.system.run_folder import RunFolder
from megagrpo.types import Outcome, Prompt, RolloutGroup, Sample

GRADERS = """
import os, time
def length(text, answer, scale=1.0): return scale * len(text)
def picky(text, answer):
    if text == "bad": raise ValueError("on purpose")
    return 1.0, f"saw {text}"
def minus_mean(texts, answer, scores, factor=1.0):
    mean = sum(scores) / len(scores)
    return [factor * (score - mean) for score in scores]
def too_few(texts, answer, scores): return scores[1:]
def hangs(texts, answer, scores): time.sleep(3600)
"""
SEVERAL = [
    {"grader": "own_rewards:length", "args": {"scale": 0.5}, "weight": 2.0},
    {"grader": "own_rewards:picky", "name": "taste", "weight": 0.25},
]


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(GRADERS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_rewards", None)


def prompt(grader=None) -> Prompt:
    return Prompt(id=0, text="q", token_ids=(1,), answer="a", grader=grader)


def test_the_reward_is_the_weighted_sum_and_an_error_of_one_is_the_outcome(own, tmp_path):
    config = RewardConfig(graders=SEVERAL, workers=1)
    with RewardPool(config) as pool:
        good, bad = (pool.submit(prompt(), text).result(timeout=60) for text in ("abcd", "bad"))
        alone = pool.submit(prompt("taste"), "abcd").result(timeout=60)
        other = pool.submit(prompt("exact"), "a").result(timeout=60)
    assert (good.status, good.value, good.detail) == ("score", 2.0 * 2.0 + 0.25, "saw abcd")
    assert {name: (part.status, part.value) for name, part in good.parts.items()} == {
        "length": ("score", 2.0),
        "taste": ("score", 1.0),
    }
    assert bad.status == "error" and "ValueError: on purpose" in bad.detail
    assert bad.parts["length"].value == 1.5 and bad.parts["taste"].status == "error"
    assert (alone.value, list(alone.parts)) == (0.25, ["taste"]) and (other.value, list(other.parts)) == (
        1.0,
        ["exact"],
    )

    outcomes = (good, bad, alone, other)
    samples = tuple(Sample(i, (3,), (-0.1,), "stop", 0, "t") for i in range(4))
    group = RolloutGroup(0, prompt(), samples, outcomes)
    log = RolloutLog(RunFolder(tmp_path), 0, 1)
    log.write(1, [group])
    log.close()
    record = json.loads((tmp_path / "rollouts" / "step_000001.replica_0.jsonl").read_text())["samples"][0]["outcome"]
    assert record == {
        "status": "score",
        "value": 4.25,
        "detail": "saw abcd",
        "parts": {
            "length": {"status": "score", "value": 2.0, "detail": ""},
            "taste": {"status": "score", "value": 1.0, "detail": "saw abcd"},
        },
    }
    metrics, mesh = Metrics(), make_mesh(0, 1, torch.device("cpu"), deadline_s=60)
    grader_metrics(metrics, [group], config)
    assert metrics.reduced(mesh.reduce) == {
        "grader/length_mean": 1.75,
        "grader/length_failed_fraction": 0.0,
        "grader/taste_mean": 1.0,
        "grader/taste_failed_fraction": pytest.approx(1 / 3),
    }


def test_metrics_do_not_depend_on_who_has_the_groups():
    """Any split of the groups over ranks adds up to the same sums; a rank without groups adds the same names."""
    config = RewardConfig(graders=[{"grader": "exact"}, {"grader": "format"}])
    parts = [{"exact": Outcome("score", i / 4), "format": Outcome("error")} for i in range(4)]
    groups = [RolloutGroup(i, prompt(), (), (Outcome("error", parts=part),)) for i, part in enumerate(parts)]
    whole, *split = (Metrics() for _ in range(4))
    grader_metrics(whole, groups, config)
    for metrics, share in zip(split, (groups[:1], groups[1:], []), strict=True):
        grader_metrics(metrics, share, config)
    added = {name: sum(metrics._sums[name] for metrics in split) for name in whole._sums}
    assert added == whole._sums and all(metrics._kinds == whole._kinds for metrics in split)
    alone = Metrics()
    grader_metrics(alone, groups, RewardConfig(grader="exact"))
    assert not alone._kinds, "one grader's score is the reward"


def test_a_group_grader_sees_those_that_have_a_score(own):
    config = RewardConfig(
        grader="own_rewards:picky", group_grader="own_rewards:minus_mean", group_args={"factor": 10.0}, workers=1
    )
    bad = Outcome("timeout", detail="10 s")
    outcomes = [Outcome("score", 1.0), bad, Outcome("score", 3.0, parts={"picky": Outcome("score", 3.0)})]
    with RewardPool(config) as pool:
        got = pool.submit_group(prompt(), ["a", "b", "c"], outcomes).result(timeout=60)
        assert pool.submit_group(prompt(), ["b"], [bad]).result(timeout=60) == [bad]
    assert got == [Outcome("score", -10.0), bad, Outcome("score", 10.0, parts={"picky": Outcome("score", 3.0)})]


@pytest.mark.parametrize(
    "name, status, said",
    [("too_few", "error", "not a list of 2 scores"), ("hangs", "timeout", "gave no result in 1 s")],
)
def test_a_group_grader_that_fails_fails_for_the_whole_group(own, name, status, said):
    config = RewardConfig(grader="exact", group_grader=f"own_rewards:{name}", workers=1, timeout_s=1.0)
    with RewardPool(config) as pool:
        got = pool.submit_group(prompt(), ["a", "b"], [Outcome("score", 1.0)] * 2).result(timeout=60)
    assert [outcome.status for outcome in got] == [status] * 2 and all(said in outcome.detail for outcome in got)


def test_built_in_group_graders():
    assert rank(["a"] * 4, "", [5.0, -1.0, 5.0, 9.0]) == [0.5, 0.0, 0.5, 1.0]
    assert rank(["a"], "", [3.0]) == [0.5]
    assert distinct(["x  y", "x y", "z"], "", [1.0, 1.0, 1.0]) == [0.5, 0.5, 1.0]
    assert distinct(["x", "x"], "", [-1.0, 0.0]) == [-1.0, 0.0]


def test_cancelling_a_reward_cancels_what_has_not_begun(own):
    config = RewardConfig(graders=[{"grader": "own_rewards:length"}, {"grader": "own_rewards:picky"}], workers=1)

    async def run(pool: RewardPool) -> float:
        task = asyncio.create_task(asyncio.wait_for(asyncio.wrap_future(pool.submit(prompt(), "abc")), 0))
        await asyncio.gather(task, return_exceptions=True)
        return (await asyncio.wrap_future(pool.submit(prompt(), "abcd"))).value

    with RewardPool(config) as pool:
        assert asyncio.run(run(pool)) == 5.0


@pytest.mark.parametrize(
    "reward, said",
    [
        ({"grader": "exact", "graders": [{"grader": "format"}]}, "grader and graders: write one of them"),
        ({"graders": [{"grader": "exact"}, {"grader": "exact"}]}, "two are named exact; give each a name of its own"),
        ({"graders": [{"grader": "exact", "name": "Exact!"}]}, "String should match pattern"),
        ({"group_args": {"x": 1}}, "group_args without group_grader"),
        ({"graders": [{"grader": "http", "args": {"url": "nowhere"}}]}, "should look like http://host:port/path"),
    ],
)
def test_wrong_combinations_are_refused(reward, said):
    with pytest.raises(ValueError, match=said):
        RewardConfig(**reward)


def test_a_greedy_baseline_does_not_go_with_a_group_grader():
    with pytest.raises(ValueError, match="its greedy baseline is graded alone"):
        ExperimentConfig(
            name="n",
            output_dir="o",
            model={"path": "m"},
            data={"path": "d"},
            reward={"group_grader": "rank"},
            algorithm={"advantage": {"name": "remax"}},
        )


def test_check_finds_every_wrong_grader(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text('{"prompt": "p", "answer": "{\\"asserts\\": [\\"assert (\\"]}", "by": "code"}\n')
    judge = {"url": "http://127.0.0.1:1/v1/chat/completions", "model": "m", "prompt_file": "judge.txt"}
    config = ExperimentConfig(
        name="n",
        output_dir="o",
        model={"path": "."},
        data={"path": "d.jsonl", "grader_key": "by"},
        reward={
            "graders": [{"grader": "exat"}, {"grader": "judge", "args": judge}, {"grader": "own_rewards:lenght"}],
            "group_grader": "rnk",
        },
    )
    found = "\n".join(preflight(config))
    for said in (
        "reward.grader 'exat' is unknown; did you mean 'exact'",
        "prompt_file judge.txt cannot be read",
        "has no function lenght; did you mean 'length'",
        "reward.group_grader 'rnk' is unknown; did you mean 'rank'",
        "d.jsonl:1: the answer's test 'assert (' is not Python",
    ):
        assert said in found, found
    Path("judge.txt").write_text("{prompt}")
    assert "has no {response}" in "\n".join(preflight(config))
