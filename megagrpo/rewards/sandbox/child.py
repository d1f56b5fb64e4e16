"""The two processes around one program of grader `code`; sandbox.py starts `python -I -S child.py OPTIONS`.

The supervisor is trusted: it makes the sandbox, waits, adds up memory, and ends everything when the program ended, when
its control pipe closes (its parent gave up or died), or at the memory limit. It forks the program's process, which
confines itself for good before the first line of the program. Neither ever holds an expected answer. Only the standard
library is imported, and little of it: starting is most of what a small program costs.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
import types
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from typing import Any

_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 36, 38
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH, _SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 2, 442, -100, 0x8000
_READ_ONLY = 1 | 2  # MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_TICK_S = 0.02  # between two looks at the memory in use
_MIB = 2**20

_libc = ctypes.CDLL(None, use_errno=True)


def main(options: dict[str, Any]) -> None:
    """Runs one program and writes {"code": exit code, "reason": text} to the status pipe; {"setup": text} on failure.

    reason: "memory limit", or "" for a program that ended by itself or because the control pipe closed.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with open(os.path.join(options["scratch"], "program.py"), encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    calls = None if options["mode"] == "script" else _load_calls()
    ready, theirs = os.pipe()
    options["user"] = 61000 + os.getpid() % 4000  # distributions leave this range free; each program has another one
    try:
        if options["isolate"]:
            _enter_namespaces(options["user"])
        pid = os.fork()
    except OSError as exc:
        _report(options, {"setup": str(exc)})
        return
    if pid == 0:
        for fd in (options["status"], options["control"], ready):
            os.close(fd)
        _confine(options, theirs)
        _run(source, options, calls)
        return
    os.close(theirs)
    with open(ready, "rb") as stream:
        problem = stream.read().decode(errors="replace")
    ended = _supervise(pid, options)
    _report(options, {"setup": problem} if problem else ended)


def _load_calls() -> types.ModuleType:
    """Loads the module beside this file without its folder on sys.path, where math.py would hide the library's own."""
    path = os.path.join(os.path.dirname(__file__), "calls.py")
    module = types.ModuleType("sandbox_calls")
    sys.modules[module.__name__] = module
    SourceFileLoader(module.__name__, path).exec_module(module)
    return module


def _report(options: dict[str, Any], report: dict[str, Any]) -> None:
    os.write(options["status"], json.dumps(report).encode())


# ---- the supervisor ------------------------------------------------------------------------------------------------


def _supervise(pid: int, options: dict[str, Any]) -> dict[str, Any]:
    """Waits for the program and returns how it ended; nothing that it started is left."""
    reason, limit = "", options["memory_mb"] * _MIB
    process = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(options["control"], select.POLLIN)
    while not (events := poll.poll(1000 * _TICK_S)):
        if sum(map(_resident_bytes, _descendants(os.getpid()))) > limit:
            reason = "memory limit"
            break
    if not any(fd == process for fd, _ in events):
        os.kill(pid, signal.SIGKILL)  # the first of its PID namespace, where there is one: the kernel ends the others
    _, status = os.waitpid(pid, 0)
    # Without a PID namespace: orphans are this process's children, since it is their subreaper. Each round ends all
    # that it sees; what these have forked meanwhile is seen by the next.
    while True:
        for child in _descendants(os.getpid()):
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return {"code": os.waitstatus_to_exitcode(status), "reason": reason}


def _descendants(pid: int) -> Iterator[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(word) for word in file.read().split()]
    except OSError:  # it has ended
        return
    for child in children:
        yield child
        yield from _descendants(child)


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _enter_namespaces(user: int) -> None:
    """Leaves the network, the processes and the shared memory of this machine behind, for the children from now on."""
    apart = _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC
    if os.getuid() == 0 and _libc.unshare(apart) == 0:
        return
    if os.getuid() == 0:  # root in a container, say, without the right to do that
        _become(user)
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", apart | _CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _become(user: int) -> None:
    """Takes a user id that nobody has: root's limits on processes bind nobody, and its files are everybody's."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _libc.prctl(_PR_SET_DUMPABLE, 1)  # or /proc/self would belong to root


def _call(name: str, *arguments: Any) -> None:
    """Calls libc's function; raises OSError for a result below 0."""
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


# ---- the program's process -----------------------------------------------------------------------------------------


def _confine(options: dict[str, Any], ready: int) -> None:
    """Gives up, for good, what the program must not have. `ready` gets what went wrong, and closes."""
    try:
        os.setsid()
        os.umask(0o022)
        if options["isolate"]:
            _build_root(options)
            tasks = 1  # the supervisor, where it is of the same new user namespace
        else:
            _enter_folder(os.path.join(options["scratch"], "work"), options["user"])
            tasks = 0 if os.getuid() == 0 else _tasks_of(os.getuid())
        if os.getuid() == 0:
            _become(options["user"])
        _drop_capabilities()
        _limit(options, tasks)
    except BaseException as exc:  # told to the supervisor, who reports it
        os.write(ready, f"{type(exc).__name__}: {exc}".encode())
        os._exit(1)
    os.close(ready)


def _run(source: str, options: dict[str, Any], calls: types.ModuleType | None) -> None:
    """Runs the program as the interpreter would, and leaves as it would: threads are waited for."""
    sys.argv[:] = ["program.py"]
    if options["mode"] == "test":
        assert calls is not None
        calls.run_tests(json.loads(source), options)
        return
    module = types.ModuleType("__main__" if calls is None else "program")
    sys.modules[module.__name__] = module
    if calls is None:
        exec(compile(source, "program.py", "exec"), vars(module))
    else:
        calls.serve(source, module, options)


def _enter_folder(folder: str, user: int) -> None:
    """Makes the program's own folder where there can be no root of its own."""
    os.mkdir(folder, 0o700)
    if os.getuid() == 0:
        os.chmod(os.path.dirname(folder), 0o711)
        os.chown(folder, user, -1)
    os.chdir(folder)


def _tasks_of(uid: int) -> int:
    """Returns the processes and threads of a user, which the kernel's limit counts all together."""
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                found += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # ended meanwhile
            continue
    return found


def _build_root(options: dict[str, Any]) -> None:
    """Makes a root of the interpreter, the system's libraries (read-only) and a small /tmp; nothing else is visible."""
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    root = os.path.join(options["scratch"], "root")
    os.mkdir(root)
    size = f"size={options['disk_mb']}m,nr_inodes=10000,mode=0755".encode()
    _call("mount", b"tmpfs", root.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, size)
    for path in options["readable"]:
        if not os.path.isdir(root + path):  # inside one before it
            os.makedirs(root + path)
            _bind(path, root + path)
            _make_read_only(root + path)
    for path, target in options["links"].items():
        os.symlink(target, root + path)
    os.mkdir(f"{root}/dev")
    for path in _DEVICES:
        os.close(os.open(root + path, os.O_CREAT | os.O_WRONLY))
        _bind(path, root + path)
    os.mkdir(f"{root}/tmp")
    os.chmod(f"{root}/tmp", 0o777)
    os.mkdir(f"{root}/proc")
    _libc.mount(b"proc", f"{root}/proc".encode(), b"proc", _MS_NOSUID, None)  # some containers forbid it; then without
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/tmp")


def _bind(source: str, target: str) -> None:
    _call("mount", source.encode(), target.encode(), None, _MS_BIND | _MS_REC, None)


def _make_read_only(path: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    if _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, size) < 0:
        raise OSError(ctypes.get_errno(), f"mount_setattr: {os.strerror(ctypes.get_errno())}")


def _drop_capabilities() -> None:
    """Gives up what a user namespace's first process may do inside it; none can be had again."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    _call("capset", header, (ctypes.c_uint32 * 6)())


def _limit(options: dict[str, Any], tasks: int) -> None:
    """Sets what the kernel enforces for each process. tasks: those of its user that are not the program's."""
    limits = {
        resource.RLIMIT_AS: options["memory_mb"] * _MIB,
        resource.RLIMIT_CPU: options["cpu_s"],
        resource.RLIMIT_FSIZE: options["disk_mb"] * _MIB,
        resource.RLIMIT_NOFILE: options["open_files"],
        resource.RLIMIT_NPROC: options["processes"] + tasks,
        resource.RLIMIT_CORE: 0,
    }
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
