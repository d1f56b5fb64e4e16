"""One machine's launcher: GPUs of trainers and engines, one run a folder, signals; children end with their parent."""

import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megagrpo import cli
from megagrpo.check.problems import finished
from megagrpo.cluster import machine, nodes
from megagrpo.cluster.lock import alone_in
from megagrpo.cluster.machine import _devices, run, write_experiment
from megagrpo.cluster.supervise import Child, Launch
from megagrpo.config.load import load_config
from megagrpo.config.schema import CheckpointConfig, ExperimentConfig
from megagrpo.loop.ranks import _write_report
from megagrpo.monitor.console import StepConsole
from megagrpo.system.environment import child_environment
from megagrpo.system.processes import end_of, is_live, last_lines, process_tree, spawn, stop_tree
from megagrpo.system.run_folder import RunFolder
from megagrpo.system.stop_request import ENDED, STOPPED, StopRequest
from megagrpo.tools.ranks import start as start_of_ranks
from megagrpo.tools.status import print_status
from megagrpo.tools.stop import stop
from tests import experiments
from tests.experiments import QUICKSTART, python, until


def experiment(transport: str) -> ExperimentConfig:
    sections = {"actor": {"world_size": 2}, "rollout": {"num_engines": 2, "tp": 2}, "weights": {"transport": transport}}
    return experiments.experiment(**sections)


def test_trainers_and_engines_have_gpus_of_their_own_or_too_few_are_refused():
    trainers, engines = _devices(experiment("broadcast"), ["7", "6", "5", "4", "3", "2"])
    assert trainers == {"CUDA_VISIBLE_DEVICES": "7,6"} and engines == {"CUDA_VISIBLE_DEVICES": "5,4,3,2"}
    assert _devices(experiment("broadcast"), []) == ({}, {"CUDA_VISIBLE_DEVICES": ""}), "a machine without GPUs"
    with pytest.raises(ValueError, match=r"2 trainer ranks .* and 4 engine ranks .* need 6 GPUs, and the node has 5"):
        _devices(experiment("broadcast"), list("01234"))
    assert _devices(experiment("disk"), list("01234")) == ({}, {}), "shared"


