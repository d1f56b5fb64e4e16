"""Jobs of a real Slurm: to the end, pre-empted, out of time, cancelled, submitted again; the same run every time."""

import json
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from run_megagrpo import GRADERS, assert_agrees, assert_same_run, metrics, prepared, step_after_saved, write_experiment
from slurm_cluster import SlurmCluster, why_not

from megagrpo.rollout.control import ServiceControl
from megagrpo.system.environment import API_KEY, child_environment
from megagrpo.system.run_folder import RunFolder
from megagrpo.system.stop_request import ENDED, STOPPED
from megagrpo.tools.stop import stop
from tests.experiments import until

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.timeout(1500),
    pytest.mark.verifies(
        "runs",
        "Slurm's daemons on four nodes: one-node job, scancel; pre-emption, time limit, "
        "heterogeneous job, second submit, lost node",
    ),
]

NUM_STEPS = 8  # of the undisturbed run
END_S = 400  # a job, started again once
# Rewards as in run_megagrpo.py; while the file `slow` is there a step lasts seconds, long enough to be met.
SLOW_GRADER = """
def slow_digits(text, answer):
    time.sleep(0.15 * Path(__file__).with_name("slow").exists())
    return low_digits(text, answer)
"""
SECTIONS = {"reward": {"grader": "graders_of_tests:slow_digits"}, "checkpoint": {"keep": 20}}
SECTIONS |= {"rollout": {"deterministic": True, "host": "0.0.0.0"}}


@pytest.fixture(scope="module")
def slurm():
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def experiments(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("slurm"), GRADERS + SLOW_GRADER)


@pytest.fixture(scope="module")
def undisturbed(slurm, experiments) -> Path:
    """Everything on one node."""
    folder = experiments / "undisturbed"
    finish(slurm, submit(slurm, experiment(folder, NUM_STEPS), "--kind", "one-node"), folder)
    return folder


def experiment(folder: Path, num_steps: int, **sections) -> Path:
    return write_experiment(folder, **SECTIONS, **sections, train={"num_steps": num_steps})


def submit(slurm: SlurmCluster, config: Path, *options: str, limit: str = "20", prefix: str = "") -> int:
    env = slurm.env | {
        "MEGAGRPO_NODE_PREFIX": prefix,
        "PYTHONPATH": f"{config.parent}:{slurm.env['PYTHONPATH']}",
        "OMP_NUM_THREADS": "1",
    }
    words = ("submit", str(config), "--time", limit, *options)
    return int(on_login_node(env, *words, cwd=config.parent).split(";")[0])


def on_login_node(env: dict[str, str], *words: str, cwd: Path | None = None) -> str:
    """What a megagrpo command prints where a job's own variables are unknown."""
    command = [sys.executable, "-m", "megagrpo.cli", *words]
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def output(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((folder / "logs").glob("slurm-*.out")))


def finish(slurm: SlurmCluster, job: int, folder: Path, state: str = "COMPLETED") -> str:
    """Wait for the end of the job; returns what it printed. No process of it may be left."""
    assert slurm.wait(job, timeout_s=END_S) == state, output(folder)
    until(lambda: not processes_of(job), 30, lambda: f"left behind: {[found for found, _ in processes_of(job)]}", 0.2)
    return output(folder)


