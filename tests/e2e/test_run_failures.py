"""What goes wrong during `megagrpo run`: rewards that fail; and how an engine is killed at a moment of a run."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from run_megagrpo import Job, engine, metrics, rollouts, write_experiment

SAMPLES = 32  # of a step
# Access logs tell from outside where an engine is; small buckets make an update of the weights long enough to be met.
WATCHED = {"rollout": {"deterministic": True, "sglang": {"log_level_http": "info"}}, "weights": {"bucket_mb": 0.02}}


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


@pytest.mark.slow
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
