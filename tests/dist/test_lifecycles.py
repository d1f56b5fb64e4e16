"""Lives of a run, start after start, whatever ends them (tests/lifecycles.py): some that are drawn, and one for each
fault that was found."""

from collections.abc import Iterator
from dataclasses import replace

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from megagrpo.monitor.step_log import read_metrics
from tests.lifecycles import LifeMachine, Lives, Settings
from tests.played_run import Event


@pytest.fixture(scope="module")
def lives(tmp_path_factory) -> Iterator[Lives]:
    lives = Lives(tmp_path_factory.mktemp("lives"))
    lives.begin().start(Settings(num_steps=6))  # undisturbed: the facts of its steps
    yield lives
    lives.template.stop()


def test_drawn_lives(lives):
    class Machine(LifeMachine):
        pass

    Machine.lives = lives
    few = hypothesis.settings(
        max_examples=4,
        stateful_step_count=3,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(Machine, settings=few)


def test_a_resume_may_change_the_learning_rate(lives):
    """Megatron looks for the saved state of the optimizer by the largest rate too."""
    life = lives.begin()
    life.start(Settings(num_steps=6), Event("usr1", at=20))
    life.start(Settings(num_steps=6, lr=5e-4))


@pytest.mark.parametrize("kind", ["storm", "stop", "evaluation", "publish", "grader"])
def test_a_start_that_is_stopped_or_fails_costs_no_step(lives, kind):
    """In the background a checkpoint is being written meanwhile."""
    life = lives.begin()
    said = life.start(
        Settings(every=1, background=True, num_steps=6), Event(kind, at=20 if kind in ("storm", "stop") else 2)
    )
    assert said["happened"]
    life.start(Settings(num_steps=6, updates=1))


def test_a_reference_that_moves_is_found_again(lives):
    """It is the actor of at most two steps ago; a checkpoint of it stays as long as a start needs it."""
    settings = Settings(every=1, num_steps=6, updates=1, reference=2)
    undisturbed = lives.begin()
    undisturbed.start(settings)
    apart = [
        entry["policy/kl_reference"] for entry in read_metrics(undisturbed.folder) if "policy/kl_reference" in entry
    ]
    assert [value > 0 for value in apart] == [False, True] * 3
    assert undisturbed.saved() == [4, 5, 6]  # the reference of step 5 is that of 4
    for at in (3, 4):
        life = lives.begin()
        life.start(settings, Event("publish", at=at))
        life.start(settings)
    life = lives.begin()
    life.start(replace(settings, every=25), Event("publish", at=5))
    assert life.saved() == [4, 5]


def test_a_record_whose_checkpoints_are_gone_stays(lives):
    life = lives.begin()
    life.start(Settings(every=2))
    life.lose()
    life.start(Settings(num_steps=6))  # refuses
    life.accept()
    life.start(Settings(num_steps=6))


def test_a_rank_that_is_killed_starts_again_beside_the_other(lives):
    life = lives.begin()
    life.start(Settings(every=1, world=2), Event("kill rank", at=40, rank=1))


def test_a_short_outage_of_a_replica_s_disk_leaves_its_record_whole(lives):
    assert lives.begin().start(Settings(world=2), Event("record", at=6, rank=1))["happened"]
