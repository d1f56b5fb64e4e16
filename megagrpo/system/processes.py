"""Starts child processes that never outlive their parent, and ends process trees."""

import ctypes
import gc
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

_FILES = 65_536  # open files of a process, as far as the machine allows
_PR_SET_PDEATHSIG = 1
_LOG_LINES = 25
_LOG_BYTES = 16_384
_KILL_S = 5.0  # seconds for the kernel to release a large process
# loaded before fork: the child calls it between fork and exec, where loading could deadlock
_libc = ctypes.CDLL(None)


def spawn(
    command: list[str],
    env: dict[str, str],
    log: Path,
    death_signal: signal.Signals = signal.SIGKILL,
    share_stdout: bool = False,
) -> subprocess.Popen:
    """Starts `command` in its own session; the kernel sends it `death_signal` when the parent dies.

    Output is appended to `log`; `share_stdout` inherits standard output. Call it from a thread that
    lives as long as the child may, because Linux ties the signal to the thread that forked.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=None if share_stdout else output,
            stderr=output,
            start_new_session=True,
            preexec_fn=dies_with_parent(os.getpid(), death_signal),
        )


def namespaces(*kinds: str) -> str:
    """Returns a name of this machine's boot and of the process's namespaces of these kinds ("pid",
    "net"): equal in processes that share them."""
    links = (os.readlink(f"/proc/self/ns/{kind}") for kind in kinds)
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *links])


def dies_with_parent(parent: int, death_signal: signal.Signals) -> Callable[[], None]:
    """Returns a function for a child of process `parent` to call between fork and exec, so that the
    kernel sends it the signal."""

    def arrange() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(death_signal))
        # for the launcher; some Slurms also send them to its children
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return arrange


def end_with_parent() -> None:
    """Lets the kernel kill this process when its parent ends."""
    dies_with_parent(os.getppid(), signal.SIGKILL)()


def process_tree(pid: int) -> list[psutil.Process]:
    """Returns the live processes among `pid`, its descendants and its session, without zombies.

    An orphaned grandchild has another parent, but the same session.
    """
    tree: dict[int, psutil.Process] = {}
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        tree = {process.pid: process for process in (root, *root.children(recursive=True))}
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == pid:
                tree[process.pid] = process
    return list(filter(is_live, tree.values()))


def is_live(process: psutil.Process) -> bool:
    """Returns whether a process runs. A zombie does not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def stop_tree(pid: int, grace_s: float = 5.0) -> None:
    """Ends session leader `pid` (from `spawn`) and its descendants: TERM, then KILL after `grace_s`
    seconds.

    The caller must still `wait` for its own child, which otherwise remains a zombie.
    """
    # listed while parents still name their children
    tree = {process.pid: process for process in process_tree(pid)}
    if pid in tree:
        _signal(tree[pid], signal.SIGTERM)
    _wait_gone(tree.values(), grace_s)
    tree |= {late.pid: late for late in process_tree(pid)}
    for process in tree.values():
        _signal(process, signal.SIGKILL)
    _wait_gone(tree.values(), _KILL_S)


def _wait_gone(processes: Iterable[psutil.Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_live, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    # a process with another user's rights is left alone: the others must still be ended
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process.send_signal(number)


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Looks for no garbage while the block imports large libraries, nor later among what they made,
    which stays.

    The search takes a quarter of the imports' time.
    """
    gc.disable()
    with ExitStack() as end:
        end.callback(gc.enable)
        end.callback(gc.freeze)
        yield


def raise_file_limit() -> None:
    """Raises the limit of open files of this process and its children, within the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _FILES
    if hard != resource.RLIM_INFINITY:
        limit = min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def last_lines(log: Path) -> str:
    """Returns the last lines of a log."""
    return "\n".join(end_of(log, _LOG_BYTES).splitlines()[-_LOG_LINES:])


def end_of(log: Path, num_bytes: int) -> str:
    """Returns the end of a log, which may be gigabytes."""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - num_bytes, 0))
        return file.read().decode(errors="replace")


def route_address(host: str, port: int) -> str:
    """Returns the address of this machine's interface that leads to `host`."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # UDP: selects a route without sending
        return probe.getsockname()[0]


def return_freed_memory() -> None:
    """Returns to the system what this process has freed: glibc keeps memory between pieces that are
    in use, such as answers between their texts."""
    if trim := getattr(_libc, "malloc_trim", None):
        trim(0)
