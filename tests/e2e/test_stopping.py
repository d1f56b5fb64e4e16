"""Ctrl-C, `megagrpo stop` and `megagrpo status` of a run: nothing is lost, and what goes on is the
run that nobody stopped."""

import signal

import pytest
from run_megagrpo import LONG_RUN, Job, assert_same_run, megagrpo, step_after_saved, write_experiment

from megagrpo.checkpoint.folder import finished_checkpoints
from megagrpo.system.stop_request import ENDED, STOPPED

NUM_STEPS = LONG_RUN["train"]["num_steps"]
LIMIT_S = 500.0


@pytest.mark.verifies(
    "runs",
    "the first Ctrl-C and `megagrpo stop` save, and end with 85 and 86; on one machine, two hosts, "
    "under Slurm (no requeue after 86); what goes on is the undisturbed run",
    "cluster/test_hosts.py",
    "cluster/test_slurm.py",
)
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ctrl_c_then_stop_then_to_the_end(long_run):
    folder = long_run[0].parent / "stopped"
    # saves at its end alone: what is on disk was saved because it was asked to stop
    sections = LONG_RUN | {"checkpoint": {"every": 0, "keep": 20}, "eval": None}
    config = write_experiment(folder, **sections)
    for begun, (asks, status) in enumerate(
        (
            (lambda: megagrpo("stop", str(folder), timeout_s=60), ENDED),
            (lambda: job.process.send_signal(signal.SIGINT), STOPPED),
        )
    ):
        met = step_after_saved(folder)
        with Job("run", config) as job:
            job.wait_for_step(met, LIMIT_S)
            asks()
            done = job.finish(LIMIT_S)
        assert done.status == status and "saved after step" in done.stderr, done
        assert len(finished_checkpoints(folder / "checkpoints")) == begun + 1
    said = megagrpo("status", str(folder), timeout_s=60).stdout
    assert f" of {NUM_STEPS}, " in said and "no process trains into this folder" in said
    done = megagrpo("run", config, timeout_s=LIMIT_S)
    assert done.status == 0, done.stderr
    assert_same_run(folder, long_run[0], NUM_STEPS)
    again = megagrpo("run", config, timeout_s=60)
    assert again.status == 0 and f"{NUM_STEPS} of {NUM_STEPS} steps are done" in again.stdout
