"""What a run says of its health: warnings, the alarm of the first step, and which line of a stack is ours."""

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from megagrpo.config.schema import HealthAlarm
from megagrpo.mesh import make_mesh
from megagrpo.monitor import watchdog
from megagrpo.monitor.alarms import HealthWatch, MismatchAlarm, alarm_bounds
from megagrpo.system.run_folder import RunFolder
from megagrpo.types import Correction
from tests.experiments import experiment, until

ALL = get_args(HealthAlarm)
HEALTHY = {
    "loss/total": 0.1, "group/degenerate_fraction": 0.3, "advantage/std": 0.84, "policy/kl_reference": 0.01,
    "policy/clip_fraction_low": 0.1, "policy/clip_fraction_high": 0.1, "response/truncated_fraction": 0.05,
    "policy/entropy": 0.6, "mismatch/logprob_abs_mean": 0.004,
}  # fmt: skip


def said(*steps: dict[str, float], alarms: Sequence[str] = ALL, start: int = 0) -> list[str]:
    """The notes of a start whose steps measured HEALTHY with these changes."""
    notes: list[str] = []
    watch = HealthWatch(alarms, notes.append)
    watch.see(start, {"eval/accuracy": 0.3})
    for step, changes in enumerate(steps, start=start + 1):
        watch.see(step, HEALTHY | changes)
    return notes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"group/degenerate_fraction": 1.0, "advantage/std": 0.0},
            ["group/degenerate_fraction is 1 (bound 1) since step 3", "train.group_size", "log.alarms: degenerate"],
        ),
        ({"advantage/std": 0.005}, ["advantage/std is 0.005 (bound 0.01) since step 3", "train.group_size"]),
        (
            {"policy/kl_reference": 0.15},
            ["policy/kl_reference is 0.15 (bound 0.1)", "actor.optimizer.lr", "kl.loss_coef"],
        ),
        ({"policy/clip_fraction_low": 0.25}, ["_high is 0.35 (bound 0.3) since step 3", "num_updates_per_step"]),
        (
            {"response/truncated_fraction": 0.2},
            ["is 0.2 (0.05 in step 1, bound 0.15) since step 3", "max_response_tokens", "log.alarms: truncated_rise"],
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
    key = note.rpartition("log.alarms: ")[2].rstrip(")")
    others = [alarm for alarm in ALL if alarm != key]
    assert said({}, *[changes] * 6, alarms=others) == [], "one that is not named is off"


def test_none_is_said_without_alarms_and_each_start_compares_with_its_own_first_step():
    notes: list[str] = []
    watch = HealthWatch([], notes.append)
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
    watch = HealthWatch(ALL, notes.append)
    for step in range(1, 6):
        watch.see(step, {"loss/total": float("nan")})
    assert notes == []


TOKENS = 2000


BF16 = {"actor": {"dtype": "bfloat16"}, "rollout": {"dtype": "bfloat16"}}


@pytest.mark.parametrize(
    ("sections", "is_moe", "bounds"),
    [
        ({}, False, (1e-3, 0.1)),
        ({}, True, (1e-3, 0.1)),
        (BF16, False, (0.05, 1.0)),
        ({"rollout": {"dtype": "bfloat16"}}, False, (0.05, 1.0)),
        (BF16, True, (0.1, 4.0)),
        (BF16 | {"actor": {"dtype": "bfloat16", "routing_replay": "rollout"}}, True, (0.05, 1.0)),
        ({"algorithm": {"mismatch": {"alarm": 2.0}}}, False, (2e-3, 0.2)),
        ({"algorithm": {"mismatch": {"alarm": None}}}, False, None),
    ],
)
def test_bounds(sections, is_moe, bounds):
    assert alarm_bounds(experiment(**sections), is_moe) == bounds


def apart_of_all(trainer: torch.Tensor, engine: torch.Tensor) -> torch.Tensor:
    return (trainer - engine).abs()


def raised(apart: torch.Tensor, counts: bool = True, rejected: bool = False, lag: int = 0, **mismatch) -> str:
    """What the alarm says of tokens whose log-probabilities are so far apart."""
    mesh, mask = (
        make_mesh(0, 1, torch.device("cpu"), 30),
        torch.arange(TOKENS + 5) < TOKENS,
    )  # the last are a prompt's
    engine = torch.full((TOKENS + 5,), -1.0)
    engine[TOKENS:] = 50.0
    trainer = torch.full_like(engine, -1.0)
    trainer[:TOKENS] += apart
    alarm = MismatchAlarm(experiment(algorithm={"mismatch": mismatch}), is_moe=False)
    kept = mask & (apart_of_all(trainer, engine) < 1) if rejected else mask
    correction = Correction(before_rejection=mask if rejected else None)
    batch = SimpleNamespace(rollout_logprobs=engine, loss_mask=kept, correction=correction)
    batch.lags = torch.full_like(engine, lag, dtype=torch.int32) if lag else None
    text = alarm.judge(batch, trainer, counts, mesh)
    again = alarm.judge(batch, trainer + 10, counts, mesh)
    assert again == "", "only the first step is judged"
    return text


def test_a_heartbeat_that_cannot_be_written_is_tried_again(tmp_path, monkeypatch):
    """Else every other rank would be held up by this one, which has no heartbeat."""
    monkeypatch.setattr(watchdog, "_POLL_S", 0.02)
    monkeypatch.setattr(watchdog, "_BEAT_S", 0.04)
    mesh = make_mesh(0, 1, torch.device("cpu"), 30)
    folder = RunFolder(tmp_path)
    with watchdog.Watchdog(experiment(), mesh, folder, lambda: 0):
        folder.ranks.rename(tmp_path / "away")
        folder.ranks.touch()
        time.sleep(0.3)
        folder.ranks.unlink()
        until(folder.rank_progress(0).exists, 20)


def test_a_node_whose_clock_is_behind_has_a_heartbeat(tmp_path, monkeypatch):
    """When the file system has it, and not when that node believes to have written it."""
    two = SimpleNamespace(rank=0, world_size=2, gather_world=lambda value: [value] * 2)
    monkeypatch.setattr(watchdog, "_ANSWER_S", 0.0)
    folder = RunFolder(tmp_path)
    with watchdog.Watchdog(experiment(), two, folder, lambda: 0) as dog:
        other = json.loads(folder.rank_progress(0).read_text()) | {"rank": 1}
        other["beat"] -= 1000
        folder.rank_progress(1).write_text(json.dumps(other))
        dog._write_page(time.time())
    (page,) = folder.deadline_pages()
    assert "ranks 0-1: in start" in page.read_text() and "no heartbeat" not in page.read_text()


def test_it_is_raised_by_the_mean_and_by_the_tail():
    none = torch.zeros(TOKENS)
    assert raised(none + 0.9e-3) == ""
    assert "are 0.0011 apart in the mean (bound 0.001)" in raised(none - 1.1e-3)
    tail = none.clone()
    tail[:2] = 0.2  # 0.1 % of the tokens: the percentile itself
    assert raised(tail) == ""
    tail[:3] = 0.2
    assert "0.15% of tokens by more than 0.1 (bound 0.1%)" in raised(tail)
    assert raised(none + 5, alarm=None) == ""


def test_tokens_that_the_correction_rejects_are_judged_too():
    half = torch.zeros(TOKENS)
    half[::2] = 3.0
    assert "are 1.5 apart" in raised(half, rejected=True)


def test_tokens_of_older_weights_are_not_judged():
    """A resume trains first what was sampled ahead of its checkpoint."""
    assert raised(torch.ones(TOKENS), lag=1) == ""


def test_values_that_no_update_computed_do_not_count():
    assert raised(torch.ones(TOKENS), counts=False) == "", "another rank of the replica counts them"
    some = torch.full((TOKENS,), torch.nan)
    assert raised(some) == ""
    some[0] = 0.5
    assert "are 0.5 apart" in raised(some)


def test_libraries_inside_a_clone_and_the_interpreters_own_frames_are_not_ours(tmp_path: Path, monkeypatch):
    """A clone as `git clone` makes it, with its environment: all its files are below a folder named megagrpo."""
    clone = tmp_path / "megagrpo"
    monkeypatch.setattr(watchdog, "_PACKAGE", clone / "megagrpo")
    assert watchdog.is_ours(str(clone / "megagrpo" / "mesh.py"))
    library = clone / ".venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    for file in (library, clone / "tests" / "conftest.py", "<frozen runpy>", threading.__file__):
        assert not watchdog.is_ours(str(file))


def test_the_package_itself_is_found_through_a_link(tmp_path: Path):
    link = tmp_path / "somewhere else"
    link.symlink_to(Path(watchdog.__file__).parent)
    assert watchdog.is_ours(str(link / "watchdog.py"))
