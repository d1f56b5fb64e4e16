"""What a run says of its health: when each warning is said, how often, and what it names."""

import pytest

from megagrpo.config.schema import AlarmsConfig
from megagrpo.monitor.alarm import HealthWatch

HEALTHY = {
    "loss/total": 0.1,
    "group/degenerate_fraction": 0.3,
    "advantage/std": 0.84,
    "policy/kl_reference": 0.01,
    "policy/clip_fraction_low": 0.1,
    "policy/clip_fraction_high": 0.1,
    "response/truncated_fraction": 0.05,
    "policy/entropy": 0.6,
    "mismatch/logprob_abs_mean": 0.004,
}


def said(*steps: dict[str, float], limits: AlarmsConfig | None = None, start: int = 0) -> list[str]:
    """The notes of a start whose steps measured HEALTHY with these changes."""
    notes: list[str] = []
    watch = HealthWatch(limits or AlarmsConfig(), notes.append)
    watch.see(start, {"eval/accuracy": 0.3})
    for step, changes in enumerate(steps, start=start + 1):
        watch.see(step, HEALTHY | changes)
    return notes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"group/degenerate_fraction": 1.0, "advantage/std": 0.0},
            ["group/degenerate_fraction is 1 (bound 1) since step 3", "train.group_size", "log.alarms.degenerate"],
        ),
        ({"advantage/std": 0.005}, ["advantage/std is 0.005 (bound 0.01) since step 3", "train.group_size"]),
        (
            {"policy/kl_reference": 0.15},
            ["policy/kl_reference is 0.15 (bound 0.1)", "actor.optimizer.lr", "kl.loss_coef"],
        ),
        ({"policy/clip_fraction_low": 0.25}, ["_high is 0.35 (bound 0.3) since step 3", "num_updates_per_step"]),
        (
            {"response/truncated_fraction": 0.2},
            ["is 0.2 (0.05 in step 1, bound 0.15) since step 3", "max_response_tokens", "log.alarms.truncated_rise"],
        ),
        ({"policy/entropy": 0.05}, ["policy/entropy is 0.05 (0.6 in step 1, bound 0.06)", "clip_ratio_high"]),
        ({"mismatch/logprob_abs_mean": 0.013}, ["is 0.013 (0.004 in step 1, bound 0.012)", "megagrpo bisect"]),
    ],
)
def test_a_warning_names_value_bound_step_and_remedy_once(changes, words):
    assert said(*[{}] * 9) == []
    (note,) = said({}, {}, *[changes] * 6)
    assert note.startswith("WARNING: ") and all(word in note for word in words), note
    assert said({}, {}, changes, changes, {}, changes, changes, {}) == [], "three steps running"
    key = note.rpartition("log.alarms.")[2].rstrip(")")
    assert said({}, *[changes] * 6, limits=AlarmsConfig(**{key: None})) == [], "null switches it off"
    assert said({}, changes, limits=AlarmsConfig(steps=1)) != []


def test_none_is_said_without_a_section_and_each_start_compares_with_its_own_first_step():
    notes: list[str] = []
    watch = HealthWatch(None, notes.append)
    for step in range(1, 9):
        watch.see(step, HEALTHY | {"policy/kl_reference": 5.0})
    assert notes == []
    assert said(*[{"policy/entropy": 0.01}] * 9, start=70) == []


def test_equal_rewards_are_no_harm_where_advantages_come_from_elsewhere():
    """REINFORCE++ and ReMax learn from groups of one response, whose rewards are always equal."""
    assert said(*[{"group/degenerate_fraction": 1.0, "advantage/std": 0.9}] * 6) == []


def test_staleness_is_not_mismatch():
    stale = {"mismatch/logprob_abs_mean": 0.5, "lag/mean": 1.0}
    assert said({}, *[stale | {"mismatch/logprob_abs_mean_lag_0": 0.004}] * 6) == []
    (note,) = said({}, *[stale | {"mismatch/logprob_abs_mean_lag_0": 0.05}] * 6)
    assert "is 0.05 (0.004 in step 1" in note
    surplus = {"mismatch/logprob_abs_mean": 0.5, "dynamic_sampling/carried": 12.0}
    assert said({}, *[surplus] * 6) == []
    rounding = [{"mismatch/logprob_abs_mean": value} for value in (4e-7, 9e-5, 9e-5, 9e-5, 9e-5)]
    assert said(*rounding) == []


def test_what_was_not_measured_is_not_judged():
    notes: list[str] = []
    watch = HealthWatch(AlarmsConfig(), notes.append)
    for step in range(1, 6):
        watch.see(step, {"loss/total": float("nan")})
    assert notes == []
