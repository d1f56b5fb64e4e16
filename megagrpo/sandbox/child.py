"""The two processes around one program; sandbox.py starts `python -I -S child.py OPTIONS`.

The supervisor is trusted: it creates the sandbox, sums up memory, and ends everything when the
program has ended, when its control pipe closes (its parent gave up or died), or at the memory
limit. It forks the program's process, which irrevocably confines itself before the first line of
the program runs. Neither process holds an expected answer. Imports are few and from the standard
library only: start-up is most of the cost of a small program.
"""

import _socket
import ctypes
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import ModuleType, SimpleNamespace, TracebackType

_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNS = 0x00020000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
_SYS_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_READ_ONLY = 1 | 2  # MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_FIRST_USER, _USERS = 61000, 4000  # distributions leave this range free
_TICK_S = 0.02  # between two looks at the memory in use
_MIB = 2**20

_libc = ctypes.CDLL(None, use_errno=True)


def main(options: SimpleNamespace) -> None:
    """Runs one program and writes {"code": exit code, "reason": text} to the status pipe; {"setup":
    text} on failure.

    options: the command line, written by sandbox.py: limits, paths and file descriptors.
    reason: "memory limit", or "" for a program that ended by itself or because the control pipe
    closed.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with open(
        os.path.join(options.scratch, "program.py"), encoding="utf-8", errors="surrogatepass"
    ) as file:
        source = file.read()
    # before others can enter the folder: of a test it has the expected results
    os.unlink(file.name)
    calls = _load("calls")
    filters = _load("system_calls")
    ready, theirs = os.pipe()
    try:
        options.user, claim = _claim_user()
        _make_root(options)
        if options.isolate:
            _enter_namespaces(options.user)
        pid = os.fork()
    except OSError as exc:
        _report(options, {"setup": str(exc)})
        return
    if pid == 0:
        for fd in (options.status, options.control, ready, claim.detach()):
            os.close(fd)
        _confine(options, theirs, filters)
        _run(source, options, calls)
        return
    os.close(theirs)
    with open(ready, "rb") as stream:
        problem = stream.read().decode(errors="replace")
    ended = _supervise(pid, options)
    _report(options, {"setup": problem} if problem else ended)


def _load(name: str) -> ModuleType:
    """Loads a file beside this one without its folder on sys.path."""
    path = os.path.join(os.path.dirname(__file__), f"{name}.py")
    module = sys.modules[f"sandbox_{name}"] = ModuleType(f"sandbox_{name}")
    SourceFileLoader(module.__name__, path).exec_module(module)
    return module


def _report(options: SimpleNamespace, report: dict[str, object]) -> None:
    os.write(options.status, json.dumps(report).encode())


# ---- the supervisor ----------------------------------------------------------------------------


def _make_root(options: SimpleNamespace) -> None:
    """Creates the folder of the program's private root, without namespaces its only folder. Root
    does it for the program's user, which root without capabilities becomes."""
    # in the working folder: who becomes another user may not reach it from /
    options.root = root = "root"
    os.mkdir(root, 0o700)
    if os.getuid() == 0:
        os.chmod(options.scratch, 0o711)
        os.chown(root, options.user, -1)


def _claim_user() -> tuple[int, _socket.socket]:
    """Returns a user id that no other program has while the socket is open: two with one id share
    limits, and without namespaces either could end the other. Raises OSError."""
    for number in range(_USERS):
        user = _FIRST_USER + (os.getpid() + number) % _USERS
        claim = _socket.socket(_socket.AF_UNIX)
        try:
            claim.bind(f"\0megagrpo-program-{user}")  # the kernel's table of names without files
            return user, claim
        except OSError:
            claim.close()
    raise OSError(f"{_USERS} programs run here already")


def _supervise(pid: int, options: SimpleNamespace) -> dict[str, object]:
    """Waits for the program, ends every process that it started, and returns its exit code and the
    limit it met."""
    reason = ""
    limit = options.memory_mb * _MIB
    process = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(options.control, select.POLLIN)
    events = poll.poll(1000 * _TICK_S)
    while not events:
        if sum(map(_resident_bytes, _descendants(os.getpid()))) > limit:
            reason = "memory limit"
            break
        events = poll.poll(1000 * _TICK_S)
    if not any(fd == process for fd, _ in events):
        # first of its PID namespace, if it has one: the kernel ends the others
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    # Without a PID namespace, orphans are children of this process, their subreaper. Each round
    # ends those that it sees; the next round sees the processes that they forked meanwhile.
    while True:
        for child in _descendants(os.getpid()):
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return {"code": os.waitstatus_to_exitcode(status), "reason": reason}


