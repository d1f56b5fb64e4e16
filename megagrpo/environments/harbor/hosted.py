"""A sandbox of Harbor's package, in the interpreter that has it; imports nothing from megagrpo.

`PYTHON hosted.py TASK RUNTIME FD` is a worker of megagrpo/system/worker_process.py: {} starts the
sandbox, {"command", "seconds"} -> [end, output], {"seconds"} -> the tests' rewards. A child process in
a session of its own does that, so that it can delete the sandbox after the worker was killed.
"""

import asyncio
import json
import math
import os
import shlex
import socket
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

_REMEDY = (
    "`pip install harbor` into an interpreter of Python 3.12 or later, and name that in "
    "sampling.agent.args.python"
)
_TAIL = 2**16  # bytes of an output
_KILLED = (124, 137)  # exit codes of `timeout`


class Trial:
    """One task in one sandbox."""

    def __init__(self, folder, runtime, scratch):
        from harbor.environments.factory import EnvironmentFactory as Factory
        from harbor.models.environment_type import EnvironmentType
        from harbor.models.task.task import Task
        from harbor.models.trial.paths import TrialPaths
        from harbor.verifier.verifier import Verifier

        task = Task(folder)
        paths = TrialPaths(trial_dir=Path(scratch))
        paths.mkdir()
        make = Factory.create_environment_from_import_path
        if ":" not in runtime:
            runtime = EnvironmentType(runtime)
            make = Factory.create_environment
            try:
                Factory.run_preflight(runtime)
            except SystemExit as exc:  # which would end the loop of this process
                raise RuntimeError(exc) from exc
        self.environment = make(
            runtime,
            environment_dir=task.paths.environment_dir,
            environment_name=task.short_name,
            session_id=f"{task.short_name}-{uuid.uuid4().hex[:8]}",
            trial_paths=paths,
            task_env_config=task.config.environment,
        )
        self.verifier = Verifier(task, paths, self.environment)

    async def answer(self, command=None, seconds=None):
        """Returns the answer to a message."""
        if seconds is None:
            return await self.environment.start(force_build=False)
        if command is None:
            tests = asyncio.create_task(self.verdict())
            # no asyncio.timeout: a provider's own TimeoutError is a sandbox that failed
            await asyncio.wait([tests], timeout=seconds)
            return tests.result() if tests.done() else None
        began = time.monotonic()
        limited = f"timeout -k 5 {math.ceil(seconds)} bash -c {shlex.quote(command)}"
        # through a file: what a model prints has no end, and what it left may hold a pipe open
        kept = f"o=$(mktemp); {limited} > $o 2>&1; c=$?; tail -c {_TAIL} $o; rm $o; exit $c"
        ended = await self.environment.exec(kept)
        late = ended.return_code in _KILLED and time.monotonic() - began >= seconds
        end = "time limit" if late else f"exit code {ended.return_code}"
        return end, (ended.stdout or "") + (ended.stderr or "")

    async def verdict(self):
        """Returns the tests' rewards."""
        # Harbor reads a verdict that a command has left there, perhaps behind a link, if the tests
        # write none
        await self.environment.exec("find /logs/verifier/ -mindepth 1 -delete")
        return (await self.verifier.verify()).rewards


async def serve(folder, runtime, connection, scratch):
    """Answers until the socket closes, then deletes the sandbox."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=2**28)
    writer.write(b"null\n")
    trial = None

    async def answer(message):
        nonlocal trial
        trial = trial or Trial(folder, runtime, scratch)
        return await trial.answer(**message)

    with suppress(ConnectionError):  # a worker that was killed resets the socket
        async for line in reader:
            number, message = json.loads(line)
            if message is None:  # a call that was given up
                continue
            task = asyncio.create_task(answer(message))
            await asyncio.wait([task])  # a provider may raise anything
            exc = task.exception()
            if exc is None:
                said = [number, task.result(), None]
            else:
                hint = f"; {_REMEDY}" * isinstance(exc, ImportError)
                said = [number, None, f"runtime {runtime}: {type(exc).__name__}: {exc}{hint}"]
            writer.write(json.dumps(said).encode() + b"\n")

    if trial is not None:
        await trial.environment.stop(delete=True)


if __name__ == "__main__":
    task, name, fd = sys.argv[1:]
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os.setsid()
    os.dup2(2, 1)
    tempfile.tempdir = "/tmp"  # the worker's own is removed with it
    with tempfile.TemporaryDirectory(prefix="harbor-") as path:
        asyncio.run(serve(task, name, socket.socket(fileno=int(fd)), path))