@pytest.mark.parametrize(
    ("variable", "gpus"),
    [
        ("-1", []), ("NoDevFiles", []), ("void", []), ("", []), ("0, 1", ["0", "1"]), ("2,-1,1", ["2"]),
        ("GPU-1a2b,MIG-3c", ["GPU-1a2b", "MIG-3c"]),
    ],
)  # fmt: skip
def test_gpus_are_visible_as_cuda_reads_the_variable(variable, gpus, monkeypatch):
    """-1 is how users hide them all; Slurm writes NoDevFiles into jobs without any."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert list(map(str.strip, machine.visible_gpus())) == gpus


def test_rays_folder_is_this_users_alone(tmp_path):
    (folder,) = nodes._private_folder(tmp_path / "mgr")
    assert nodes._private_folder(folder) == []  # of a start that was killed
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="must be this user's own folder, closed to others"):
        nodes._private_folder(folder)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="must be this user's own folder"):
        nodes._private_folder(tmp_path / "link")


def test_a_start_without_ports_leaves_rays_folder_to_the_service_that_has_them(tmp_path, monkeypatch):
    """A second service of this user on the node, with the default port."""
    folder = tmp_path / "mgr"
    monkeypatch.setattr(nodes, "Path", lambda name: folder if name.startswith("/tmp/mgr-") else Path(name))
    config = experiments.experiment(output_dir=str(tmp_path / "run"), rollout={"start_timeout_s": 0.5})
    monkeypatch.setattr(nodes, "_ray_command", lambda *_: ["false"])
    node = nodes.Node(0, 1, "127.0.0.1", "127.0.0.1", 30000)
    for others in (True, False):
        if others:
            folder.mkdir(mode=0o700)
        with Launch(config.run_folder, "serve", end=()) as launch, pytest.raises(ValueError, match="Ray did not start"):
            nodes._start_service(launch, config, node, {})
        assert folder.exists() == others
        if others:
            folder.rmdir()


def test_only_one_run_trains_into_a_folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    refused = pytest.raises(ValueError, match="output_dir .*run: another run trains into this folder")
    with alone_in(folder), alone_in(RunFolder(tmp_path / "other")), refused, alone_in(folder):
        pass
    with alone_in(folder):
        pass


def test_a_folder_that_cannot_be_made_is_named():
    with (
        pytest.raises(ValueError, match="output_dir /proc/none cannot be written: .*No such file"),
        alone_in(RunFolder(Path("/proc/none"))),
    ):
        pass


def test_a_requeued_job_waits_for_the_lock_of_a_node_that_died(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    holder = subprocess.Popen(["flock", str(tmp_path / ".lock"), "sleep", "1"])
    time.sleep(0.3)
    with alone_in(RunFolder(tmp_path)):
        assert holder.wait(5) == 0


def test_a_folder_without_permission_is_one_message(monkeypatch, capsys):
    def refused(args: object) -> int:
        raise PermissionError(13, "Permission denied", "/data/runs")

    monkeypatch.setattr("megagrpo.tools.doctor.run", refused)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == ("megagrpo doctor: [Errno 13] Permission denied: '/data/runs'\n")


def test_a_command_may_have_as_many_files_open_as_the_machine_allows():
    code = (
        "import resource, sys\nfrom megagrpo.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, "
        "resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "main(['view', 'none'])\nprint(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=child_environment())
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert int(done.stdout.split()[-1]) == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)), done


@pytest.mark.parametrize("rank, own", [(1, "10.0.0.9"), (0, "node0")])
def test_a_node_waits_until_the_name_of_the_first_one_is_known(rank, own, monkeypatch):
    """To the first one itself too: Kubernetes makes its name only when the pod runs."""
    answers = [socket.gaierror(), socket.gaierror(), "10.0.0.9"]

    def route_address(host: str, port: int) -> str:
        if isinstance(answer := answers.pop(0), OSError):
            raise answer
        return answer

    monkeypatch.setattr(nodes, "route_address", route_address)
    later = nodes.Node(rank, 2, None, "node0", 29500)
    assert later.own_address == own and not answers
    assert later.own_address == own, "asked for once"
    answers += [socket.gaierror()] * 9
    monkeypatch.setattr(nodes, "_JOIN_S", 0.5)
    with pytest.raises(ValueError, match="--master-addr node0: no such name within 0.5 s"):
        _ = nodes.Node(rank, 2, None, "node0", 29500).own_address


def test_a_signal_in_a_clean_up_does_not_cut_it_short(tmp_path):
    with Launch(RunFolder(tmp_path), "run", end=(signal.SIGTERM,)) as launch:
        children = [launch.spawn(["sleep", "60"], tmp_path / f"{i}.log", {}) for i in range(2)]
        end = launch.end

        def interrupted(child: Child) -> None:
            signal.raise_signal(signal.SIGTERM)
            end(child)

        launch.end = interrupted
    assert all(child.process.poll() is not None for child in children)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, "ignored meanwhile, though not handled"


def test_an_export_is_not_taken_for_the_run_beside_it(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.error_report("export", 0, final=True).write_text("no checkpoint")
    folder.error_report("trainer", 1, final=False).write_text("lost")
    with Launch(folder, "train", end=()) as launch:
        for reports, said in (("trainer", "lost"), ("export", "no checkpoint")):
            failed = launch.spawn(["false"], folder.log(f"{reports}-1"), {})
            failed.process.wait()  # before a final report ends it
            assert launch.watch(Child(failed.process, failed.log, reports)) == 1
            assert f"{reports}-1 ended with status 1\n{said}\n" in capsys.readouterr().err
        quiet = launch.spawn(["sleep", "1"], folder.log("trainer-1"), {})
        assert launch.watch(Child(quiet.process, quiet.log, "trainer")) == 0, "the export's report ends no trainer"


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_with_the_status_that_shells_know(number, status, tmp_path, capsys):
    with Launch(RunFolder(tmp_path), "run", end=(number,)) as launch:
        child = launch.spawn(["sleep", "60"], tmp_path / "log", {})
        signal.raise_signal(number)
        raise AssertionError("the block goes on")
    assert launch.status == status and child.process.poll() is not None
    assert capsys.readouterr().err == f"megagrpo run: {number.name}; stopping\n"


@pytest.mark.parametrize("final, status", [(False, STOPPED), (True, ENDED)])
def test_a_stop_request_lets_ranks_finish_and_a_second_term_ends(final, status, tmp_path, capsys):
    """final: `megagrpo stop` wrote it on another node. What fails once the run is saved changes nothing."""
    folder = RunFolder(tmp_path)
    request = StopRequest(folder.stop_request("trainer"))
    for program in ("true", "false", "sleep"):
        with Launch(folder, "train", end=(), ask=(signal.SIGUSR1, signal.SIGTERM)) as launch:
            assert not request.made(), "that of an earlier launch is withdrawn"
            child = launch.spawn([program, "60"], tmp_path / "log", {})
            signal.raise_signal(signal.SIGTERM)
            if program == "sleep":
                signal.raise_signal(signal.SIGTERM)
            request.grant(3, final)
            launch.status = launch.watch(child)
        ended = program == "sleep"  # before the grant
        assert launch.status == (143 if ended else status)
        said = capsys.readouterr().err
        assert said.count("stopped as requested, saved after step 3") == (0 if ended else 1)
    assert request.granted() is None


def test_a_stop_request_that_cannot_be_written_ends_no_run(tmp_path, capsys, monkeypatch):
    folder = RunFolder(tmp_path)
    request = StopRequest(folder.stop_request("trainer"))
    with Launch(folder, "run", end=(), ask=(signal.SIGUSR1, signal.SIGINT)) as launch:
        folder.logs.rmdir()
        monkeypatch.setattr(StopRequest, "listened", lambda request: True)
        for number in (signal.SIGUSR1, signal.SIGINT):
            signal.raise_signal(number)
            (said,) = capsys.readouterr().err.splitlines()
            assert said.startswith("megagrpo run: not asked to stop, ask again: [Errno 2] ")
        folder.logs.mkdir()
        signal.raise_signal(signal.SIGUSR1)
        assert request.made()
    assert launch.status == 1, "the block has no other end"


class _Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_ctrl_c_that_ends_tee_too_loses_no_step(tmp_path, monkeypatch):
    """`megagrpo run X 2>&1 | tee log`: from then on nothing can be printed."""
    monkeypatch.setattr(StopRequest, "listened", lambda request: True)
    monkeypatch.setattr(sys, "stderr", _Gone())
    monkeypatch.setattr(sys, "stdout", _Gone())
    folder = RunFolder(tmp_path)
    with Launch(folder, "run", end=(), ask=(signal.SIGINT,)) as launch:
        signal.raise_signal(signal.SIGINT)
        StepConsole("a run", 4).note("of a rank")
        _write_report(str(tmp_path))
        StopRequest(folder.stop_request("trainer")).grant(3, False)
        launch.status = launch.watch(launch.spawn(["false"], tmp_path / "log", {}))
    assert launch.status == STOPPED


# A launcher, and ranks that stop as asked; at each moment they wait until the test goes on.
_LAUNCHER = """
import signal, sys, time
from pathlib import Path
from megagrpo.cluster.lock import alone_in
from megagrpo.cluster.supervise import Launch
from megagrpo.system.run_folder import RunFolder

