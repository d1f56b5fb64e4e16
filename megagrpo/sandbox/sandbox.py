"""Runs one untrusted Python program in separate processes, within limits, and returns how it ended.

The package's docstring says what this stops and what it does not.
"""

import ctypes
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, TypedDict

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)
_CHILD = Path(__file__).with_name("child.py")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_END_S = 10.0  # the supervisor needs milliseconds; a machine that swaps, more
_READ_BYTES = 2**16  # at once
_REMEDY = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, a container's seccomp "
    "profile that permits unshare and mount) on Linux 5.12 or later, or set isolation: off in the "
    "args to run them within limits only, with network and readable files in reach"
)


class SandboxError(RuntimeError):
    """Raised if the sandbox itself failed; never the program's fault."""


@dataclass(frozen=True)
class Limits:
    """Resources of one program."""

    wall_s: float  # seconds until it must have ended
    memory_mb: int  # MiB of address space a process, and of resident memory of all together
    output_kb: int  # KiB of standard output and error together
    disk_mb: int  # MiB of files
    open_files: int  # of one process
    processes: int  # and threads, all together


@dataclass(frozen=True)
class Ended:
    """The exit and the output of a program."""

    # "time limit", "memory limit", "output limit", or "" for a program that ended by itself
    limit: str
    code: int  # exit code, negative for a signal
    stdout: bytes
    stderr: bytes

    @property
    def problem(self) -> str:
        """The reason for a failure in a few words; "" for success."""
        if self.limit or self.code == 0:
            return self.limit
        lines = self.stderr.decode(errors="replace").strip().splitlines()
        return ": ".join([f"exit code {self.code}", *(line[:200] for line in lines[-1:])])


_TRIVIAL = Limits(wall_s=_END_S, memory_mb=512, output_kb=1, disk_mb=1, open_files=32, processes=1)


def isolation() -> str:
    """Returns "" if the kernel isolates programs, else the reason, which may be gone the next time.
    Tries it with a trivial program."""
    try:
        return run_program("import socket", b"", _TRIVIAL, isolate=True).problem
    except SandboxError as exc:
        return str(exc)


def machine_problem(options: Mapping[str, object]) -> str:
    """Returns why this machine does not isolate programs, with the remedy; "" if it does, or if
    these args of a grader or an environment turn isolation off."""
    problem = options.get("isolation") != "off" and isolation()
    if not problem:
        return ""
    return f"programs cannot be isolated here ({problem}): {_REMEDY}"


@cache
def isolates(wish: str) -> bool:
    """Returns whether programs run in private namespaces. wish: "required" or "off".

    Raises SandboxError if they cannot run here as wished.
    """
    problem = machine_problem({"isolation": wish})
    if problem:
        raise SandboxError(problem)
    if wish == "required":
        return True
    # programs never run as root, because limits would not bind them
    problem = run_program("import socket", b"", _TRIVIAL, isolate=False).problem
    if problem:
        raise SandboxError(
            f"another user than root cannot run {interpreter()} ({problem}); install it elsewhere"
        )
    return False


def run_program(source: str, stdin: bytes, limits: Limits, isolate: bool) -> Ended:
    """Runs a program to its end or to a limit. Raises SandboxError."""
    deadline = time.monotonic() + limits.wall_s
    with Sandbox("script", source, limits, isolate, stdin=stdin) as sandbox:
        return sandbox.finish(deadline)


class Report(TypedDict, total=False):
    """The supervisor's report: exit code and the limit that was reached, or the reason why the
    sandbox could not be set up."""

    code: int
    reason: str
    setup: str


