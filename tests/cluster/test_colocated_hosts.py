"""Engines on the trainers' hosts: two network namespaces with two ranks each, an engine inside one or over both.

Whatever is killed in whatever phase, the run ends as one of the same layout whose engine has a place of its own.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from netns_hosts import NEEDED, Hosts, available
from run_megagrpo import (
    GRADERS,
    assert_agrees,
    assert_same_run,
    engine,
    make_inputs,
    metrics,
    requests_by_phase,
    run_experiment,
    write_experiment,
)

from megagrpo.config.load import load_config
from megagrpo.planning.hardware import HARDWARE
from megagrpo.planning.publish_bytes import Cluster, cluster_of, forecast_publish
from megagrpo.planning.recordings import record_all
from megagrpo.system.environment import child_environment
from megagrpo.system.processes import process_tree, spawn, stop_tree
from tests.experiments import until

pytestmark = [pytest.mark.skipif(not available(), reason=NEEDED), pytest.mark.timeout(2400)]
PARALLEL = {"tp": 2, "pp": 2, "ep": 1}  # a stage on each host: half of the weights lie on the other one
ACTOR = {"world_size": 4, "parallel": PARALLEL, "device": "cpu", "max_restarts": 20}
ROLLOUT = {"deterministic": True, "tp": 2, "start_timeout_s": 600, "max_restarts": 20}
PHASES = ("asleep", "waking", "publishing", "sampling")
NUM_STEPS = 8  # under faults


class ColocatedRun:
    """`megagrpo run` on each of two hosts."""

    def __init__(self, hosts: Hosts, config: Path):
        self.folder, self._hosts, self._config = config.with_suffix(""), hosts, config
        self._children: dict[int, subprocess.Popen] = {}
        for number in (1, 2):
            self.start(number)

    def start(self, number: int) -> None:
        words = ["run", str(self._config), "--nnodes=2", f"--node-rank={number - 1}"]
        words += [f"--master-addr={self._hosts.address(1)}", "--master-port=30000"]
        env = child_environment({"OMP_NUM_THREADS": "1", "RAY_AUTH_TOKEN": "t" * 32}, [str(self.folder.parent)])
        command = self._hosts.command(number, [sys.executable, "-W", "ignore", "-m", "megagrpo.cli", *words])
        self._children[number] = spawn(command, env, self.log(number))

    def log(self, number: int) -> Path:
        return self.folder.with_name(f"{self.folder.name}-host{number}.log")

    def kill(self, number: int) -> None:
        """SIGKILL the launcher of a host; what it started ends with it."""
        tree = process_tree(self._children[number].pid)
        self._children[number].kill()
        self._children[number].wait()
        psutil.wait_procs(tree, 60)

    def statuses(self) -> list[int | None]:
        return [child.poll() for child in self._children.values()]

    def trainer(self, rank: int) -> psutil.Process | None:
        for child in self._children.values():
            for process in process_tree(child.pid):
                try:
                    words = process.cmdline()
                    ranked = "train" in words and "torch.distributed.run" not in words
                    if ranked and process.environ().get("RANK") == str(rank):
                        return process
                except psutil.NoSuchProcess:
                    continue
        return None

    def wait_for(self, ready, what: str, timeout_s: float = 400.0, poll_s: float = 0.01):
        """The first true value of ready(); both launchers must run until then."""

        def look():
            assert None in self.statuses(), f"ended before {what}: {self.end()}"
            return ready()

        return until(look, timeout_s, lambda: f"no {what} in {timeout_s} s\n{self.end()}", poll_s)

    def wait_for_step(self, step: int) -> None:
        path = self.folder / "rollouts" / f"step_{step:06}.replica_0.jsonl"
        self.wait_for(path.exists, f"step {step}", poll_s=0.1)

    def in_phase(self, phase: str, find: Callable[[], Callable[[], None]]) -> str:
        """Does what `find` returns once engine-0 is in the phase; returns its state then, as the service says it.

        In the order of a step: sampling, asleep, waking, publishing. `find` runs before the moment comes.
        """
        state = lambda: (engine(self.folder) or {}).get("state", "")  # noqa: E731
        self.wait_for(lambda: state() == "ready", "an engine that samples")
        if phase != "sampling":
            self.wait_for(lambda: state() == "asleep", "an engine asleep", poll_s=0.002)
        act, seen = find(), state()
        if phase in ("waking", "publishing"):
            seen = self.wait_for(lambda: (now := state()) != "asleep" and now, "an engine that wakes", poll_s=0.002)
        if phase == "publishing":
            time.sleep(0.05)
        act()
        return seen

    def finish(self, timeout_s: float = 900.0) -> None:
        until(lambda: None not in self.statuses(), timeout_s, self.end, 0.2)
        assert self.statuses() == [0, 0], self.end()

    def end(self) -> str:
        """The last lines of every log."""
        logs = [self.log(1), self.log(2), *self.folder.glob("logs/*.log")]
        return "\n".join(f"== {log}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def __enter__(self) -> "ColocatedRun":
        return self

    def __exit__(self, *exc_info) -> None:
        for child in self._children.values():
            stop_tree(child.pid, 15.0)
            child.wait()


@pytest.fixture(scope="module")
def experiments(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("colocated")
    (folder / "graders_of_tests.py").write_text(GRADERS)
    make_inputs(write_experiment(folder / "prepared"))
    return folder


def apart(experiments: Path, num_steps: int, **sections) -> Path:
    """The folder of the same run on this machine, whose engine gets its weights over process groups."""
    folder = experiments / f"apart-{num_steps}"
    if not folder.exists():
        sections = {"train": {"num_steps": num_steps}} | sections
        run_experiment(folder, 1200, actor=ACTOR, rollout=ROLLOUT, weights={"transport": "reshard"}, **sections)
    return folder


def colocated(folder: Path, num_steps: int, across: int = 2, **sections) -> Path:
    rollout = ROLLOUT | {"host": "eth0", "colocate": True, "nodes_per_engine": across}
    sections = {"train": {"num_steps": num_steps}} | sections
    weights = {"transport": "ipc", "bucket_mb": 0.05}
    return write_experiment(folder, actor=ACTOR, rollout=rollout, weights=weights, **sections)


def planned_between_bytes(config: Path, host: int) -> int:
    """Bytes between nodes by `megagrpo plan-weights`, with an engine of one node on that host."""
    experiment = load_config(config)
    cluster = cluster_of(experiment, 1, 2)
    assert cluster.trainers.tolist() == [0, 0, 1, 1] and cluster.carriers is not None
    if experiment.rollout.nodes_per_engine == 1 and host == 2:
        cluster = Cluster(cluster.trainers, np.array([[1, 1]]), np.array([[2, 3]]))
    (recorded,) = record_all([experiment])
    return forecast_publish(experiment, recorded, [cluster], HARDWARE["H100"].rates)[0][0].between_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("across", "steps"),
    [(1, 30), (2, 30)],
)
def test_the_same_bits_as_apart_and_no_byte_more_than_planned(experiments, across, steps):
    config = colocated(experiments / f"on-{across}-{steps}", steps, across)
    with Hosts(2) as hosts, ColocatedRun(hosts, config) as run:
        run.finish()
        said = (run.folder / "logs" / "service.log").read_text()
        (at,) = set(re.findall(r" is up at http://([\d.]+):", said))
        host = 1 + (at == hosts.address(2))
    assert_same_run(run.folder, apart(experiments, steps), steps)
    assert_agrees(run.folder)
    moved = {entry["publish/between_bytes"] for step, entry in metrics(run.folder).items() if step}
    assert moved == {planned_between_bytes(config, host)}


@pytest.mark.slow
def test_trainers_of_one_host_lend_to_an_engine_beside_that_of_another(experiments):
    """rollout.lend_trainers: the first host has the trainers and the lent engine, the second the engine of its own."""
    folder, steps = experiments / "lent", 3
    rollout = ROLLOUT | {"host": "eth0", "lend_trainers": 1, "max_running_requests": 4}
    weights = {"transport": "reshard", "bucket_mb": 0.05}
    config = write_experiment(folder, actor=ACTOR, rollout=rollout, weights=weights, train={"num_steps": steps})
    with Hosts(2) as hosts, ColocatedRun(hosts, config) as run:
        run.finish()
        said = (folder / "logs" / "service.log").read_text()
        assert f"engine-0 is up at http://{hosts.address(2)}:" in said, said
        assert f"engine-1 is up at http://{hosts.address(1)}:" in said, said
    assert_same_run(folder, apart(experiments, steps), steps)
    assert_agrees(folder)
    assert requests_by_phase(folder)["engine-1", "rollout"]


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["engine", "trainer", "node", "launcher"])
def test_whoever_is_killed_in_any_phase(experiments, whose):
    """An engine over both hosts, trainer rank 3, the second host, the first one with the service and the rendezvous."""
    sections = {"checkpoint": {"every": 1, "keep": 20}}
    reference = apart(experiments, NUM_STEPS, **sections)
    config = colocated(experiments / f"killed-{whose}", NUM_STEPS, **sections)
    with Hosts(2) as hosts, ColocatedRun(hosts, config) as run:
        victims = {
            "engine": lambda: psutil.Process((engine(run.folder) or {})["pid"]).kill,
            "trainer": lambda: run.trainer(3).kill,  # type: ignore[union-attr]
            "node": lambda: lambda: run.kill(2),
            "launcher": lambda: lambda: run.kill(1),
        }
        for number, phase in enumerate(PHASES):
            run.wait_for_step(2 * number + 1)
            print(f"{whose} killed, {phase}: the engine was {run.in_phase(phase, victims[whose])}", flush=True)
            if whose == "launcher":  # the other host ends with a reason
                until(lambda: run.statuses()[1] is not None, 900, run.end)
                assert run.statuses()[1] == 1 and "megagrpo: " in run.log(2).read_text(), run.end()
            for host in {"node": (2,), "launcher": (1, 2)}.get(whose, ()):
                run.start(host)
        run.finish()
    assert_same_run(run.folder, reference, NUM_STEPS)
    assert_agrees(run.folder)
