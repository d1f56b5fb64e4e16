"""The lock of a run folder: one launcher trains into it, and other commands find that launcher.

Some cluster file systems have no locks, or locks that hold on one node only. The launcher therefore
also records itself in the file and renews the file's time. On its own machine the process itself
shows whether it runs, on others the heartbeat.
"""

import fcntl
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from megagrpo.system import environment
from megagrpo.system.errors import translated
from megagrpo.system.processes import namespaces
from megagrpo.system.run_folder import RunFolder

_POLL_S = 0.2
_BEAT_S = 5.0  # between two heartbeats
_SILENT_S = 20.0  # a launcher that is silent for as long does not run
_OLD_S = 3600.0  # more than clocks of nodes differ
# `megagrpo status` holds the lock for a moment
_PATIENCE_S = 1.0
_AGAIN_S = 1.0
# a file server may hold the lock of a dead node; Slurm restarts its job elsewhere
_DEAD_LOCK_S = 150.0


@dataclass(frozen=True)
class Launcher:
    """The process that trains into a run folder, as the folder's lock records it."""

    host: str
    pid: int
    job: str  # the Slurm job; "" outside Slurm
    space: str = ""  # the boot and the namespace in which `pid` names a process
    started: str = ""  # in clock ticks since the boot, because a pid is used again
    inode: int = 0  # of the lock: the one in a copy of the folder is another

    def __str__(self) -> str:
        if self.job:
            return f"Slurm job {self.job}"
        return f"process {self.pid} on {self.host}"

    @property
    def is_here(self) -> bool:
        """Tells whether the launcher started on this boot and in this PID namespace."""
        return self.space == namespaces("pid")

    @property
    def runs_here(self) -> bool:
        """Tells whether the launcher runs and this process can see it."""
        return self.is_here and self.started == _started(self.pid) != ""

    def end(self) -> None:
        """Ends a launcher that runs on this machine. Raises ValueError for another one."""
        if not self.runs_here:
            raise ValueError(f"{self} is on another machine or in another container: end it there")
        os.kill(self.pid, signal.SIGTERM)
        time.sleep(_AGAIN_S)
        # at the first one a launcher of several nodes only asks its ranks to save
        if self.runs_here:
            os.kill(self.pid, signal.SIGTERM)


@contextmanager
def alone_in(folder: RunFolder) -> Iterator[None]:
    """Locks the run folder inside the block, and records this launcher there. Raises ValueError if
    another run trains into it."""
    path = folder.lock
    unwritten = f"output_dir {folder.path} cannot be written"
    with translated(unwritten, OSError):
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = path.open("ab", buffering=0)
    deadline = time.monotonic() + _PATIENCE_S
    if environment.get_int("SLURM_RESTART_COUNT", 0):
        deadline += _DEAD_LOCK_S
    with lock as file, ExitStack() as end:
        while not _locked(file, fcntl.LOCK_EX) or _runs(_recorded(path), path):
            late_s = time.monotonic() - deadline
            # a lock without a heartbeat may be that of a dead node
            if late_s > _DEAD_LOCK_S or (late_s > 0 and _runs(_recorded(path), path)):
                raise ValueError(
                    f"output_dir {folder.path}: another run trains into this folder "
                    f"({_recorded(path) or 'a start'}); wait for its end or name another"
                )
            time.sleep(_POLL_S)
        pid = os.getpid()
        job = environment.get("SLURM_JOB_ID", "")
        inode = os.fstat(file.fileno()).st_ino
        launcher = Launcher(socket.gethostname(), pid, job, namespaces("pid"), _started(pid), inode)
        with translated(unwritten, OSError):  # a full disk
            file.truncate(0)
            file.write(json.dumps(asdict(launcher)).encode())
        end.callback(_erase, file)
        ended = threading.Event()
        end.callback(ended.set)
        # a daemon: a file system that hangs must not hold up the end
        threading.Thread(target=_beat, args=(path, ended), name="heartbeat", daemon=True).start()
        yield


def launcher_of(folder: RunFolder) -> Launcher | None:
    """Returns the launcher that trains into the run folder; None if none does. Takes seconds if
    only a heartbeat can show it."""
    launcher = _recorded(folder.lock)
    with suppress(OSError), folder.lock.open() as file:
        if not _locked(file, fcntl.LOCK_SH):
            return launcher
    return launcher if _runs(launcher, folder.lock) else None


def _locked(file: IO, kind: int) -> bool:
    """Locks a file, if the file system can. Returns whether no other process holds the lock."""
    with suppress(OSError):  # of a file system without locks
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _recorded(path: Path) -> Launcher | None:
    """Returns the launcher that a lock names, whether or not it runs."""
    with suppress(OSError, ValueError, TypeError):
        return Launcher(**json.loads(path.read_text()))
    return None


def _runs(launcher: Launcher | None, path: Path) -> bool:
    """Returns whether a recorded launcher trains here, whatever the lock says. Waits for the
    heartbeat of one on another machine, or in the folder of which this one is a copy."""
    if launcher is None or not launcher.space:  # earlier versions have no heartbeat
        return False
    if launcher.is_here and not launcher.runs_here:
        return False
    with suppress(OSError):
        if launcher.is_here and path.stat().st_ino == launcher.inode:
            return True
    first = _last_beat(path)
    until = time.monotonic() + _SILENT_S
    while time.time() - first < _OLD_S and time.monotonic() < until:
        if _last_beat(path) != first:
            return True
        time.sleep(_POLL_S)
    return False


def _beat(path: Path, ended: threading.Event) -> None:
    while True:
        with suppress(OSError):  # tried again
            os.utime(path)
        if ended.wait(_BEAT_S):
            return


def _last_beat(path: Path) -> float:
    with suppress(OSError), path.open() as file:  # NFS asks the server about a file that is opened
        return os.fstat(file.fileno()).st_mtime
    return 0.0


def _erase(file: IO) -> None:
    with suppress(OSError):
        file.truncate(0)


def _started(pid: int) -> str:
    """Returns when a process started; "" if there is none, or one that has ended."""
    with suppress(OSError):
        # the name, which may hold spaces and parentheses, comes before
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if state != "Z":
            return fields[18]
    return ""
