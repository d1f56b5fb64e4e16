"""Trainers on two hosts and engines on two others, each with an address of its own; links that are cut and healed."""

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from host_run import SERVICE, HostRun
from netns_hosts import NEEDED, Hosts, available
from ray_nodes import RayNodes
from run_megagrpo import assert_agrees, assert_same_run, prepared, run_experiment, step_after_saved, write_experiment

from megagrpo.cluster.supervise import ALONE, torchrun
from megagrpo.system.environment import child_environment
from megagrpo.system.stop_request import ENDED, STOPPED
from megagrpo.tools.stop import stop

pytestmark = [pytest.mark.skipif(not available(), reason=NEEDED), pytest.mark.timeout(1800)]
TRAINERS, ENGINES = (1, 2), (3, 4)
CUT_S = 20.0
PARALLEL = {"tp": 2, "ep": 1}
ROLLOUT = {"deterministic": True, "num_engines": 2, "host": "eth0", "start_timeout_s": 600}


def started(hosts: Hosts, nodes: RayNodes, config: Path) -> HostRun:
    """Processes as launch/ starts them on every host: Ray and, on the first, `serve` for the engines; torchrun."""
    run = HostRun(hosts, config, nodes.token)
    for number in ENGINES:
        nodes.start(number)
    run.start(SERVICE, 3, ["serve", str(config), "--ray-address", nodes.address])
    start_trainers(run)
    return run


def start_trainers(run: HostRun) -> None:
    for number in TRAINERS:
        command = ["train", str(run.config), "--nnodes=2", f"--node-rank={number - 1}"]
        run.start(
            f"trainer-{number}", number, [*command, f"--master-addr={run.hosts.address(1)}", "--master-port=29500"]
        )


@pytest.fixture
def hosts():
    short = TemporaryDirectory(prefix="mgr-", ignore_cleanup_errors=True)  # Unix socket paths end at 107 characters
    with short as folder, Hosts(4) as hosts, RayNodes(Path(folder), hosts.command, hosts.address) as nodes:
        yield hosts, nodes


@pytest.fixture(scope="module")
def experiments(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("hosts"))


def one_host(experiments: Path, num_steps: int) -> Path:
    """The folder of the same run on this machine, with one engine."""
    folder = experiments / f"one-{num_steps}"
    if not folder.exists():
        rollout, train = {"deterministic": True}, {"num_steps": num_steps}
        run_experiment(folder, 600, actor={"parallel": PARALLEL}, rollout=rollout, train=train)
    return folder


def assert_as_on_one_host(run: HostRun, experiments: Path, num_steps: int) -> None:
    assert_same_run(run.folder, one_host(experiments, num_steps), num_steps)
    assert_agrees(run.folder)


@pytest.mark.verifies(
    "runs", "trainers on two hosts, engines on two others (network namespaces) compute what one host does"
)
@pytest.mark.slow
def test_four_hosts_compute_what_one_does(hosts, experiments):
    """Same rewards, losses and gradients in the same bits, though tensors, prompts and weights cross links."""
    sections = {"actor": {"parallel": PARALLEL}, "rollout": ROLLOUT, "train": {"num_steps": 2}}
    with started(*hosts, write_experiment(experiments / "four", **sections)) as run:
        run.finish()
    assert_as_on_one_host(run, experiments, 2)
    served = {line.split("http://")[1].split(":")[0] for line in (run.end()).splitlines() if " is up at " in line}
    assert served == {hosts[0].address(number) for number in ENGINES}


@pytest.mark.verifies("runs", "a host's links cut for 20 s: the undisturbed run")
@pytest.mark.slow
@pytest.mark.parametrize("number", [4, 2], ids=["an-engine's", "a-trainer's"])
def test_a_link_is_cut_and_healed(hosts, experiments, number):
    """Packets are lost for 20 s without a notice. The run ends as the undisturbed one."""
    steps, folder = 8, experiments / f"cut-{number}"
    actor = {"parallel": PARALLEL, "max_restarts": 3}
    config = write_experiment(folder, actor=actor, rollout=ROLLOUT, train={"num_steps": steps}, checkpoint={"every": 1})
    with started(*hosts, config) as run:
        run.wait_for_step(2)
        hosts[0].cut(number)
        time.sleep(CUT_S)
        hosts[0].heal(number)
        run.finish()
    assert_as_on_one_host(run, experiments, steps)


@pytest.mark.slow
def test_ctrl_c_on_one_host_and_stop_save_on_both(hosts, experiments):
    """What goes on is the run that nobody stopped; nothing but the stops is saved."""
    steps, folder = 8, experiments / "stopped"
    config = write_experiment(
        folder, actor={"parallel": PARALLEL}, rollout=ROLLOUT, train={"num_steps": steps}, checkpoint={"every": 0}
    )
    with started(*hosts, config) as run:
        stops = ((lambda: run.interrupt("trainer-2"), STOPPED), (lambda: stop(folder, now=False), ENDED))
        for asks, status in stops:
            run.wait_for_step(step_after_saved(folder))
            asks()
            run.finish(status=status)
            start_trainers(run)
        run.finish()
    assert_as_on_one_host(run, experiments, steps)


def test_ranks_meet_on_a_machine_whose_name_does_not_resolve(tmp_path: Path):
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    (tmp_path / "rank.py").write_text(
        "import os\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "dist.barrier()\nos.write(1, b'met\\n')\n"  # print writes the end of a line separately
    )
    renamed = 'hostname gpu-node-17; mount --bind "$0/hosts" /etc/hosts; exec "$@"'
    words = [sys.executable, "-W", "ignore", *torchrun(2), *ALONE, str(tmp_path / "rank.py")]
    env = child_environment({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"})  # as a launch sets it
    command = ["unshare", "--uts", "--mount", "sh", "-c", renamed, str(tmp_path), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["met", "met"], done.stderr
