"""Runs one untrusted Python program in processes of its own, within limits, and says how it ended.

Where the kernel allows it (Linux 5.12, as root or with user namespaces), a program has namespaces of its own: no
network, no process but its own, no file but the interpreter's, the system's libraries (read-only) and a /tmp of its own
in memory. Elsewhere limits alone hold; `isolation` says which. Not a virtual machine: the kernel is shared.
"""

import ctypes
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)
_CHILD = Path(__file__).with_name("child.py")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_END_S = 10.0  # the supervisor needs milliseconds; a machine that swaps, more
_KEPT_BYTES = 2**16  # read at once


class SandboxError(RuntimeError):
    """Raised when a program could not be run as it should: the sandbox's fault, never the program's."""


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    wall_s: float  # seconds until it must have ended
    memory_mb: int  # MiB of address space a process, and of resident memory of all together
    output_kb: int  # KiB of standard output and error together
    disk_mb: int  # MiB of files
    open_files: int  # of one process
    processes: int  # and threads, all together


@dataclass(frozen=True)
class Ended:
    """How a program ended and what it wrote."""

    limit: str  # "time limit", "memory limit", "output limit", or "" for a program that ended by itself
    code: int  # exit code, negative for a signal
    stdout: bytes
    stderr: bytes

    @property
    def problem(self) -> str:
        """Why it did not end well, in a few words; "" where it did."""
        if self.limit or self.code == 0:
            return self.limit
        lines = self.stderr.decode(errors="replace").strip().splitlines()
        said = f": {lines[-1][:200]}" if lines else ""
        return f"exit code {self.code}{said}"


_TRIVIAL = Limits(wall_s=_END_S, memory_mb=512, output_kb=1, disk_mb=1, open_files=32, processes=1)


@cache
def isolation() -> str:
    """Tries once, with a trivial program, what the kernel allows: "" when it isolates programs, else why not."""
    try:
        return run_program("import socket", b"", _TRIVIAL, isolate=True).problem
    except SandboxError as exc:
        return str(exc)


def check_limits_hold() -> None:
    """Tries a trivial program without isolation. Raises SandboxError, where another user cannot read the interpreter.

    Programs never run as root, whose limits would not bind them.
    """
    if problem := run_program("import socket", b"", _TRIVIAL, isolate=False).problem:
        raise SandboxError(f"another user than root cannot run {_interpreter()} ({problem}); install it elsewhere")


def run_program(source: str, stdin: bytes, limits: Limits, isolate: bool) -> Ended:
    """Runs a program to its end, or to a limit. Raises SandboxError."""
    deadline = time.monotonic() + limits.wall_s
    with Sandbox("script", source, limits, isolate, stdin=stdin) as sandbox:
        return sandbox.finish(deadline)


class Sandbox:
    """Holds the processes of one program. Use as a context manager: leaving it ends them all and removes its files.

    mode, pipes: "script" runs a program; "serve" and "test" do what calls.py says, over these file descriptors,
    which are closed here.
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
        self._limits, self._isolated, pipes = limits, isolate, pipes or {}
        self._ended: dict[str, Any] | None = None
        self._others = set() if isolate else {process.pid for process in psutil.Process().children(recursive=True)}
        if not isolate:  # a program may then kill its supervisor: what it leaves must become a child of this process
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        with ExitStack() as stack:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True))
            folder = Path(scratch)
            (folder / "program.py").write_text(source, encoding="utf-8", errors="surrogatepass")
            (folder / "stdin").write_bytes(stdin)
            options = {**asdict(limits), "cpu_s": int(limits.wall_s) + 1, "mode": mode, "scratch": scratch, **pipes}
            readable = [path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
            options["readable"] = [*readable, *dict.fromkeys((os.path.realpath(sys.base_prefix), sys.base_prefix))]
            options["links"] = {path: os.readlink(path) for path in _SYSTEM if os.path.islink(path)}
            control, ours = os.pipe()
            self._close_control = stack.enter_context(ExitStack())
            self._close_control.callback(os.close, ours)
            status_read, status = os.pipe()
            self._status: IO[bytes] = stack.enter_context(open(status_read, "rb"))
            options |= {"isolate": isolate, "control": control, "status": status}
            theirs = [control, status, *pipes.values()]
            writes = subprocess.PIPE if mode == "script" else subprocess.DEVNULL
            try:
                with (folder / "stdin").open("rb") as given:
                    self._process = subprocess.Popen(
                        [_interpreter(), "-I", "-S", "-X", "utf8", str(_CHILD), json.dumps(options)],
                        stdin=given,
                        stdout=writes,
                        stderr=writes,
                        pass_fds=theirs,
                        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                        cwd=folder,
                        start_new_session=True,
                    )
            finally:
                for fd in theirs:
                    os.close(fd)
            self._stack = stack.pop_all()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.stop()
        finally:
            self._stack.close()
            for stream in filter(None, (self._process.stdout, self._process.stderr)):
                stream.close()

    def finish(self, deadline: float) -> Ended:
        """Reads what the program writes until it ends, or meets a limit or the deadline (of time.monotonic).

        Raises SandboxError.
        """
        streams = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        kept = {name: bytearray() for name in streams}
        with selectors.DefaultSelector() as selector:
            for name, stream in streams.items():
                assert stream is not None, "asked of scripts only"
                selector.register(stream, selectors.EVENT_READ, name)
            limit = self._read_until_ended(selector, kept, deadline)
        ended = self.stop()
        return Ended(limit or ended["reason"], ended["code"], bytes(kept["stdout"]), bytes(kept["stderr"]))

    def _read_until_ended(self, selector: selectors.BaseSelector, kept: dict[str, bytearray], deadline: float) -> str:
        """Returns the limit that was met, "" when both streams were closed and the supervisor has said why."""
        selector.register(self._status, selectors.EVENT_READ, "")
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return "time limit"
            for key, _ in ready:
                data = os.read(key.fd, _KEPT_BYTES) if key.data else b""
                if key.data and data:
                    kept[key.data] += data
                else:
                    selector.unregister(key.fileobj)
            if sum(map(len, kept.values())) > 1024 * self._limits.output_kb:
                return "output limit"
        return ""

    def stop(self) -> dict[str, Any]:
        """Ends the program, if it still runs, with all it started; returns {"code", "reason"} as the supervisor says.

        Raises SandboxError.
        """
        if self._ended is None:
            self._close_control.close()
            self._ended = self._last_words()
        if "setup" in self._ended:
            raise SandboxError(f"a program could not be isolated: {self._ended['setup']}")
        return self._ended

    def _last_words(self) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._status, selectors.EVENT_READ)
            text = self._status.read() if selector.select(_END_S) else b""
        if not text:
            self._process.kill()
        code = self._process.wait()
        if text:
            return json.loads(text)
        if self._isolated:
            raise SandboxError(f"the supervisor of a program ended with exit code {code}, or not within {_END_S:g} s")
        for orphan in psutil.Process().children(recursive=True):  # this process is their subreaper
            if orphan.pid not in self._others:
                with suppress(psutil.Error):
                    orphan.kill()
                    orphan.wait(_END_S)
        return {"code": code, "reason": "killed its supervisor"}


def _interpreter() -> str:
    """Returns the interpreter without its virtual environment, whose folder is not among those that programs see."""
    return str(getattr(sys, "_base_executable", sys.executable))
