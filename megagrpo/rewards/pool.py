"""Graders in killable processes: every response gets one outcome within the time limit, whatever the grader does."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any

from megagrpo.config.schema import RewardConfig
from megagrpo.environment import child_environment
from megagrpo.rewards.graders import load_grader
from megagrpo.types import Outcome, Prompt

_START_TIMEOUT_S = 120.0  # an import (sympy on a busy machine), not a response


class WorkerError(RuntimeError):
    """Raised when a worker process did not start or ended by itself."""


class RewardPool:
    """Runs `config.workers` grading processes, each fed by one thread. Use as a context manager, or call `close`.

    Raises ValueError at once when the grader is unknown, cannot be imported or does not take its arguments, and
    WorkerError when a worker process does not start.
    """

    def __init__(self, config: RewardConfig):
        self._config = config
        self._checked: set[str] = set()
        self._check(config.grader)
        self._tasks: queue.SimpleQueue[tuple[Future[Outcome], dict[str, Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        with ExitStack() as on_failure:
            for _ in range(config.workers):
                self._workers.append(_Worker(config.grader, config.args))
                on_failure.callback(self._workers[-1].kill)
            problems = [worker.wait_ready() for worker in self._workers]
            if any(problems):
                raise WorkerError(next(filter(None, problems)))
            on_failure.pop_all()
        self._threads = [threading.Thread(target=self._serve, args=(i,), daemon=True) for i in range(config.workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, prompt: Prompt, text: str) -> Future[Outcome]:
        """Returns the outcome of one response, once it is known.

        `prompt.grader`, when set, replaces the configured grader; `reward.args` belong to the configured one. Raises
        ValueError when the prompt names a grader that cannot be loaded.
        """
        assert not self._closed, "submit after close"
        grader = prompt.grader or self._config.grader
        self._check(grader)
        request = {
            "grader": grader,
            "args": self._args(grader),
            "text": text,
            "answer": prompt.answer,
            "timeout_s": self._config.timeout_s,
        }
        future: Future[Outcome] = Future()
        self._tasks.put((future, request))
        return future

    def close(self) -> None:
        """Ends every worker process now; responses not graded yet get an error outcome."""
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

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _args(self, grader: str) -> dict[str, Any]:
        return self._config.args if grader == self._config.grader else {}

    def _check(self, grader: str) -> None:
        if grader not in self._checked:
            load_grader(grader, self._args(grader))
            self._checked.add(grader)

    def _serve(self, index: int) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            future, request = task
            if not future.set_running_or_notify_cancel():
                continue
            if self._closed:
                future.set_result(Outcome("error", detail="the reward pool was closed"))
                continue
            future.set_result(self._grade(index, request))

    def _grade(self, index: int, request: dict[str, Any]) -> Outcome:
        worker = self._workers[index]
        try:
            reply = worker.ask(request)
        except TimeoutError:
            outcome = Outcome("timeout", detail=f"{request['grader']} gave no result in {request['timeout_s']:g} s")
        except (OSError, WorkerError) as exc:
            outcome = Outcome("error", detail=f"{request['grader']}: the worker process died: {exc}")
        else:
            return Outcome("error", detail=reply["error"]) if "error" in reply else Outcome("score", reply["value"])
        self._replace(index)
        return outcome

    def _replace(self, index: int) -> None:
        """Puts a new process in place of a dead or hung one.

        If it cannot start, its next response is an error outcome.
        """
        self._workers[index].kill()
        with self._lock:
            if self._closed:
                return
            worker = self._workers[index] = _Worker(self._config.grader, self._config.args)
        worker.wait_ready()  # here, so that its imports are not on the next response's clock


class _Worker:
    """Holds one grading process in its own process group, so that what a grader started dies with it."""

    def __init__(self, grader: str, args: dict[str, Any]):
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "megagrpo.rewards.worker", str(theirs.fileno()), grader, json.dumps(args)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a grader prints goes to the log
                env=child_environment(python_path=[path or os.getcwd() for path in sys.path]),
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

    def _read(self) -> bytes:
        line = self._stream.readline()
        if not line.endswith(b"\n"):
            try:
                raise WorkerError(f"exit code {self._process.wait(timeout=1)}")
            except subprocess.TimeoutExpired:
                raise WorkerError("it closed its socket") from None
        return line
