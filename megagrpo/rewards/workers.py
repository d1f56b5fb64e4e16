"""Runs functions in killable processes: each call has a result within its time limit, whatever the
function does."""

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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from megagrpo.config.reward import GraderArgs
from megagrpo.rewards.parts import Span
from megagrpo.system.environment import child_environment

Call = tuple[
    str, str, GraderArgs
]  # kind ("grade" or "group", see worker.py), function, its arguments

_START_TIMEOUT_S = 120.0  # an import (sympy on a busy machine), not a response


class WorkerError(RuntimeError):
    """Raised if a worker process did not start or ended by itself."""


@dataclass(frozen=True)
class Graded:
    """The result of a grader: a score for each response, or the reason why there is none."""

    status: str  # "score" | "error" | "timeout"
    scores: tuple[float, ...] = ()
    detail: str = ""  # why there is no score, or the grader's remark
    spans: tuple[Span, ...] = ()  # rewards of parts of the text, besides the score
    tokens: tuple[float, ...] = ()  # rewards of all tokens of the response, besides the score


class WorkerPool:
    """A pool of processes with one thread each, which run until `close`.

    preload: calls whose functions are imported at start. timeout_s: seconds for one call. Raises
    WorkerError if a process does not start.
    """

    def __init__(self, num_workers: int, preload: Sequence[Call], timeout_s: float):
        self._preload, self._timeout_s, self._closed = list(preload), timeout_s, False
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_workers)
        self._workers: set[WorkerProcess] = set()
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._workers.update(self._start() for _ in range(num_workers))
            for worker in self._workers:
                worker.wait_ready()
                self._idle.put(worker)
            on_failure.pop_all()

    def submit(self, call: Call, inputs: Sequence[object]) -> Future[Graded]:
        """Returns a future of the function's result for `inputs`."""
        return self._threads.submit(self._grade, call, list(inputs))

    def close(self) -> None:
        """Ends every worker process; calls without a result get an error. Idempotent."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown()

    def _grade(self, call: Call, inputs: list[object]) -> Graded:
        if self._closed:
            return Graded("error", detail="the reward pool was closed")
        worker = self._idle.get()
        try:
            status, scores, detail, spans, tokens = worker.ask(
                [*call, inputs, self._timeout_s], self._timeout_s
            )
            of_parts = tuple((end, reward) for end, reward in spans)
            graded = Graded(status, tuple(scores), detail, of_parts, tuple(tokens))
        except (OSError, WorkerError) as exc:
            if isinstance(exc, TimeoutError):
                graded = Graded(
                    "timeout", detail=f"{call[1]} gave no result in {self._timeout_s:g} s"
                )
            else:
                graded = Graded("error", detail=f"{call[1]}: the worker process died: {exc}")
            worker = self._replaced(worker)
        self._idle.put(worker)
        return graded

    def _start(self) -> "WorkerProcess":
        return WorkerProcess("megagrpo.rewards.worker", json.dumps(self._preload))

    def _replaced(self, worker: "WorkerProcess") -> "WorkerProcess":
        """Replaces a dead or hung process. If the new one cannot start, its next call returns an
        error."""
        worker.kill()
        with self._lock:
            self._workers.discard(worker)
            if self._closed:
                return worker
            worker = self._start()
            self._workers.add(worker)
        with suppress(WorkerError):
            # now: the imports must not count towards the next call's time limit
            worker.wait_ready()
        return worker


class WorkerProcess:
    """One process with its own process group and temporary folder, so that killing it also ends
    what it started.

    It runs `python -m module FD arguments`, writes a line when it is ready, and answers lines of
    JSON on the socket FD.
    """

    def __init__(self, module: str, *arguments: str):
        self._scratch = tempfile.TemporaryDirectory(
            prefix="megagrpo-worker-", ignore_cleanup_errors=True
        )
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a user's function prints goes to the log
                env=child_environment(
                    {"TMPDIR": self._scratch.name}, [path or os.getcwd() for path in sys.path]
                ),
                start_new_session=True,
            )
        self._stream = self._socket.makefile("rb")

    def wait_ready(self) -> None:
        """Returns once the process is ready. If it ends or times out, kills it and raises
        WorkerError."""
        self._socket.settimeout(_START_TIMEOUT_S)
        try:
            self._read()
        except (OSError, WorkerError) as exc:
            self.kill()
            raise WorkerError(
                f"a worker process did not start ({exc}); its own messages are on stderr"
            ) from exc

    def ask(self, message: object, timeout_s: float) -> list:
        """Returns the answer to a message. Raises TimeoutError, or OSError or WorkerError if the
        process is gone."""
        self._socket.settimeout(timeout_s)
        self._socket.sendall(json.dumps(message).encode() + b"\n")
        return json.loads(self._read())

    @property
    def was_killed(self) -> bool:
        """Returns whether it was ended by a SIGKILL that is not ours, such as the kernel's for want
        of memory."""
        return self._socket.fileno() >= 0 and self._process.poll() == -signal.SIGKILL

    def connection(self) -> socket.socket:
        """Returns the socket once more, for a caller that reads answers in another way than `ask`
        does."""
        self._socket.setblocking(False)
        return self._socket.dup()

    def kill(self) -> None:
        """Ends the process and its children. Idempotent."""
        if self._socket.fileno() < 0:
            return  # killed before; the process id may have been reused
        with suppress(ProcessLookupError):  # it and its children have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with suppress(
            ChildProcessError
        ):  # no orphan of its group is ours: only a subreaper has some
            while True:
                os.waitpid(-self._process.pid, 0)
        self._socket.close()
        self._scratch.cleanup()

    def _read(self) -> bytes:
        line = self._stream.readline()
        if not line.endswith(b"\n"):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1)
            code = self._process.returncode
            raise WorkerError("it closed its socket" if code is None else f"exit code {code}")
        return line
