"""Trainers on two hosts and engines on two others, each with an address of its own; links that are cut and healed."""

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from netns_hosts import NEEDED, Hosts, available
from ray_nodes import RayNodes
from run_megagrpo import GRADERS, assert_agrees, assert_same_run, make_inputs, run_experiment, write_experiment

from megagrpo.cluster.supervise import ALONE, torchrun
from megagrpo.system.environment import child_environment
from megagrpo.system.processes import spawn, stop_tree
from tests.experiments import until

pytestmark = [pytest.mark.skipif(not available(), reason=NEEDED), pytest.mark.timeout(1800)]
TRAINERS, ENGINES = (1, 2), (3, 4)
CUT_S = 20.0
PARALLEL = {"tp": 2, "ep": 1}
ROLLOUT = {"deterministic": True, "num_engines": 2, "host": "eth0", "start_timeout_s": 600}


class Run:
    """Processes as launch/ starts them on every host: Ray and, on the first, `serve` for the engines; torchrun."""

    def __init__(self, hosts: Hosts, nodes: RayNodes, config: Path):
        self.folder = config.with_suffix("")
        self._hosts, self._token = hosts, nodes.token
        for number in ENGINES:
            nodes.start(number)
        self._children = [self._start(3, "serve.log", ["serve", str(config), "--ray-address", nodes.address])]
        for number in TRAINERS:
            command = ["train", str(config), "--nnodes=2", f"--node-rank={number - 1}"]
            command += [f"--master-addr={hosts.address(1)}", "--master-port=29500"]
            self._children.append(self._start(number, f"trainer-{number}.log", command))
        self.service, *self.trainers = self._children

    def _start(self, number: int, log: str, command: list[str]) -> subprocess.Popen:
        python = [sys.executable, "-W", "ignore", "-m", "megagrpo.cli", *command]
        env = child_environment({"OMP_NUM_THREADS": "1"} | self._token, [str(self.folder.parent)])
        return spawn(self._hosts.command(number, python), env, self.folder.with_name(f"{self.folder.name}-{log}"))

    def wait_for_step(self, step: int, timeout_s: float = 600.0) -> None:
        path = self.folder / "rollouts" / f"step_{step:06}.replica_0.jsonl"
        ended = lambda: any(child.poll() is not None for child in self._children)  # noqa: E731
        until(lambda: path.exists() or ended(), timeout_s, self.end, 0.1)
        assert not ended(), self.end()

    def finish(self, timeout_s: float = 600.0) -> None:
        until(lambda: all(trainer.poll() is not None for trainer in self.trainers), timeout_s, self.end, 0.1)
        assert not any(trainer.returncode for trainer in self.trainers), self.end()

    def end(self) -> str:
        """The last lines of every log."""
        logs = [*self.folder.parent.glob(f"{self.folder.name}-*.log"), *self.folder.glob("logs/*.log")]
        return "\n".join(f"== {log}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exc_info) -> None:
        for child in self._children:
            stop_tree(child.pid, 30.0 if child is self.service else 5.0)
            child.wait()


@pytest.fixture
def hosts():
    short = TemporaryDirectory(prefix="mgr-", ignore_cleanup_errors=True)  # Unix socket paths end at 107 characters
    with short as folder, Hosts(4) as hosts, RayNodes(Path(folder), hosts.command, hosts.address) as nodes:
        yield hosts, nodes


@pytest.fixture(scope="module")
def experiments(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "graders_of_tests.py").write_text(GRADERS)
    make_inputs(write_experiment(folder / "prepared"))
    return folder


def one_host(experiments: Path, num_steps: int) -> Path:
    """The folder of the same run on this machine, with one engine."""
    folder = experiments / f"one-{num_steps}"
    if not folder.exists():
        rollout, train = {"deterministic": True}, {"num_steps": num_steps}
        run_experiment(folder, 600, actor={"parallel": PARALLEL}, rollout=rollout, train=train)
    return folder


def assert_as_on_one_host(run: Run, experiments: Path, num_steps: int) -> None:
    assert_same_run(run.folder, one_host(experiments, num_steps), num_steps)
    assert_agrees(run.folder)


@pytest.mark.slow
def test_four_hosts_compute_what_one_does(hosts, experiments):
    """Same rewards, losses and gradients in the same bits, though tensors, prompts and weights cross links."""
    sections = {"actor": {"parallel": PARALLEL}, "rollout": ROLLOUT, "train": {"num_steps": 2}}
    with Run(*hosts, write_experiment(experiments / "four", **sections)) as run:
        run.finish()
    assert_as_on_one_host(run, experiments, 2)
    served = {line.split("http://")[1].split(":")[0] for line in (run.end()).splitlines() if " is up at " in line}
    assert served == {hosts[0].address(number) for number in ENGINES}


@pytest.mark.slow
@pytest.mark.parametrize("number", [4, 2], ids=["an-engine's", "a-trainer's"])
def test_a_link_is_cut_and_healed(hosts, experiments, number):
    """Packets are lost for 20 s without a notice. The run ends as the undisturbed one."""
    steps, folder = 8, experiments / f"cut-{number}"
    actor = {"parallel": PARALLEL, "max_restarts": 3}
    config = write_experiment(folder, actor=actor, rollout=ROLLOUT, train={"num_steps": steps}, checkpoint={"every": 1})
    with Run(*hosts, config) as run:
        run.wait_for_step(2)
        hosts[0].cut(number)
        time.sleep(CUT_S)
        hosts[0].heal(number)
        run.finish()
    assert_as_on_one_host(run, experiments, steps)


def test_ranks_meet_on_a_machine_whose_name_does_not_resolve(tmp_path: Path):
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    (tmp_path / "rank.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\nprint('met', flush=True)\n"
    )
    renamed = 'hostname gpu-node-17; mount --bind "$0/hosts" /etc/hosts; exec "$@"'
    words = [sys.executable, "-W", "ignore", *torchrun(2), *ALONE, str(tmp_path / "rank.py")]
    env = child_environment({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"})  # as a launch sets it
    command = ["unshare", "--uts", "--mount", "sh", "-c", renamed, str(tmp_path), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["met", "met"], done.stderr
