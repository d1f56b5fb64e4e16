"""What goes wrong during `megagrpo run`: engines die, rewards fail, a disk is full. Nothing is left behind."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_megagrpo import Job, assert_agrees, assert_same_run, engine, megagrpo, metrics, rollouts, write_experiment

from megagrpo.checkpoint.folder import latest
from megagrpo.checkpoint.save import RunIdentity, check
from megagrpo.mesh import make_mesh

NUM_STEPS = 4
SAMPLES = 32  # of a step
# Access logs tell from outside where an engine is; small buckets make an update of the weights long enough to be met.
WATCHED = {
    "rollout": {"deterministic": True, "extra_args": ["--log-level-http", "info"]},
    "weights": {"bucket_mb": 0.02},
}


@pytest.mark.slow  # CI kills them in test_soak.py, and looks at their weights in test_exchange.py
def test_engines_killed_during_a_rollout_and_during_an_update(long_run):
    """Every group arrives, with the samples of the undisturbed run; the weights are proved after each restart."""
    folder = long_run[0].parent / "killed"
    config = write_experiment(folder, **WATCHED, train={"num_steps": NUM_STEPS})
    with Job("run", config) as job:
        job.wait_for_step(1)
        first = kill_engine(job, folder, during_rollout)
        job.wait_for_step(2)
        second = kill_engine(job, folder, during_update)
        job.succeed()
    assert second["pid"] != first["pid"] and second["incarnation"] == 2
    deaths = [line for line in (folder / "logs" / "service.log").read_text().splitlines() if "engine-0 died" in line]
    # of the second the trainers may know before the supervisor looks
    found = ("killed by signal 9", "a trainer lost it in the middle of an update of its weights")
    assert len(deaths) == 2 and found[0] in deaths[0] and any(words in deaths[1] for words in found), deaths
    assert_same_run(folder, long_run[0], NUM_STEPS)
    entries = metrics(folder)
    assert_agrees(folder)
    assert max(entries[step]["publish/restart"] for step in (2, 3, 4)) > 1, "one update waited for an engine"


def during_rollout(log: str, samples: int = SAMPLES) -> bool:
    """The engine computes, and some samples of the step are not answered."""
    since = log.rpartition("POST /pause_generation")[2]
    return "Prefill batch" in since and since.count("POST /generate") < samples


def during_update(log: str) -> bool:
    """The session in which weights come is open; the next one proves them."""
    since = log.rpartition("POST /pause_generation")[2]
    return since.count("POST /begin_weight_update") == 1 and "POST /end_weight_update" not in since


def kill_engine(job: Job, folder: Path, now: Callable[[str], bool]) -> dict:
    """SIGKILL the engine when its log shows that moment: it is stopped first, and goes on if the moment has passed."""
    log, victim = folder / "logs" / "engine-0.node-0.log", engine(folder)
    begin = log.stat().st_size

    def killed() -> bool:
        def is_now() -> bool:
            return now(log.read_bytes()[begin:].decode(errors="replace"))

        if not is_now():
            return False
        os.kill(victim["pid"], signal.SIGSTOP)
        time.sleep(0.05)  # what it wrote before
        if is_now():
            os.kill(victim["pid"], signal.SIGKILL)
            return True
        os.kill(victim["pid"], signal.SIGCONT)
        return False

    job.wait_for(killed, now.__name__, 300, poll_s=0.002)
    return victim


def test_rewards_that_fail_are_no_zeros_and_too_many_end_the_run(experiments):
    """The grader raises, hangs, returns NaN or scores 5, by the response; later it always raises."""
    folder, flag = experiments / "rewards", experiments / "all_bad"
    reward = {"grader": "graders_of_tests:sometimes_bad", "timeout_s": 4.0}
    # three kinds of eight are bad, so that more than half of a step's samples may be, now and then
    config = write_experiment(folder, reward=reward, train={"num_steps": 500, "max_bad_fraction": 0.9})
    with Job("run", config) as job:
        job.wait_for_step(1)
        flag.touch()
        done = job.finish(300)
    assert done.status == 1
    assert done.stderr.count("\n") == 3, done.stderr
    assert "of 32 rewards of this step are errors or timeouts, more than train.max_bad_fraction 0.9" in done.stderr
    assert "graders_of_tests:sometimes_bad raised KeyError: 'no such column'" in done.stderr
    samples = [sample for group in rollouts(folder)[1] for sample in group["samples"]]
    bad = {0: "error", 1: "timeout", 2: "error"}
    expected = [bad.get(sum(map(ord, sample["text"])) % 8, "score") for sample in samples]
    assert [sample["outcome"]["status"] for sample in samples] == expected
    assert set(expected) == {"error", "timeout", "score"}
    assert all(sample["reward"] == (5.0 if sample["outcome"]["status"] == "score" else None) for sample in samples)
    entry = metrics(folder)[1]
    assert entry["reward/mean"] == 5.0 and entry["reward/min"] == 5.0
    assert entry["reward/error_fraction"] == expected.count("error") / SAMPLES
    assert entry["reward/timeout_fraction"] == expected.count("timeout") / SAMPLES
    kept = [p.name for p in (folder / "checkpoints").iterdir()]
    assert kept == [f"step_{max(metrics(folder)):06}"], "the learned weights are saved"


@pytest.mark.slow  # tests/dist/test_checkpoint_damage.py fills a disk under two ranks
def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(long_run):
    """The second checkpoint does not fit. The first stays whole, nothing half-written lies beside it."""
    folder = long_run[0].parent / "full"
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    size = sum(f.stat().st_size for f in latest(long_run[0] / "checkpoints").rglob("*") if f.is_file())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.5 * size)}", "tmpfs", str(checkpoints)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system can only be mounted by root")
    try:
        done = megagrpo("run", write_experiment(folder, checkpoint={"every": 1}), timeout_s=400)
        assert done.status == 1
        assert f"checkpoint {checkpoints / 'step_000002'}" in done.stderr
        assert "could not write, 0 MiB are free there" in done.stderr
        assert "Traceback" not in done.stderr and done.stderr.count("\n") <= 6, done.stderr
        assert [p.name for p in checkpoints.iterdir()] == ["step_000001"]
        saved = json.loads((checkpoints / "step_000001" / "state.json").read_text())
        identity = RunIdentity(saved["identity"], saved["layout"])
        check(checkpoints / "step_000001", identity, make_mesh(0, 1, torch.device("cpu"), 60.0))
    finally:
        subprocess.run(["umount", "-l", str(checkpoints)], check=True)