def processes_of(job: int) -> list[tuple[str, dict[str, str]]]:
    """All processes with the job's number in their environment, whatever their parent is now; and that environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environ = process.environ()
            if environ.get("SLURM_JOB_ID") == str(job) and process.status() != psutil.STATUS_ZOMBIE:
                found.append((f"{process.pid} {' '.join(process.cmdline())[:120]}", environ))
    return found


def wait_for(ready, what: str, folder: Path, timeout_s: float = END_S, poll_s: float = 0.2) -> None:
    until(ready, timeout_s, lambda: f"no {what} in {timeout_s} s\n{output(folder)}", poll_s)


def step_done(folder: Path, step: int = 1) -> bool:
    return (folder / "rollouts" / f"step_{step:06}.replica_0.jsonl").exists()


def saved_step(text: str) -> int:
    """After which step it was saved when it was asked to stop."""
    found = re.findall(r"stopped as requested, saved after step (\d+)", text)
    assert found, text
    return int(found[-1])


def test_one_node_trains_to_the_end(undisturbed):
    assert sorted(metrics(undisturbed)) == list(range(NUM_STEPS + 1)) and (undisturbed / "summary.md").exists()


@pytest.mark.slow
def test_a_preempted_job_goes_back_into_the_queue_and_is_the_same_run(slurm, experiments, undisturbed):
    """Two nodes train, one samples; a job of higher priority takes all nodes. No checkpoint but that of the stop."""
    folder, slow = experiments / "preempted", experiments / "slow"
    slow.touch()
    job = submit(slurm, experiment(folder, 500), "--trainer-nodes", "2", "--partition", "low")
    wait_for(lambda: step_done(folder), "step 1", folder)
    options = "--parsable --partition=high --nodes=4 --exclusive -o /dev/null --wrap=true"
    urgent = int(slurm.run("sbatch", *options.split()))
    wait_for(lambda: "back into the queue" in output(folder), "requeue", folder)
    slow.unlink()
    experiment(folder, NUM_STEPS)  # the job reads it again
    assert slurm.wait(urgent, timeout_s=120) == "COMPLETED"
    text = finish(slurm, job, folder)
    step = saved_step(text)
    assert 1 <= step < NUM_STEPS, "the test was not there in time"
    assert f"continues after step {step}" in text and slurm.job(job)["Restarts"] == "1"
    assert_same_run(folder, undisturbed, NUM_STEPS)


@pytest.mark.slow
def test_nodes_run_inside_a_root_file_system(slurm, experiments, undisturbed, tmp_path):
    """In place of an image: a folder with a file that the host has not, and the host's folders."""
    rootfs = tmp_path / "rootfs"
    rootfs.mkdir()
    (rootfs / "image-name").write_text("of-a-test")
    bound = []
    for folder in sorted(Path("/").iterdir()):
        if folder.is_symlink():
            (rootfs / folder.name).symlink_to(folder.readlink())
        elif folder.is_dir() and folder.name not in ("proc", "sys", "dev"):
            bound.append(str(folder))
    show = tmp_path / "show.sh"
    show.write_text('#!/bin/bash\necho "inside $(cat /image-name)"\nexec "$@"\n')
    show.chmod(0o755)
    enter = Path(__file__).parents[2] / "launch" / "container" / "enter_rootfs.sh"
    prefix = shlex.join([str(enter), str(rootfs), *bound, "--", str(show)])
    run = experiments / "rootfs"
    options = ("--trainer-nodes", "1", "--rollout-nodes", "1", "--srun=--label")
    job = submit(slurm, experiment(run, 2), *options, prefix=prefix)
    text = finish(slurm, job, run)
    assert text.count("0: inside of-a-test") == 2, "both steps, and each line has its task's number"
    assert_same_run(run, undisturbed, 2)


@pytest.mark.slow
def test_a_heterogeneous_job_and_a_second_submit(slurm, experiments, undisturbed):
    """Two engines on two nodes. The second submit waits for the first, then goes on from its checkpoint."""
    folder = experiments / "het"
    rollout = SECTIONS["rollout"] | {"num_engines": 2, "min_healthy_engines": 2}
    config = write_experiment(folder, **SECTIONS | {"rollout": rollout}, train={"num_steps": 3})
    nodes = ("--kind", "het", "--trainer-nodes", "2", "--rollout-nodes", "2")
    first = submit(slurm, config, *nodes)
    second = submit(slurm, config, *nodes, "--set", "train.num_steps=6")
    assert slurm.job(second)["JobState"] == "PENDING"
    finish(slurm, first, folder)
    assert "continues after step 3" in finish(slurm, second, folder)
    assert_same_run(folder, undisturbed, 6)
    assert_agrees(folder)


