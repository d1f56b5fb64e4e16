"""Ray that does not start at once: its own limit of 30 s is fixed, and a machine may be busy for longer."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.service import ray_cluster, server
from tests import experiments

BUSY = Exception("The current node timed out during startup. This could happen because\nsome of the raylet failed")


class FakeRay:
    """Plays ray.init: fails so many times, each time leaving a process behind."""

    def __init__(self, monkeypatch, failures: int):
        self.failures, self.attempts, self.left = failures, [], []
        monkeypatch.setattr(ray, "init", self.init)
        monkeypatch.setattr(ray_cluster, "_PAUSE_S", 0.01)

    def init(self, **options) -> None:
        self.attempts.append(options)
        if len(self.attempts) <= self.failures:
            self.left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
            raise BUSY


def experiment(folder: Path, **rollout) -> ExperimentConfig:
    return experiments.experiment(output_dir=str(folder), rollout=rollout)


def test_ray_is_tried_again_and_failed_attempts_leave_nothing(tmp_path, monkeypatch):
    fake = FakeRay(monkeypatch, failures=2)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with ray_cluster.in_ray_cluster(experiment(tmp_path).rollout, None):
        folder = Path(fake.attempts[-1]["_temp_dir"])
        assert folder.is_dir() and len(fake.attempts) == 3
        assert all(process.wait(10) != 0 for process in fake.left), "a failed attempt left a process"
        assert other.poll() is None, "a process that was there before was ended"
    assert not folder.exists()
    other.kill()
    other.wait()


def test_the_service_gives_up_with_one_line(tmp_path, monkeypatch, capfd):
    fake, started = FakeRay(monkeypatch, failures=1000), time.monotonic()
    assert server.serve(experiment(tmp_path, start_timeout_s=1.0), tmp_path) == 1
    assert time.monotonic() - started < 30
    printed = capfd.readouterr()
    *tries, last = printed.out.splitlines()
    assert len(tries) == len(fake.attempts) - 1 and all("trying again" in line for line in tries)
    assert last.startswith("rollout service failed: Ray on ") and "The current node timed out during startup" in last
    assert f"in {len(fake.attempts)} attempt(s) within 1 s" in last and "raise rollout.start_timeout_s" in last
    assert "Traceback" not in printed.out + printed.err
    assert list(tmp_path.iterdir()) == [] and all(process.poll() is not None for process in fake.left)


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_a_given_address_is_joined_and_a_private_cluster_is_small(tmp_path, monkeypatch, address):
    fake = FakeRay(monkeypatch, failures=0)
    with ray_cluster.in_ray_cluster(experiment(tmp_path, num_engines=3).rollout, address):
        [options] = fake.attempts
    assert options["address"] == (address or "local")
    assert options.get("num_cpus") == (5 if address is None else None)
