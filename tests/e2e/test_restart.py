"""A trainer rank dies by SIGKILL: all start again from the last checkpoint, and the run is the undisturbed one."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from run_megagrpo import LONG_RUN, Job, assert_agrees, assert_same_run, megagrpo, trainer, write_experiment
from test_run_failures import WATCHED, during_rollout, during_update

NUM_STEPS = 6


@pytest.mark.slow  # test_soak.py kills a rank too
def test_killed_in_an_update_of_the_weights_and_in_a_rollout(long_run):
    """First rank 0 amid giving weights to the engine, then rank 1. Steps after the checkpoint are made again."""
    folder = long_run[0].parent / "restarted"
    train = LONG_RUN["train"] | {"num_steps": NUM_STEPS}
    config = write_experiment(folder, **WATCHED, train=train, checkpoint={"every": 2, "keep": 5})
    with Job("run", config) as job:
        job.wait_for_step(3)
        first = kill_rank(job, folder, 0, during_update)
        again = lambda: (rank := trainer(job, 1)) and rank.create_time() > first.create_time() + 1  # noqa: E731
        job.wait_for(again, "the first restart", 300)
        kill_rank(job, folder, 1, during_rollout)
        done = job.succeed()
    assert "(restart 2 of 3)" in done.stdout and "continues after step 2" in done.stdout
    assert_same_run(folder, long_run[0], NUM_STEPS)
    assert_agrees(folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["step"] for line in lines if "loss/total" in line]
    assert losses == list(range(1, NUM_STEPS + 1)), "each step once"


def kill_rank(job: Job, folder: Path, rank: int, now) -> psutil.Process:
    """SIGKILL a trainer when the engine's log shows that moment."""
    log, victim = folder / "logs" / "engine-0.node-0.log", trainer(job, rank)
    begin = log.stat().st_size
    job.wait_for(lambda: now(log.read_bytes()[begin:].decode(errors="replace")), now.__name__, 300, poll_s=0.002)
    os.kill(victim.pid, signal.SIGKILL)
    return victim


def test_what_another_try_would_meet_again_is_not_tried_again(experiments, tmp_path):
    """torchrun knows no such difference: the launcher ends it when a rank says so."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt"\n')
    folder = experiments / "not_again"
    config = write_experiment(folder, actor={"max_restarts": 50})
    done = megagrpo("train", config, "--set", f"data.path={lines}", timeout_s=280)
    assert done.status == 1 and "lines.jsonl:2: broken JSON" in done.stderr, done
    tries = (folder / "logs" / "trainer.log").read_text().count("broken JSON")
    assert 0 < tries <= 6, f"{tries} of two ranks"  # they may have begun once more before the launcher saw it