@pytest.mark.slow
def test_the_time_limit(slurm, experiments, undisturbed):
    """`megagrpo run` on one node: stopped before the limit, run again."""
    folder, slow = experiments / "limit", experiments / "slow"
    slow.touch()
    job = submit(slurm, experiment(folder, 500), "--kind", "one-node", "--grace-s", "90", limit="3")
    wait_for(lambda: "back into the queue" in output(folder), "requeue", folder)
    slow.unlink()
    experiment(folder, NUM_STEPS)
    text = finish(slurm, job, folder)
    assert slurm.job(job)["Restarts"] == "1" and f"continues after step {saved_step(text)}" in text
    ours, theirs = metrics(folder), metrics(undisturbed)
    for step in range(1, NUM_STEPS + 1):  # it may have more
        assert ours[step]["loss/total"] == theirs[step]["loss/total"]


@pytest.mark.slow
def test_a_job_that_is_stopped_is_saved_and_not_started_again(slurm, experiments, undisturbed):
    """Two nodes train, one samples; submitted again it is the same run."""
    folder, slow = experiments / "stopped", experiments / "slow"
    slow.touch()
    job = submit(slurm, experiment(folder, 500), "--trainer-nodes", "2")
    wait_for(lambda: step_done(folder), "step 1", folder)
    said = on_login_node(slurm.env, "status", str(folder))
    assert f"runs as Slurm job {job}" in said and " of 500, " in said, said
    said = on_login_node(slurm.env, "stop", str(folder))
    assert f"Slurm job {job} saves after its step and ends" in said, said
    step = saved_step(finish(slurm, job, folder, "FAILED"))
    ended = slurm.job(job)
    assert (ended["ExitCode"], ended["Restarts"]) == (f"{ENDED}:0", "0")
    slow.unlink()
    again = submit(slurm, experiment(folder, NUM_STEPS), "--trainer-nodes", "2")
    assert f"continues after step {step}" in finish(slurm, again, folder)
    assert_same_run(folder, undisturbed, NUM_STEPS)
    assert "no process trains into this folder" in on_login_node(slurm.env, "status", str(folder))


def test_a_job_that_is_stopped_at_once_leaves_nothing_behind(slurm, experiments):
    folder = experiments / "cancelled"
    job = submit(slurm, experiment(folder, 500), "--trainer-nodes", "2")
    wait_for(lambda: step_done(folder), "step 1", folder)
    assert len(processes_of(job)) > 10
    on_login_node(slurm.env, "stop", "--now", str(folder))  # by scancel
    finish(slurm, job, folder, "CANCELLED")


@pytest.mark.slow
def test_engines_on_the_trainers_nodes(slurm, experiments, undisturbed):
    """Two nodes, an engine of two ranks over both; asked to stop, it goes back into the queue and on."""
    folder, slow = experiments / "colocated", experiments / "slow"
    slow.touch()
    rollout = SECTIONS["rollout"] | {"colocate": True, "tp": 2, "nodes_per_engine": 2}
    sections = SECTIONS | {"rollout": rollout, "weights": {"transport": "ipc"}}
    job = submit(slurm, write_experiment(folder, **sections, train={"num_steps": 500}), "--trainer-nodes", "2")
    wait_for(lambda: step_done(folder), "step 1", folder)
    assert slurm.job(job)["NumNodes"] == "2"
    slurm.run("scancel", "--batch", "--signal=USR1", str(job))
    wait_for(lambda: "back into the queue" in output(folder), "requeue", folder)
    slow.unlink()
    write_experiment(folder, **sections, train={"num_steps": NUM_STEPS})
    text = finish(slurm, job, folder)
    assert f"continues after step {saved_step(text)}" in text and slurm.job(job)["Restarts"] == "1"
    # an engine of two ranks sums in another order than one of one rank
    assert_agrees(folder)
    assert sorted(metrics(folder)) == list(range(NUM_STEPS + 1))


