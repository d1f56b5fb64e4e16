"""Runs functions in killable processes: each call has a result within its time limit, whatever the function does."""

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
from typing import TypedDict

from megagrpo.config.reward import GraderArgs
from megagrpo.system.environment import child_environment

Call = tuple[str, str, GraderArgs]  # kind ("grade" or "group", see worker.py), function, its arguments

_START_TIMEOUT_S = 120.0  # an import (sympy on a busy machine), not a response


class Request(TypedDict):
    """One call as a line of JSON."""

    kind: str
    function: str
    args: GraderArgs
    inputs: list[object]
    timeout_s: float


class Reply(TypedDict, total=False):
    """The answer to a request: scores and detail, or an error."""

    scores: list[float]
    detail: str
    error: str


class WorkerError(RuntimeError):
    """Raised if a worker process did not start or ended by itself."""


@dataclass(frozen=True)
class Graded:
    """The result of a grader: a score for each response, or the reason why there is none."""

    status: str  # "score" | "error" | "timeout"
    scores: tuple[float, ...] = ()
    detail: str = ""  # why there is no score, or the grader's remark


class WorkerPool:
    """A pool of processes with one thread each. Use as a context manager, or call `close`.

    preload: calls whose functions are imported at start. timeout_s: seconds for one call. Raises WorkerError if a
    process does not start.
    """

    def __init__(self, num_workers: int, preload: Sequence[Call], timeout_s: float):
        self._preload, self._timeout_s = list(preload), timeout_s
        self._tasks: queue.SimpleQueue[tuple[Future[Graded], Request] | None] = queue.SimpleQueue()
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

    def submit(self, call: Call, inputs: Sequence[object]) -> Future[Graded]:
        """Returns a future of the function's result for `inputs`."""
        assert not self._closed, "submit after close"
        future: Future[Graded] = Future()
        kind, function, args = call
        request = Request(kind=kind, function=function, args=args, inputs=list(inputs), timeout_s=self._timeout_s)
        self._tasks.put((future, request))
        return future

    def close(self) -> None:
        """Ends every worker process; calls without a result get an error."""
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

    def _grade(self, index: int, request: Request) -> Graded:
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
        """Replaces a dead or hung process. If the new one cannot start, its next call returns an error."""
        self._workers[index].kill()
        with self._lock:
            if self._closed:
                return
            worker = self._workers[index] = _Worker(self._preload)
        worker.wait_ready()  # now: the imports must not count towards the next call's time limit


class _Worker:
    """One process with its own process group and temporary folder, so that killing it also ends a grader's children."""

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
        """Returns "" once the process is ready. If it ends or times out, kills it and returns the reason."""
        try:
            self._socket.settimeout(_START_TIMEOUT_S)
            self._read()
            return ""
        except (OSError, WorkerError) as exc:
            self.kill()
            return f"a reward worker did not start ({exc}); its own messages are on stderr"

    def ask(self, request: Request) -> Reply:
        """Sends a request and returns the reply.

        Raises TimeoutError after request["timeout_s"], OSError or WorkerError if the process is gone.
        """
        self._socket.settimeout(request["timeout_s"])
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        return json.loads(self._read())

    def kill(self) -> None:
        """Ends the process and its children. Idempotent."""
        if self._socket.fileno() < 0:
            return  # killed before; the process id may have been reused
        with suppress(ProcessLookupError):  # it and its children have ended
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