path, ranks = Path(sys.argv[1]), sys.argv[2]
folder = RunFolder(path)
ask = (signal.SIGUSR1, signal.SIGINT)
launch = Launch(folder, "run", end=(signal.SIGTERM, signal.SIGUSR2), ask=ask)
with alone_in(folder), launch:
    command = [sys.executable, "-c", ranks, str(path)]
    launch.status = launch.watch(launch.spawn(command, folder.log("trainer"), {}, "trainer"))
(path / "ended").touch()
while not (path / "ended.go").exists():
    time.sleep(0.01)
sys.exit(launch.status)
"""
_RANKS = """
import sys, time
from pathlib import Path
from megagrpo.system.run_folder import RunFolder
from megagrpo.system.stop_request import StopRequest

path = Path(sys.argv[1])
request = StopRequest(RunFolder(path).stop_request("trainer"))

def wait(moment):
    (path / moment).touch()
    while not (path / f"{moment}.go").exists():
        time.sleep(0.01)

request.listen(True)
wait("up")
while not request.made():
    time.sleep(0.01)
wait("saving")
final = request.final()
wait("granting")
request.grant(3, final)
wait("granted")
"""
_USR1, _INT, _TERM, _USR2 = signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGUSR2


@pytest.mark.parametrize(
    "asks, status",
    [
        ({"up": [_USR1]}, STOPPED),
        ({"up": [_INT], "granted": [_INT, _INT]}, STOPPED),
        ({"up": [_USR1], "granted": [_TERM, _USR2]}, STOPPED),
        ({"up": ["stop"]}, ENDED),
        ({"up": [_INT], "saving": ["stop"]}, ENDED),
        ({"up": [_USR1], "granting": ["stop"]}, ENDED),
        ({"up": [_USR1], "granted": ["stop", _INT]}, ENDED),
        ({"up": [_INT], "saving": [_INT]}, 130),
    ],
)
def test_no_later_request_or_signal_changes_how_a_stopped_run_ends(asks, status, tmp_path):
    """As under Slurm, whose job repeats USR1 until the launcher has exited."""
    path = tmp_path / "run"
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, path, _RANKS], stderr=subprocess.PIPE, text=True, env=child_environment()
    )
    sent = 0
    asked = threading.Event()
    over = (path / "ended").exists

    def repeat() -> None:
        nonlocal sent
        asked.wait()
        while launcher.poll() is None:
            launcher.send_signal(_USR1)
            sent += 1
            time.sleep(0.002)

    repeats = threading.Thread(target=repeat)
    repeats.start()
    try:
        for moment in ("up", "saving", "granting", "granted", "ended"):
            met = (path / moment).exists
            until(lambda met=met: met() or over() or launcher.poll() is not None, 60)
            for number in asks.get(moment, [_INT, _TERM, _USR2] if moment == "ended" else []):
                if number == "stop":
                    stop(path, now=False)
                else:
                    launcher.send_signal(number)
            until(StopRequest(RunFolder(path).stop_request("trainer")).made, 60)
            asked.set()
            until(lambda before=sent: sent > before + 20 or launcher.poll() is not None, 60)
            (path / f"{moment}.go").touch()
        said = launcher.communicate(timeout=60)[1]
    finally:
        asked.set()
        launcher.kill()
        repeats.join()
    assert launcher.returncode == status, said
    assert ("stopped as requested, saved after step 3" in said) == (status != 130)
    if status == 130:
        first, second = ("saves after this step and ends; Ctrl-C again ends it at once", "SIGINT; stopping")
        assert said.index(f"megagrpo run: {first}\n") < said.index(f"megagrpo run: {second}\n")


def test_what_a_run_folder_says_and_how_it_is_stopped(tmp_path, capsys):
    """Also after several nodes: the first one's file is that of trainer-0."""
    config = experiments.experiment(train={"num_steps": 20}, output_dir=str(tmp_path / "run"))
    folder = config.run_folder
    with pytest.raises(ValueError, match="no run trains into this folder"):
        stop(folder.path, now=False)
    with pytest.raises(ValueError, match="holds no config.yaml, so it is no run folder"):
        print_status(folder.path, as_json=False)
    with alone_in(folder):
        write_experiment(config)
        print_status(folder.path, as_json=False)
        place = f"process {os.getpid()} on {socket.gethostname()}"
        assert capsys.readouterr().out.splitlines() == [
            f"{config.name}: step 0 of 20",
            f"runs as {place}",
            "engines: no service answers",
        ]
        entries = [{"step": n, "time/step_s": 30.0, "reward/mean": n / 10} for n in range(1, 6)]
        folder.metrics.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        saved = folder.checkpoints / "step_000004"
        saved.mkdir(parents=True)
        (saved / "state.json").write_text("{}")
        print_status(folder.path, as_json=False)
        said = capsys.readouterr().out.splitlines()
        assert said[0] == f"{config.name}: step 5 of 20, 30 s a step, 0:07:30 to go, reward 0.5"
        assert said[2] == "checkpoint after step 4, 0:00:00 ago"
        with pytest.raises(ValueError, match="no service answers|did not appear"):
            print_status(folder.path, as_json=True)
        with Launch(folder, "run", end=(signal.SIGTERM,), ask=(signal.SIGINT,)) as launch:
            child = launch.spawn(["true"], tmp_path / "log", {})
            assert stop(folder.path, now=False).startswith(f"{place} saves after its step")
            StopRequest(folder.stop_request("trainer")).grant(5, final=True)
            launch.status = launch.watch(child)
        assert launch.status == ENDED
        assert "stopped as requested, saved after step 5" in capsys.readouterr().err
        assert StopRequest(folder.stop_request("trainer-0")).made()
        with Launch(folder, "run", end=(signal.SIGTERM,)) as launch:
            stop(folder.path, now=True)
            time.sleep(10)
            raise AssertionError("the block goes on")
        assert launch.status == 143
    print_status(folder.path, as_json=False)
    assert "no process trains into this folder" in capsys.readouterr().out