@pytest.mark.slow
def test_a_node_is_lost_in_any_phase(slurm, experiments):
    """The second of two colocated nodes vanishes: Slurm puts the job back into the queue, and the run goes on."""
    rollout = SECTIONS["rollout"] | {"colocate": True, "tp": 2, "nodes_per_engine": 2}
    sections = SECTIONS | {"rollout": rollout, "weights": {"transport": "ipc"}, "train": {"num_steps": NUM_STEPS}}
    sections |= {"checkpoint": {"every": 1, "keep": 20}}
    folder, reference, slow = experiments / "lost", experiments / "kept", experiments / "slow"
    finish(slurm, submit(slurm, write_experiment(reference, **sections), "--trainer-nodes", "2"), reference)
    slow.touch()
    job = submit(slurm, write_experiment(folder, **sections), "--trainer-nodes", "2")
    for lost, phase in enumerate(("sampling", "asleep", "waking")):
        wait_for((folder / "checkpoints" / f"step_{2 * lost + 1:06}").exists, "checkpoint", folder)
        nodes = slurm.run("scontrol", "show", "hostnames", slurm.job(job)["NodeList"]).split()
        wait_for_engine(folder, job, phase)
        slurm.lose_node(nodes[1])
        wait_for(partial(was_restarted, slurm, job, lost + 1), f"requeue after a loss while {phase}", folder)
        slurm.start_node(nodes[1])
    slow.unlink()
    assert finish(slurm, job, folder).count("continues after step") == 3
    assert_same_run(folder, reference, NUM_STEPS)
    assert_agrees(folder)


def was_restarted(slurm: SlurmCluster, job: int, times: int) -> bool:
    return slurm.job(job)["Restarts"] == str(times)


def wait_for_engine(folder: Path, job: int, phase: str) -> None:
    """Until engine-0 is in the phase: sampling, asleep or waking."""
    keys = {environ.get(API_KEY) for _, environ in processes_of(job)} - {None}  # made anew at each start of the job
    control = ServiceControl(json.loads(RunFolder(folder).service.read_text())["url"], str(keys.pop()))

    def state() -> str:
        return control.status().engines[0].state

    wait_for(lambda: state() == "ready", "engine that samples", folder)
    if phase != "sampling":
        wait_for(lambda: state() == "asleep", "engine asleep", folder, poll_s=0.005)
    if phase == "waking":
        wait_for(lambda: state() != "asleep", "engine that wakes", folder, poll_s=0.002)


@pytest.mark.slow
def test_the_same_launchers_without_slurm(experiments, undisturbed):
    """Two trainer nodes and a rollout node by hand; TERM or Ctrl-C at one of them and `megagrpo
    stop` elsewhere stop both, started again they go on."""
    stops = [
        (lambda folder, second: second.process.send_signal(signal.SIGTERM), STOPPED),
        (lambda folder, second: second.process.send_signal(signal.SIGINT), STOPPED),
        (lambda folder, second: stop(folder, now=False), ENDED),
        (None, 0),
    ]
    folder, slow = experiments / "by_hand", experiments / "slow"
    slow.touch()
    with Node("rollout", experiment(folder, 500), "127.0.0.9", {"MASTER_PORT": "31500"}):
        for number, (asks, status) in enumerate(stops):
            first_node = {"MASTER_ADDR": "127.0.0.7", "NNODES": "2", "MASTER_PORT": str(31700 + number)}
            met = step_after_saved(folder)
            if asks is None:
                slow.unlink()
            config = experiment(folder, NUM_STEPS if asks is None else 500)
            first = Node("torchrun", config, "127.0.0.7", first_node, 0)
            with first, Node("torchrun", config, "127.0.0.8", first_node, 1) as second:
                if asks is not None:
                    wait_for(partial(step_done, folder, met), f"step {met}", folder)
                    asks(folder, second)
                ended = [node.process.wait(END_S) for node in (first, second)]
                logs = first.log.read_text() + second.log.read_text()
                assert ended == [status, status], logs
    assert_same_run(folder, undisturbed, NUM_STEPS)


class Node:
    """launch/KIND_node.sh running; `first`: variables of node 0."""

    def __init__(self, kind: str, config: Path, address: str, first: dict[str, str], rank: int = 0):
        script = Path(__file__).parents[2] / "launch" / f"{kind}_node.sh"
        own = {"NODE_ADDR": address, "NODE_RANK": str(rank), "MASTER_ADDR": address, "MEGAGRPO_VENV": sys.prefix}
        self.log = config.with_suffix(f".{kind}-{rank}.log")
        command, env = (["bash", str(script), str(config)], child_environment(own | first, [str(config.parent)]))
        self.process = subprocess.Popen(command, env=env, stdout=self.log.open("ab"), stderr=subprocess.STDOUT)

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *exc_info) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
