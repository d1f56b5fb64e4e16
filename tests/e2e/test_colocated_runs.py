"""Colocated engines: they sleep while the actor trains, and nothing that is sampled or learned differs for it."""

import os
import signal
from pathlib import Path

import pytest
from run_megagrpo import (
    LONG_RUN,
    Job,
    assert_agrees,
    assert_same_run,
    engine,
    run_experiment,
    trainer,
    write_experiment,
)

pytestmark = pytest.mark.verifies("runs", "colocated engines: the run of engines apart, bit by bit")

NUM_STEPS = 4  # of the session's ten undisturbed ones, whose engine has the other way of getting weights
COLOCATED = LONG_RUN | {
    "train": LONG_RUN["train"] | {"num_steps": NUM_STEPS},
    "rollout": LONG_RUN["rollout"] | {"colocate": True},
    "weights": {"transport": "ipc", "bucket_mb": 0.05},
}


def killed_in_its_sleep(job: Job, folder: Path, step: int, whose: str) -> None:
    """SIGKILL the engine or trainer rank 1 after step `step`, while rank 1 is held so that the engine stays asleep."""
    job.wait_for_step(step)

    def killed() -> bool:
        held, victim = trainer(job, 1), engine(folder)
        if held is None or victim is None or victim["state"] != "asleep":
            return False
        held.suspend()
        if engine(folder)["state"] != "asleep":  # the moment has passed
            held.resume()
            return False
        if whose == "engine":
            os.kill(victim["pid"], signal.SIGKILL)
            job.wait_for(lambda: engine(folder)["state"] == "dead", "the supervisor to see it", 60)
            held.resume()
        else:
            held.kill()
        return True

    job.wait_for(killed, f"an engine asleep after step {step}", 300, poll_s=0.002)


def test_the_same_bits_as_beside_the_trainers(long_run):
    folder = long_run[0].parent / "colocated"
    run_experiment(folder, **COLOCATED)
    assert_same_run(folder, long_run[0], NUM_STEPS)
    assert_no_complaint(folder)


@pytest.mark.slow
def test_whoever_is_killed_in_its_sleep_comes_back(long_run):
    folder = long_run[0].parent / "killed_asleep"
    with Job("run", write_experiment(folder, **COLOCATED)) as job:
        killed_in_its_sleep(job, folder, 1, "engine")
        killed_in_its_sleep(job, folder, 2, "trainer")
        done = job.succeed()
    log = (folder / "logs" / "service.log").read_text()
    assert log.count("engine-0 died: ") == 1  # the supervisor sees it, or trainers who were about to wake it
    assert "restarted all ranks (restart 1 of " in done.stdout
    assert_same_run(folder, long_run[0], NUM_STEPS)
    assert_no_complaint(folder)


def assert_no_complaint(folder: Path) -> None:
    """Engines were asked what they allow, in the right order, and computed what the trainers do."""
    for log in (folder / "logs").glob("engine-*.log"):
        assert "Scheduler hit an exception" not in log.read_text()
    assert_agrees(folder)
