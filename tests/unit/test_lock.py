"""Who trains into a run folder, also on file systems without locks and from other machines and containers."""

import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megagrpo.cluster import lock
from megagrpo.cluster.lock import Launcher, alone_in, launcher_of
from megagrpo.system.environment import child_environment
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.stop import stop
from tests.experiments import until

_HOLDER = """
import sys, time
from pathlib import Path
from megagrpo.cluster import lock
from megagrpo.system.run_folder import RunFolder

lock._BEAT_S = 0.1
lock.fcntl.flock = lambda *_: None  # a lock that other machines do not see
with lock.alone_in(RunFolder(Path(sys.argv[1]))):
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A launcher whose lock holds nothing, as with Lustre's localflock from another node."""
    command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment())
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.wait()


def refuses(*_: object) -> None:
    raise OSError(38, "Function not implemented")


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("flock", [refuses, lambda *_: None])
def test_a_lock_that_tells_nothing_hides_no_run(elsewhere, flock, holder, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(lock, "_SILENT_S", 2.0)
    if elsewhere:
        monkeypatch.setattr(lock, "namespaces", lambda *_: "another machine")
    place = f"process {holder.pid} on {socket.gethostname()}"
    assert str(launcher_of(folder)) == place
    assert stop(tmp_path, now=False).startswith(f"{place} saves after its step")
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.0)
    refused = pytest.raises(ValueError, match=rf"another run trains into this folder \({place}\)")
    with refused, alone_in(folder):
        pass
    holder.kill()
    holder.wait()
    assert launcher_of(folder) is None
    with alone_in(folder):
        assert launcher_of(folder) is not None
    assert launcher_of(folder) is None


def test_an_old_heartbeat_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits"))
    path = RunFolder(tmp_path).lock
    path.write_text(json.dumps({"host": "a", "pid": 1, "job": "", "space": "another machine"}))
    os.utime(path, (0, 0))
    assert launcher_of(RunFolder(tmp_path)) is None
    path.write_text(json.dumps({"host": "a", "pid": 1, "job": ""}))  # of an earlier version
    assert launcher_of(RunFolder(tmp_path)) is None


def test_a_new_start_waits_for_the_lock_of_a_node_that_died(tmp_path, monkeypatch):
    """A file server releases it after a while, whoever starts the run again."""
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.0)
    path = RunFolder(tmp_path).lock
    dead = held(path, space="the dead node")
    os.utime(path, (0, 0))
    naps = []
    monkeypatch.setattr(time, "sleep", lambda seconds: naps.append(dead.kill() or dead.wait()))
    with alone_in(RunFolder(tmp_path)):
        assert naps
    monkeypatch.undo()
    monkeypatch.setattr(lock, "_DEAD_LOCK_S", 0.0)
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.0)
    dead = held(path, space="the dead node")
    os.utime(path, (0, 0))
    with pytest.raises(ValueError, match="another run trains into this folder"), alone_in(RunFolder(tmp_path)):
        pass
    dead.kill()
    dead.wait()


def held(path: Path, **changes: object) -> subprocess.Popen:
    """A process that holds a lock in which it is recorded."""
    code = "import fcntl, sys, time; file = open(sys.argv[1], 'a'); fcntl.flock(file, 2); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    until(lambda: not lock._locked(path.open("a"), fcntl.LOCK_EX), 60)
    recorded = {"host": socket.gethostname(), "pid": process.pid, "job": "", "space": lock.namespaces("pid")}
    recorded["started"] = lock._started(process.pid)
    path.write_text(json.dumps(recorded | changes))
    return process


@pytest.mark.parametrize("changes", [{"space": "another container"}, {"started": "1"}])
def test_a_process_that_only_has_the_number_of_a_launcher_is_not_ended(changes, tmp_path):
    """As process 1 of the host, when the launcher is process 1 of a container."""
    process = held(RunFolder(tmp_path).lock, **changes)
    with pytest.raises(ValueError, match=f"process {process.pid} on .*in another container: end it there"):
        stop(tmp_path, now=True)
    assert process.poll() is None
    process.kill()
    process.wait()
    process = held(RunFolder(tmp_path).lock)
    assert stop(tmp_path, now=True).startswith(f"process {process.pid} on ")
    assert process.wait(60) == -15


_NODE = """
import signal, sys
from pathlib import Path
from megagrpo.cluster import lock
from megagrpo.cluster.supervise import Launch
from megagrpo.system.run_folder import RunFolder

folder = RunFolder(Path(sys.argv[1]))
ask = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
with lock.alone_in(folder), Launch(folder, "train", end=(), ask=ask, ranks="trainer-0") as launch:
    hung = launch.spawn(["sleep", "600"], folder.log("trainer-0"), {})
    print("up", flush=True)
    launch.status = launch.watch(hung)
sys.exit(launch.status)
"""


def test_stop_now_ends_a_hung_run_of_several_nodes(tmp_path):
    """Whose launchers take the first TERM as a request to save."""
    command = [sys.executable, "-c", _NODE, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment())
    assert process.stdout.readline() == "up\n"
    try:
        stop(tmp_path, now=True)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()


def test_a_copy_of_a_run_that_goes_on_is_another_run(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_SILENT_S", 0.5)
    run, copy = (RunFolder(tmp_path / name) for name in ("run", "copy"))
    with alone_in(run):
        shutil.copytree(run.path, copy.path)
        assert launcher_of(copy) is None
        with pytest.raises(ValueError, match="no run trains into this folder"):
            stop(copy.path, now=True)
        with alone_in(copy):
            assert launcher_of(copy) is not None and launcher_of(run) is not None


def test_a_full_disk_is_said(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        with pytest.raises(ValueError, match=f"output_dir {tmp_path} cannot be written"), alone_in(RunFolder(tmp_path)):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_process_that_has_ended_has_no_start():
    process = subprocess.Popen(["true"])
    until(lambda: lock._started(process.pid) == "", 60)  # while its parent has not waited for it
    process.wait()
    launcher = Launcher("host", os.getpid(), "", lock.namespaces("pid"), lock._started(os.getpid()))
    assert launcher.runs_here and not Launcher("host", process.pid, "", lock.namespaces("pid"), "").runs_here


def test_a_failure_leaves_the_block_and_no_launcher(tmp_path):
    with pytest.raises(OSError, match="Stale"), alone_in(RunFolder(tmp_path)):
        raise OSError(116, "Stale file handle")
    assert RunFolder(tmp_path).lock.read_text() == ""