def test_a_finished_run_says_so_before_anything_starts(tmp_path, capsys):
    config = experiments.experiment(train={"num_steps": 4}, output_dir=str(tmp_path / "run"))
    (config.run_folder.checkpoints / "step_000004").mkdir(parents=True)
    assert run(config) == 0
    assert "4 of 4 steps are done" in capsys.readouterr().out
    shared = config.rollout.model_copy(update={"colocate": True})
    node = nodes.Node(1, 2, "127.0.0.1", "127.0.0.1", 29500)
    assert nodes.run_node(config.model_copy(update={"rollout": shared}), node) == 0
    assert "4 of 4 steps are done" in capsys.readouterr().out
    more = experiments.experiment(train={"num_steps": 5}, output_dir=str(tmp_path / "run"))
    anew = more.model_copy(update={"checkpoint": CheckpointConfig(resume="never")})
    assert not finished(more) and not finished(anew)


def test_unheard_signals_still_reach_the_children_and_a_failure_leaves_none_and_no_temporary_folder(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    launch = Launch(RunFolder(tmp_path), "serve", end=(), unheard=(signal.SIGTERM,))
    launch.scratch.append(scratch)
    with pytest.raises(ValueError, match="no Ray"), launch:
        signal.raise_signal(signal.SIGTERM)
        child, other = (launch.spawn(["sleep", "60"], tmp_path / name, {}) for name in ("child", "other"))
        time.sleep(0.3)
        child.process.terminate()
        assert child.process.wait(5) == -signal.SIGTERM
        raise ValueError("no Ray")
    assert other.process.poll() is not None and not scratch.exists()


# Ignores TERM, has a child, and a grandchild whose parent is gone: all must end.
_STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
subprocess.Popen(sleep)
if os.fork() == 0:
    subprocess.Popen(sleep)
    os._exit(0)
os.wait()
print("up", flush=True)
time.sleep(600)
"""


def start(code: str, log: Path) -> tuple[subprocess.Popen, list[psutil.Process]]:
    process = spawn([sys.executable, "-c", code], child_environment(), log)
    until(lambda: "up" in log.read_text(), 30, log.read_text)
    return process, process_tree(process.pid)


_POLITE = "import time; print('up', flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("code", "number", "grace_s", "by"), [(_STUBBORN, 3, 0.3, signal.SIGKILL), (_POLITE, 1, 30, signal.SIGTERM)]
)
def test_a_whole_tree_ends_and_the_polite_at_once(tmp_path, code, number, grace_s, by):
    process, tree = start(code, tmp_path / "deep" / "log")
    assert len(tree) == number
    started = time.monotonic()
    stop_tree(process.pid, grace_s=grace_s)
    assert process.wait(5) == -by and time.monotonic() - started < 10
    assert not [p for p in tree if is_live(p)]
    stop_tree(process.pid)  # one that is gone is no error


def test_a_process_with_other_rights_does_not_save_the_rest_of_its_tree(tmp_path, monkeypatch):
    process, tree = start(_STUBBORN, tmp_path / "log")
    refused = tree[1].pid
    send = psutil.Process.send_signal

    def another_users(one: psutil.Process, number: int) -> None:
        if one.pid == refused:
            raise psutil.AccessDenied(one.pid)
        send(one, number)

    monkeypatch.setattr(psutil.Process, "send_signal", another_users)
    monkeypatch.setattr("megagrpo.system.processes._KILL_S", 0.3)
    stop_tree(process.pid, grace_s=0.1)
    monkeypatch.undo()
    process.wait(5)
    left = [one.pid for one in tree if is_live(one)]
    stop_tree(process.pid, 0.0)
    os.kill(refused, signal.SIGKILL)
    assert left == [refused]


def test_the_end_of_a_long_log_is_read_alone(tmp_path, monkeypatch):
    log = tmp_path / "log"
    log.write_bytes(b"\xc3\xa9" * 100_000 + b"\nlast\n")
    assert end_of(log, 7) == "\ufffd\nlast\n"
    assert last_lines(log).endswith("\nlast")
    assert len(last_lines(log)) < 20_000


def test_a_page_of_the_last_moment_is_printed(tmp_path, monkeypatch, capsys):
    """Shared folders are looked into every two seconds only, for all nodes do."""
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    with Launch(folder, "train", end=()) as launch:
        page = folder.deadline_page("now")
        code = f"sleep 0.5; printf 'it hangs\\n\\nstacks' > {page}; sleep 0.5"
        assert launch.watch(launch.spawn(["sh", "-c", code], folder.log("trainer"), {})) == 0
    assert capsys.readouterr().err == f"megagrpo: it hangs\nstacks: {page}\n"


def test_child_dies_with_its_parent(tmp_path):
    """Also when the parent cannot do anything about it."""
    code = f"""
import sys, time
from pathlib import Path
from megagrpo.system.environment import child_environment
from megagrpo.system.processes import spawn
command = [sys.executable, "-c", "import time; time.sleep(600)"]
print(spawn(command, child_environment(), Path({str(tmp_path / "inner")!r})).pid, flush=True)
print("up", flush=True)
time.sleep(600)
"""
    process, _ = start(code, tmp_path / "log")
    child = psutil.Process(int((tmp_path / "log").read_text().split()[0]))
    assert is_live(child)
    process.kill()
    process.wait(10)
    until(lambda: not is_live(child), 10)


# In torchrun's place: notes the words of the ranks that it is to start.
_NOTES_WORDS = "import json, sys; json.dump(sys.argv[2:], open(sys.argv[1], 'w'))"


_BESIDE_A_RUN = [["export", "out", "--lora"], ["export", "out", "--checkpoint", "c"], ["replay", "dump"], ["sft"]]


@pytest.mark.parametrize("words", _BESIDE_A_RUN)
def test_a_command_beside_a_run_has_an_experiment_of_its_own(words, tmp_path, monkeypatch):
    """The run's ranks restart from config.yaml, even if they are lost while another command runs."""
    (tmp_path / "torchrun.py").write_text(_NOTES_WORDS)
    noted = tmp_path / "words.json"
    monkeypatch.setattr(start_of_ranks, "torchrun", lambda ranks, **_: [str(tmp_path / "torchrun.py"), noted])
    monkeypatch.setattr(f"megagrpo.tools.ranks.{words[0]}.refuse_{words[0]}", lambda *_: None)  # of what is not there
    where = [f"output_dir={tmp_path / 'run'}", "actor.device=cpu"]
    trained = load_config(QUICKSTART, where)
    own = ["actor.world_size=1", "actor.parallel={}", "actor.optimizer.lr=1e-3"]
    changes = [word for change in [*where, *own] for word in ("--set", change)]
    with alone_in(trained.run_folder):
        write_experiment(trained)
        reading, writing = os.pipe()  # as `export <(...)`: it can be read once
        os.write(writing, QUICKSTART.read_bytes())
        os.close(writing)
        assert cli.main([words[0], f"/dev/fd/{reading}", *words[1:], *changes]) == 0
    assert load_config(trained.run_folder.config) == trained
    noted_words = json.loads(noted.read_text())
    of_rank = noted_words[noted_words.index("megagrpo.cli") + 1 :]
    args = cli._parser(of_rank).parse_args(of_rank)
    assert of_rank[:1] + of_rank[2:] == words
    assert load_config(args.config, args.overrides) == load_config(QUICKSTART, [*where, *own])


# Runs that have nothing left to do, on one rank.
_FINISHED_RUNS = """
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from megagrpo.loop.ranks import train_main
from tests.experiments import experiment

run = SimpleNamespace(mesh=SimpleNamespace(is_main=True))
sys.modules["megagrpo.check.problems"] = SimpleNamespace(model_to_train=lambda config: None)
sys.modules["megagrpo.loop.run"] = SimpleNamespace(start_run=lambda *_: nullcontext(run))
sys.modules["megagrpo.loop.train"] = SimpleNamespace(train=lambda run: None)
for folder in sys.argv[1:]:
    assert train_main(experiment(output_dir=folder, actor={"device": "cpu"}), None) == 0
"""


def test_a_report_that_cannot_be_written_fails_no_finished_run(tmp_path):
    lines = {"cut": '{"step": 1, "rew\n{"step": 2}\n', "blocked": '{"step": 1, "reward/mean": 0.5}\n'}
    folders = [tmp_path / name for name in lines]
    for folder in folders:
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(lines[folder.name])
    (tmp_path / "blocked" / "summary.md").mkdir()
    said = python("-c", _FINISHED_RUNS, *folders).splitlines()
    notes = [line for line in said if line.startswith("no summary: ")]
    for folder, note in zip(folders, notes, strict=True):
        assert note.endswith(f"; `megagrpo report {folder}` writes it")
