"""Graders in killable processes: every response gets exactly one outcome, within the time limit, whatever the grader does."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future

from megagrpo.config.schema import RewardConfig
from megagrpo.environment import child_environment
from megagrpo.rewards.graders import load_grader
from megagrpo.types import Outcome, Prompt

_START_TIMEOUT_S = 120.0  # an import (sympy on a busy machine), not a response


class WorkerError(RuntimeError):
    """A worker process did not start or ended by itself."""


class RewardPool:
    """`config.workers` processes, each fed by one thread. Also a context manager.

    Raises ValueError at once when the grader is unknown, cannot be imported or does not take its arguments, and WorkerError
    when no worker process starts.
    """

    def __init__(self, config: RewardConfig):
        self._config = config
        self._checked: set[str] = set()
        self._check(config.grader)
        self._tasks: queue.SimpleQueue[tuple[Future, dict] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        try:
            for _ in range(config.workers):
                self._workers.append(_Worker(config.grader, config.args))
            for worker in self._workers:
                worker.wait_ready()
        except BaseException:
            for worker in self._workers:
                worker.kill()
            raise
        self._threads = [threading.Thread(target=self._serve, args=(i,), daemon=True) for i in range(config.workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, prompt: Prompt, text: str) -> Future[Outcome]:
        """Grade one response. `prompt.grader`, when set, replaces the configured grader; `args` belong to the configured one.

        Raises ValueError when the prompt names a grader that cannot be loaded.
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
        """End every worker process now; responses not graded yet get an error outcome."""
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

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _args(self, grader: str) -> dict:
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

    def _grade(self, index: int, request: dict) -> Outcome:
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
        """A new process in place of a dead or hung one. If it cannot start either, its next response is an error outcome."""
        self._workers[index].kill()
        with self._lock:
            if self._closed:
                return
            worker = self._workers[index] = _Worker(self._config.grader, self._config.args)
        try:
            worker.wait_ready()  # here, so that its imports are not on the next response's clock
        except WorkerError:
            worker.kill()


class _Worker:
    """One grading process in its own process group, so that what a grader started dies with it."""

    def __init__(self, grader: str, args: dict):
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

    def wait_ready(self) -> None:
        """Raises WorkerError when the process ends, or says nothing for too long, before it can grade."""
        try:
            self._socket.settimeout(_START_TIMEOUT_S)
            self._read()
        except (OSError, WorkerError) as exc:
            raise WorkerError(f"a reward worker did not start ({exc}); its own messages are on stderr") from exc

    def ask(self, request: dict) -> dict:
        """Raises TimeoutError after request["timeout_s"], OSError or WorkerError when the process is gone."""
        self._socket.settimeout(request["timeout_s"])
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        return json.loads(self._read())

    def kill(self) -> None:
        if self._socket.fileno() < 0:
            return  # done before; the process id may by now be another's
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # already gone, and its children too
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
