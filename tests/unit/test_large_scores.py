"""Scores and rewards that advantages in float32 may not hold."""

import math
from dataclasses import replace

import pytest
from test_batch import ALONE, groups_of

from megagrpo.algo.advantage import with_advantages
from megagrpo.algo.statistics import alone
from megagrpo.batching.batch import build_batch
from megagrpo.batching.updates import one_pass
from megagrpo.config.algorithm import AlgorithmConfig
from megagrpo.types import AlgoState, Outcome


@pytest.mark.parametrize("score", [-1e308, 1e50, math.inf, math.nan])
def test_a_score_beyond_statistics_is_an_error_of_its_rollout(score):
    """A judge's "score: 1e308", or a sum of two such rewards: it ended a run at every start again."""
    groups = groups_of([(2, [3, 3, 3])])
    given = (Outcome("score", score, "by the judge"), Outcome("score", 1.0), Outcome("score", 3.0))
    groups[0] = replace(groups[0], outcomes=given)
    assert given[0].status == "error" and str(score) in given[0].detail
    batch = build_batch(groups, one_pass(1), ALONE)
    advantages = with_advantages(batch, AlgorithmConfig(), alone, AlgoState(), 3)[0].advantages
    by_sample = [part[2:].tolist() for part in advantages.split(5)]
    assert by_sample[0] == [0.0] * 3 and by_sample[1] == pytest.approx([-(0.5**0.5)] * 3)


@pytest.mark.parametrize("large", [1e50, -2e9, math.nan])
@pytest.mark.parametrize("field", ["value", "token_rewards", "turn_rewards"])
def test_a_number_that_float32_may_not_hold_is_no_reward(field, large):
    """A grader of distances and a model that writes 10^50: the advantages were infinite, and the run ended."""

    def outcome(number: float) -> Outcome:
        value = {"token_rewards": ((0, 1.0), (2, number)), "turn_rewards": (1.0, number), "value": number}[field]
        return Outcome("score", **{field: value})

    assert not outcome(large).ok and str(large) in outcome(large).detail
    assert outcome(-1e9).ok
    algorithm = AlgorithmConfig.model_validate({"advantage": {"name": "dr_grpo"}})
    (group,) = groups_of([(2, [3, 3, 3])])
    group = replace(group, outcomes=(outcome(large), outcome(1e9), outcome(-1e9)))
    batch = with_advantages(build_batch([group], one_pass(1), ALONE), algorithm, alone, AlgoState(), 3)[0]
    assert batch.advantages.isfinite().all() and batch.advantages[:5].tolist() == [0.0] * 5