class Sandbox(AbstractContextManager["Sandbox"]):
    """The processes of one program; the end of the block ends them all and removes their files.

    mode: "script" runs a program; "serve" and "test" are the two sides of calls.py, connected by
    the file descriptors `pipes`, which the caller closes.
    """

    def __init__(
        self,
        mode: str,
        source: str,
        limits: Limits,
        isolate: bool,
        *,
        stdin: bytes = b"",
        pipes: dict[str, int] | None = None,
    ):
        pipes = pipes or {}
        self._limits = limits
        self._isolated = isolate
        self._ended: Report | None = None
        self._others: set[int] = set()
        if not isolate:
            # a program could kill its supervisor: its orphans must become children of this process
            self._others = {process.pid for process in psutil.Process().children(recursive=True)}
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        with ExitStack() as stack, ExitStack() as theirs:
            scratch = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True)
            )
            folder = Path(scratch)
            (folder / "program.py").write_text(source, encoding="utf-8", errors="surrogatepass")
            (folder / "stdin").write_bytes(stdin)
            control, ours = os.pipe()
            theirs.callback(os.close, control)
            self._close_control = stack.enter_context(ExitStack())
            self._close_control.callback(os.close, ours)
            status_read, status = os.pipe()
            theirs.callback(os.close, status)
            self._status: IO[bytes] = stack.enter_context(open(status_read, "rb"))
            fds = {"control": control, "status": status, **pipes}
            options = {"mode": mode, "scratch": scratch, "isolate": isolate, **fds}
            self._process = _start_supervisor(options, limits, list(fds.values()))
            stack.enter_context(self._process)
            stack.callback(self.stop)
            self._stack = stack.pop_all()

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def finish(self, deadline: float) -> Ended:
        """Reads the output until the program ends, or until a limit or the deadline (of
        time.monotonic).

        Raises SandboxError.
        """
        output = {"stdout": bytearray(), "stderr": bytearray()}
        limit = ""
        with selectors.DefaultSelector() as selector:
            selector.register(self._status, selectors.EVENT_READ)
            for name, chunks in output.items():
                selector.register(getattr(self._process, name), selectors.EVENT_READ, chunks)
            # until both streams are closed and the supervisor has reported
            while selector.get_map() and not limit:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                for key, _ in ready:
                    data = os.read(key.fd, _READ_BYTES) if key.data is not None else b""
                    if data:
                        key.data.extend(data)
                    else:
                        selector.unregister(key.fileobj)
                if not ready:
                    limit = "time limit"
                elif sum(map(len, output.values())) > 1024 * self._limits.output_kb:
                    limit = "output limit"
        ended = self.stop()
        return Ended(limit or ended["reason"], ended["code"], *map(bytes, output.values()))

    def stop(self) -> "Report":
        """Ends the program and its children, if they still run; returns the supervisor's report.

        Raises SandboxError.
        """
        if self._ended is None:
            self._close_control.close()
            self._ended = self._read_report()
        if "setup" in self._ended:
            raise SandboxError(self._ended["setup"])
        return self._ended

    def _read_report(self) -> "Report":
        text = self._status.read() if wait([self._status.fileno()], _END_S) else b""
        if not text:
            self._process.kill()
        code = self._process.wait()
        if text:
            return json.loads(text)
        if self._isolated:
            raise SandboxError(
                "the supervisor of a program ended with exit code "
                f"{code}, or not within {_END_S:g} s"
            )
        for orphan in psutil.Process().children(recursive=True):  # this process is their subreaper
            if orphan.pid not in self._others:
                with suppress(psutil.Error):
                    orphan.kill()
                    orphan.wait(_END_S)
        return {"code": code, "reason": "killed its supervisor"}


def _start_supervisor(
    options: dict[str, object], limits: Limits, fds: list[int]
) -> "subprocess.Popen[bytes]":
    """Starts child.py with these options, the limits, and the paths that a program can see.

    The folder `scratch` has the program's standard input. Only the output of a script comes back.
    """
    folder = Path(str(options["scratch"]))
    readable, links = system_paths()
    options |= asdict(limits) | {
        "cpu_s": int(limits.wall_s) + 1,
        "readable": readable,
        "links": links,
    }
    output = subprocess.PIPE if options["mode"] == "script" else subprocess.DEVNULL
    with (folder / "stdin").open("rb") as stdin:
        return subprocess.Popen(
            [interpreter(), "-I", "-S", "-X", "utf8", str(_CHILD), json.dumps(options)],
            stdin=stdin,
            stdout=output,
            stderr=output,
            pass_fds=fds,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            cwd=folder,
            start_new_session=True,
        )


def system_paths() -> tuple[list[str], dict[str, str]]:
    """Returns the folders of the system and of the interpreter, and the system's links, by their
    paths."""
    prefixes = (os.path.realpath(sys.base_prefix), sys.base_prefix)
    folders = [path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    links = {path: os.readlink(path) for path in _SYSTEM if os.path.islink(path)}
    return [*folders, *dict.fromkeys(prefixes)], links


def interpreter() -> str:
    """Returns the interpreter outside its virtual environment, because programs cannot see that
    folder."""
    return str(getattr(sys, "_base_executable", sys.executable))
