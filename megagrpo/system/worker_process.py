"""A process that answers calls, as lines of JSON over a socket: the parent's side and the child's.

The child's first line is null, which means that it is ready. A call is [number, message] and its
answer [number, value, error]; [number, null] asks the child to cancel a call. A child of concurrent
calls answers the message true itself, unless a call holds its thread. The child must not outlive
its parent: an idle one sees the socket close, and the kernel ends a hung one with the thread that
started it.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, TypeVar

import orjson

from megagrpo.system.background import end_tasks
from megagrpo.system.environment import child_environment
from megagrpo.system.processes import end_with_parent

T = TypeVar("T")
Value = Any  # a JSON value
Answer = tuple[Value, str | None]  # a value, or why there is none

START_TIMEOUT_S = 300.0  # for imports (SGLang on a busy machine), not for a call
GRACE_S = 5.0  # for a cancelled call to end by itself
LONGEST_LINE = 2**28  # bytes
_END_S = 10.0  # for a killed process to end
_EXIT_S = 1.0  # between the end of a socket and the end of its process
_POLL_S = 0.02


class WorkerError(RuntimeError):
    """Raised if a worker process did not start, or ended before it answered."""


class WorkerProcess:
    """One process with its own process group and temporary folder, so that killing it also ends its
    children. Use its coroutines in one loop.

    It runs `command` with the number of its socket and `arguments`. variables: its environment,
    besides TMPDIR; None: this process's. Raises OSError if it cannot start.
    """

    def __init__(
        self,
        command: Sequence[str],
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ):
        with ExitStack() as stack:
            scratch = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="megagrpo-worker-", ignore_cleanup_errors=True)
            )
            self._socket, theirs = socket.socketpair()
            stack.enter_context(self._socket)
            if variables is None:
                paths = [path or os.getcwd() for path in sys.path]
                variables = child_environment(python_path=paths)
            with theirs:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), *arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a user's function prints goes to the log
                    env={**variables, "TMPDIR": scratch},
                    start_new_session=True,
                )
            self._resources = stack.pop_all()
        self.num_calls = 0
        self._results: dict[int, asyncio.Future[Answer]] = {}
        self._unanswered: set[int] = set()
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ended = ""  # why it no longer answers
        self._killing = threading.Lock()
        self._reaper: threading.Thread | None = None
        self._retiring: asyncio.Task[None] | None = None  # the last such task
        self.is_retired = False  # it takes no new calls from its slot, and ends with the last one
        self.was_killed = False  # by a SIGKILL that is not ours, such as the kernel's out of memory

    @property
    def is_open(self) -> bool:
        """Returns whether it takes calls."""
        return self._writer is not None and not self._ended and self._reaper is None

    @property
    def is_gone(self) -> bool:
        """Returns whether it has been killed and has ended."""
        return self._reaper is not None and not self._reaper.is_alive()

    async def ready(self) -> None:
        """Returns once the process is ready. If it ends or takes too long, kills it and raises
        WorkerError."""
        with ExitStack() as failure:
            failure.callback(self.kill)
            self._socket.setblocking(False)
            reader, writer = await asyncio.open_connection(
                sock=self._socket.dup(), limit=LONGEST_LINE
            )
            failure.callback(writer.close)
            problem = f"not ready after {START_TIMEOUT_S:g} s"
            with suppress(TimeoutError):
                async with asyncio.timeout(START_TIMEOUT_S):
                    started = await reader.readline()
                problem = ""
                if not started:
                    problem = await self._exit()
            if problem:
                raise WorkerError(
                    f"a worker process did not start ({problem}); its own messages are on stderr"
                )
            failure.pop_all()
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader, writer))

    async def call(self, message: Value) -> Answer:
        """Returns the answer to a message; many calls may be open.

        If it is cancelled, it asks the child to cancel the call. If the child does not within
        GRACE_S, the process is retired: it ends with its other calls, or at once if it does not
        react. Raises WorkerError if the process is gone.
        """
        if not self.is_open:
            raise WorkerError(self._ended or "it was ended")
        number, result = self.num_calls, asyncio.get_running_loop().create_future()
        self.num_calls += 1
        self._results[number] = result
        self._unanswered.add(number)
        with ExitStack() as stack:
            stack.callback(self._forget, number)
            self._write([number, message])
            return await result

    async def only_call(self, message: Value, timeout_s: float) -> Answer:
        """Returns the answer to the only open call. Ends the process if none comes within the limit.

        Raises TimeoutError, and WorkerError if the process is gone.
        """
        with ExitStack() as unanswered:
            unanswered.callback(self.kill)
            async with asyncio.timeout(timeout_s):
                answer = await self.call(message)
            unanswered.pop_all()
        return answer

    async def reacts(self) -> bool:
        """Returns whether a process of concurrent calls answers. Ends it if a call holds its thread.

        Raises WorkerError if the process is gone.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self.call(True)
                return True
        self.kill()
        return False

    def kill(self) -> None:
        """Ends the process and its children, without waiting. Idempotent, in any thread."""
        with self._killing:
            if self._reaper is not None:
                return  # its id may be another process's by now
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._reaper = threading.Thread(target=self._reap, daemon=True, name="reaper")
            self._reaper.start()

    def close(self) -> None:
        """Ends the process as `kill` does, and waits for its end, but not for ever: a process cannot
        be killed during a call to a file system that hangs."""
        self.kill()
        assert self._reaper is not None, "kill starts it"
        self._reaper.join(_END_S)

    def _reap(self) -> None:
        self._process.wait()
        with suppress(ChildProcessError):  # no orphan of its group is ours: a subreaper has some
            while True:
                os.waitpid(-self._process.pid, 0)
        self._resources.close()

    def _write(self, line: Value) -> None:
        assert self._writer is not None, "ready"
        self._writer.write(_json_of(line) + b"\n")

    def _forget(self, number: int) -> None:
        """Ends a call on this side, and if it has no answer also on the other side."""
        del self._results[number]
        if number in self._unanswered and self.is_open:
            self._write([number, None])
            # no task yet: a loop that ends has cancelled its tasks by now, and would leave it behind
            asyncio.get_running_loop().call_later(GRACE_S, self._retire_unless_answered, number)
        if self.is_retired and not self._results:
            self.kill()

    def _retire_unless_answered(self, number: int) -> None:
        if number in self._unanswered:
            self.is_retired = True
            self._retiring = asyncio.create_task(self._kill_unless_it_reacts())

    async def _kill_unless_it_reacts(self) -> None:
        with suppress(WorkerError):
            await self.reacts()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes each answer to its call, until the process ends or writes anything else."""
        with ExitStack() as stack:
            stack.callback(writer.close)
            line = b""
            try:
                async for line in reader:
                    number, value, error = json.loads(line)
                    self._unanswered.remove(number)
                    if (result := self._results.get(number)) is not None and not result.done():
                        result.set_result((value, error))
                self._ended = await self._exit()
            except ConnectionError:  # a process that was killed resets its socket
                self._ended = await self._exit()
            except (ValueError, TypeError, KeyError):
                self._ended = f"it wrote {line!r:.80} to its socket, which answers no call"
            for result in self._results.values():
                if not result.done():
                    result.set_exception(WorkerError(self._ended))
            self.kill()

    async def _exit(self) -> str:
        """Returns how the process ended, in words. It stays a zombie, so that no other process gets
        its id."""
        for _ in range(round(_EXIT_S / _POLL_S)):
            with self._killing:  # else the reaper may have waited for it, and there is no zombie
                if self._reaper is not None:
                    return "it was ended"
                end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if end is not None:
                if end.si_code == os.CLD_EXITED:
                    return f"exit code {end.si_status}"
                self.was_killed = end.si_status == signal.SIGKILL
                return f"exit code -{end.si_status}"
            await asyncio.sleep(_POLL_S)
        return "it closed its socket"


class WorkerSlot:
    """One process, which starts with the first call and is replaced once it has ended.

    Use its coroutines in one loop. busy: a lock for callers that make one call at a time.
    """

    def __init__(self, make: Callable[[], WorkerProcess]):
        self._make = make
        self._starting = asyncio.Lock()
        self._closed = False
        self._processes: list[WorkerProcess] = []  # the current one, and those that are ending
        self.busy = asyncio.Lock()

    @property
    def process(self) -> WorkerProcess | None:
        """Returns the process that takes new calls, if there is one."""
        fit = (each for each in self._processes if each.is_open and not each.is_retired)
        return next(fit, None)

    async def started(self) -> WorkerProcess:
        """Returns a process that takes calls. Raises WorkerError if none can start; the next call
        tries again."""
        async with self._starting:
            if self._closed:
                raise WorkerError("it was closed")
            process = self.process
            if process is None:
                try:
                    process = self._make()
                except OSError as exc:
                    raise WorkerError(f"a worker process cannot start: {exc}") from exc
                self._processes = [*(old for old in self._processes if not old.is_gone), process]
                await process.ready()
            return process

    def close(self) -> None:
        """Ends the process and waits for its end. No other one starts. Idempotent."""
        self._closed = True
        for end in (WorkerProcess.kill, WorkerProcess.close):
            for process in self._processes:
                end(process)


def python_module(name: str) -> list[str]:
    """Returns the command that runs a module of this interpreter as a worker."""
    return [sys.executable, "-P", "-m", name]


def answer_calls(fd: int, answer: Callable[[Value], Value]) -> None:
    """Answers the calls on socket `fd`, one at a time, until it is closed."""
    end_with_parent()
    with socket.socket(fileno=fd) as connection, connection.makefile("rwb") as stream:
        stream.write(b"null\n")
        stream.flush()
        for line in stream:
            number, message = json.loads(line)
            if message is not None:  # else its caller ends this process
                stream.write(_answered(number, partial(answer, message)))
                stream.flush()


async def answer_calls_concurrently(
    fd: int, start: Callable[[Value], Awaitable[Value]], cancels: bool
) -> None:
    """Answers the calls on socket `fd`, any number at a time. When the socket is closed, cancels
    those that are open. cancels: whether a call's task can be cancelled; else a cancelled call goes
    on."""
    end_with_parent()
    running = dict[int, asyncio.Future]()
    reader, writer = await asyncio.open_connection(
        sock=socket.socket(fileno=fd), limit=LONGEST_LINE
    )
    writer.write(b"null\n")

    def report(number: int, task: asyncio.Future) -> None:
        del running[number]
        writer.write(_answered(number, task.result))

    async for line in reader:
        number, message = json.loads(line)
        if message is True:
            writer.write(_answered(number, lambda: None))
        elif message is not None:
            running[number] = asyncio.ensure_future(start(message))
            running[number].add_done_callback(partial(report, number))
        elif number in running and cancels:
            running[number].cancel()
    await end_tasks(running.values())


def attempted(attempt: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Returns the value, or None and the exception: SystemExit too is the result of a call."""
    try:
        return attempt(), None
    except BaseException as exc:
        return None, exc


def _json_of(value: Value) -> bytes:
    """Returns JSON, of texts in lists by orjson in a fifth of json's time. Only json keeps NaN and half
    characters."""
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(_json_of, value)) + b"]"
    if isinstance(value, str):
        with suppress(TypeError):
            return orjson.dumps(value)
    return json.dumps(value).encode()


def _answered(number: int, attempt: Callable[[], Value]) -> bytes:
    """Returns the line that answers a call."""
    line, raised = attempted(lambda: json.dumps([number, attempt(), None]))
    if line is None:
        # an exception of a user's may fail to make its text
        text, _ = attempted(lambda: f"{type(raised).__name__}: {raised}")
        line = json.dumps([number, None, text or type(raised).__name__])
    return line.encode() + b"\n"