def _descendants(pid: int) -> Iterator[int]:
    children: list[int] = []
    with suppress(OSError):  # a process, or a thread, which has children of its own, has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    for child in children:
        yield child
        yield from _descendants(child)


def _resident_bytes(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0


def _enter_namespaces(user: int) -> None:
    """Gives future children their own network, process ids and shared memory."""
    apart = _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC
    if os.getuid() == 0:
        if _libc.unshare(apart) == 0:
            return
        _become(user)  # for example root in a container without the capability
    uid = os.getuid()
    gid = os.getgid()
    _call("unshare", apart | _CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _become(user: int) -> None:
    """Takes an unused user id: limits do not bind root, and root can read every file."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _libc.prctl(_PR_SET_DUMPABLE, 1)  # or /proc/self would belong to root


def _call(name: str, *arguments: object) -> None:
    """Calls a function of libc; raises OSError for a negative result."""
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


# ---- the program's process ---------------------------------------------------------------------


def _confine(options: SimpleNamespace, ready: int, filters: ModuleType) -> None:
    """Irrevocably gives up all rights that the program must not have. Writes an error to `ready`,
    or closes it."""

    def report(kind: type[BaseException], exc: BaseException, _: TracebackType | None) -> None:
        os.write(ready, f"{kind.__name__}: {exc}".encode())
        os._exit(1)

    sys.excepthook = report
    os.setsid()
    os.umask(0o022)
    if options.isolate:
        _build_root(options)
        tasks = 1  # the supervisor, if it is in the same new user namespace
    else:
        os.chdir(options.root)
        tasks = 0 if os.getuid() == 0 else _tasks()
    if os.getuid() == 0:
        _become(options.user)
    _drop_capabilities()
    _limit(options, tasks)
    filters.forbid()
    sys.excepthook = sys.__excepthook__
    os.close(ready)


def _run(source: str, options: SimpleNamespace, calls: ModuleType) -> None:
    """Runs the program and exits as the interpreter would, after its threads have ended."""
    sys.argv[:] = ["program.py"]
    sys.set_int_max_str_digits(0)  # judges have Pythons without the limit
    if options.mode == "script":
        calls.run_script(source)
    elif options.mode == "test":
        calls.run_tests(json.loads(source), options)
    else:
        calls.answer_requests(source, options)


def _tasks() -> int:
    """Returns the number of this user's processes and threads, which the kernel limits together."""
    number = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # ended meanwhile
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                number += len(os.listdir(f"/proc/{name}/task"))
    return number


def _build_root(options: SimpleNamespace) -> None:
    """Builds a root with only the interpreter, the system's libraries (read-only) and a small
    /tmp."""
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    root = options.root
    size = f"size={options.disk_mb}m,nr_inodes=10000,mode=0755".encode()
    _call("mount", b"tmpfs", root.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, size)
    read_only = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    attributes = (_AT_RECURSIVE, read_only, ctypes.c_size_t(ctypes.sizeof(read_only)))
    for path in options.readable:
        if not os.path.isdir(root + path):  # not inside one that is bound already
            os.makedirs(root + path)
            place = (root + path).encode()
            _call("mount", path.encode(), place, None, _MS_BIND | _MS_REC, None)
            _call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, place, *attributes)
    for path, target in options.links.items():
        os.symlink(target, root + path)
    for name in ("dev", "tmp", "proc"):  # the interpreter may be in one
        os.makedirs(f"{root}/{name}", exist_ok=True)
    os.chmod(f"{root}/tmp", 0o777)
    for path in _DEVICES:
        os.close(os.open(root + path, os.O_CREAT | os.O_WRONLY))
        _call("mount", path.encode(), (root + path).encode(), None, _MS_BIND | _MS_REC, None)
    os.symlink("/proc/self/fd/0", f"{root}/dev/stdin")
    # some containers forbid it
    _libc.mount(b"proc", f"{root}/proc".encode(), b"proc", _MS_NOSUID, None)
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/tmp")


def _drop_capabilities() -> None:
    """Irrevocably drops the capabilities of a user namespace's first process."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    _call("capset", header, (ctypes.c_uint32 * 6)())


def _limit(options: SimpleNamespace, tasks: int) -> None:
    """Sets the kernel's limits for each process. tasks: processes of this user that are not the
    program's."""
    limits = {
        resource.RLIMIT_AS: options.memory_mb * _MIB,
        resource.RLIMIT_CPU: options.cpu_s,
        resource.RLIMIT_FSIZE: options.disk_mb * _MIB,
        resource.RLIMIT_NOFILE: options.open_files,
        resource.RLIMIT_NPROC: options.processes + tasks,
        resource.RLIMIT_CORE: 0,
    }
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(which, (value, value))


if __name__ == "__main__":
    main(SimpleNamespace(**json.loads(sys.argv[1])))
