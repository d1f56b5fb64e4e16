"""Engines on the trainers' hosts: two network namespaces with two ranks each, an engine inside one or over both.

Whatever is killed in whatever phase, the run ends as one of the same layout whose engine has a place of its own.
"""

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from host_run import HostRun
from netns_hosts import NEEDED, Hosts, available
from run_megagrpo import assert_agrees, assert_same_run, engine, metrics, prepared, run_experiment, write_experiment

from tests.experiments import until

pytestmark = [
    pytest.mark.skipif(not available(), reason=NEEDED),
    pytest.mark.timeout(2400),
    pytest.mark.verifies(
        "runs",
        "colocated engines over two hosts: same bits, also killed in [four phases](faults.md#colocated-over-two-hosts)",
    ),
]
PARALLEL = {"tp": 2, "pp": 2, "ep": 1}  # a stage on each host: half of the weights lie on the other one
ACTOR = {"world_size": 4, "parallel": PARALLEL, "device": "cpu", "max_restarts": 20, "deadline_s": 1200}
ROLLOUT = {"deterministic": True, "tp": 2, "start_timeout_s": 600, "max_restarts": 20}
PHASES = ("asleep", "waking", "publishing", "sampling")
NUM_STEPS = 8  # under faults


class ColocatedRun(HostRun):
    """`megagrpo run` on each of two hosts."""

    def __init__(self, hosts: Hosts, config: Path):
        super().__init__(hosts, config, {"RAY_AUTH_TOKEN": "t" * 32})
        for number in (1, 2):
            self.start_host(number)

    def start_host(self, number: int) -> None:
        words = ["run", str(self.config), "--nnodes=2", f"--node-rank={number - 1}"]
        words += [f"--master-addr={self.hosts.address(1)}", "--master-port=30000"]
        self.start(f"host{number}", number, words)

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


@pytest.fixture(scope="module")
def experiments(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("colocated"))


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


@pytest.mark.slow
@pytest.mark.parametrize(("across", "steps"), [(1, 30), (2, 30)])
def test_the_same_bits_as_apart_and_the_same_bytes_between_hosts(experiments, across, steps):
    config = colocated(experiments / f"on-{across}-{steps}", steps, across)
    with Hosts(2) as hosts, ColocatedRun(hosts, config) as run:
        run.finish()
    assert_same_run(run.folder, apart(experiments, steps), steps)
    assert_agrees(run.folder)
    publishes = [entry for step, entry in metrics(run.folder).items() if step]
    (between,) = {entry["publish/between_bytes"] for entry in publishes}
    assert 0 < between <= min(entry["publish/wire_bytes"] for entry in publishes)


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
            "node": lambda: lambda: run.kill("host2"),
            "launcher": lambda: lambda: run.kill("host1"),
        }
        for number, phase in enumerate(PHASES):
            run.wait_for_step(2 * number + 1)
            print(f"{whose} killed, {phase}: the engine was {run.in_phase(phase, victims[whose])}", flush=True)
            if whose == "launcher":  # the other host ends with a reason
                until(lambda: run.statuses()[1] is not None, 900, run.end)
                assert run.statuses()[1] == 1 and "megagrpo: " in run.log("host2").read_text(), run.end()
            for host in {"node": (2,), "launcher": (1, 2)}.get(whose, ()):
                run.start_host(host)
        run.finish()
    assert_same_run(run.folder, reference, NUM_STEPS)
    assert_agrees(run.folder)
