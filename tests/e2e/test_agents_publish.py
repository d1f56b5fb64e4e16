"""Publishes in the middle of 64 sessions: their programs see slow calls, and nothing that was sampled is lost."""

from pathlib import Path

import pytest
from run_megagrpo import merged, metrics, run_experiment
from test_agents import trained_rollouts, trees

STEPS, PROMPTS = 3, 16
# of a tool: rollouts last longer than a step's training, and are in the middle at its publish
PAUSE_S = 4.0
CORRECTED = {"mismatch": {"weight": {"name": "tis"}}}
pytestmark = pytest.mark.slow


def run(folder: Path, in_flight: str, staleness: int, prefix_cache: str = "flush") -> dict[int, dict]:
    """The metrics of a run of 64 rollouts a step, all of which arrived and were trained on."""
    rollout = {"deterministic": False, "max_staleness": staleness, "prefix_cache": prefix_cache}
    train = {"num_steps": STEPS, "num_prompts_per_step": PROMPTS, "group_size": 4}
    sections = {"rollout": rollout, "train": train, "log": {"tokens": PROMPTS}, "weights": {"in_flight": in_flight}}
    pause_s = PAUSE_S if staleness and in_flight == "retract" else 0.0
    run_experiment(folder, algorithm=CORRECTED, **merged(trees(STEPS, args={"pause_s": pause_s}), sections))
    entries, newer = metrics(folder), 0
    for step in range(1, STEPS + 1):
        groups = trained_rollouts(folder, step)
        assert [len(group) for group in groups] == [4] * PROMPTS, "64 rollouts"
        assert entries[step]["reward/error_fraction"] == entries[step]["reward/timeout_fraction"] == 0.0
        assert entries[step].get("lag/max", 0) <= staleness
        newer += sum("newer_weights" in sample for group in groups for _, samples in group for sample in samples)
    assert (newer > 0) == (staleness > 0 and in_flight == "retract"), "sessions went on with new weights"
    return entries


@pytest.mark.parametrize(("in_flight", "staleness"), [("retract", 0), ("drain", 1)])
def test_sessions_and_a_publish(experiments, in_flight, staleness):
    run(experiments / f"publish_{in_flight}_{staleness}", in_flight, staleness)


def test_sessions_go_on_over_a_publish_and_what_they_rest_on_is_counted(experiments):
    """The last step's rollouts began before a publish: what newer weights sampled came after old keys and values."""
    last = run(experiments / "publish_by_version", "retract", 1, "by_version")[STEPS]
    assert last["prefix/hit_fraction"] > 0.5
    assert last["prefix/on_older_keys_fraction"] == pytest.approx(last["lag/fraction_0"], rel=0.05)
