"""Functions in killable processes: every call has one result within the time limit, whatever the function does."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from megagrpo.system.environment import child_environment

Call = tuple[str, str, dict[str, Any]]  # kind ("grade" or "group", see worker.py), function, its arguments

_START_TIMEOUT_S = 120.0  # an import (sympy on a busy machine), not a response


class WorkerError(RuntimeError):
    """Raised when a worker process did not start or ended by itself."""


@dataclass(frozen=True)
class Graded:
    """What a grader said: a score for each of its responses, or why there is none."""

    status: str  # "score" | "error" | "timeout"
    scores: tuple[float, ...] = ()
    detail: str = ""  # why there is no score, or what a grader says of it


class WorkerPool:
    """Runs processes, each fed by one thread. Use as a context manager, or call `close`.

    preload: what is imported before the first call. timeout_s: seconds for one call. Raises
    WorkerError when a process does not start.
    """

    def __init__(self, num_workers: int, preload: Sequence[Call], timeout_s: float):
        self._preload, self._timeout_s = list(preload), timeout_s
        self._tasks: queue.SimpleQueue[tuple[Future[Graded], dict[str, Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        with ExitStack() as on_failure:
            for _ in range(num_workers):
                self._workers.append(_Worker(self._preload))
                on_failure.callback(self._workers[-1].kill)
            problems = [worker.wait_ready() for worker in self._workers]
            if any(problems):
                raise WorkerError(next(filter(None, problems)))
            on_failure.pop_all()
        self._threads = [threading.Thread(target=self._serve, args=(i,), daemon=True) for i in range(num_workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Call, inputs: Sequence[Any]) -> Future[Graded]:
        """Returns what a function says of the inputs, once it is known."""
        assert not self._closed, "submit after close"
        future: Future[Graded] = Future()
        kind, function, args = call
        request = {"kind": kind, "function": function, "args": args, "inputs": list(inputs)}
        self._tasks.put((future, request | {"timeout_s": self._timeout_s}))
        return future

    def close(self) -> None:
        """Ends every worker process now; calls without a result get an error."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for worker in self._workers:
                worker.kill()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _serve(self, index: int) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            future, request = task
            if not future.set_running_or_notify_cancel():
                continue
            if self._closed:
                future.set_result(Graded("error", detail="the reward pool was closed"))
                continue
            future.set_result(self._grade(index, request))

    def _grade(self, index: int, request: dict[str, Any]) -> Graded:
        worker, name = self._workers[index], request["function"]
        try:
            reply = worker.ask(request)
        except TimeoutError:
            graded = Graded("timeout", detail=f"{name} gave no result in {request['timeout_s']:g} s")
        except (OSError, WorkerError) as exc:
            graded = Graded("error", detail=f"{name}: the worker process died: {exc}")
        else:
            if "error" in reply:
                return Graded("error", detail=reply["error"])
            return Graded("score", tuple(reply["scores"]), reply["detail"])
        self._replace(index)
        return graded

    def _replace(self, index: int) -> None:
        """Puts a new process in place of a dead or hung one.

        If it cannot start, its next response is an error outcome.
        """
        self._workers[index].kill()
        with self._lock:
            if self._closed:
                return
            worker = self._workers[index] = _Worker(self._preload)
        worker.wait_ready()  # here, so that its imports are not on the next response's clock


class _Worker:
    """Holds one process in its own process group, so that what a grader started dies with it, and its files too."""

    def __init__(self, preload: list[Call]):
        self._scratch = tempfile.TemporaryDirectory(prefix="megagrpo-grader-", ignore_cleanup_errors=True)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "megagrpo.rewards.worker", str(theirs.fileno()), json.dumps(preload)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a grader prints goes to the log
                env=child_environment(
                    {"TMPDIR": self._scratch.name}, python_path=[path or os.getcwd() for path in sys.path]
                ),
                start_new_session=True,
            )
        self._stream = self._socket.makefile("rb")

    def wait_ready(self) -> str:
        """Returns "" when the process can grade. When it ended or says nothing for too long: why, after killing it."""
        try:
            self._socket.settimeout(_START_TIMEOUT_S)
            self._read()
            return ""
        except (OSError, WorkerError) as exc:
            self.kill()
            return f"a reward worker did not start ({exc}); its own messages are on stderr"

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns what the process replies to a request.

        Raises TimeoutError after request["timeout_s"], OSError or WorkerError when the process is gone.
        """
        self._socket.settimeout(request["timeout_s"])
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        return json.loads(self._read())

    def kill(self) -> None:
        """Ends the process and what it started. May be called again."""
        if self._socket.fileno() < 0:
            return  # done before; the process id may by now be another's
        with suppress(ProcessLookupError):  # already gone, and its children too
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._socket.close()
        self._scratch.cleanup()

    def _read(self) -> bytes:
        line = self._stream.readline()
        if not line.endswith(b"\n"):
            try:
                raise WorkerError(f"exit code {self._process.wait(timeout=1)}")
            except subprocess.TimeoutExpired:
                raise WorkerError("it closed its socket") from None
        return line
