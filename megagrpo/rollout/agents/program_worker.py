"""The process that runs agent programs: `python -m megagrpo.rollout.agents.program_worker FD FUNCTION`.

JSON lines on the socket: [number, arguments] begins a program, [number, null] cancels it; its end is
[number, result, error]. It ends itself, and all that it started, when its socket closes.
"""

import asyncio
import inspect
import json
import math
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from numbers import Real

from megagrpo.rewards.sandbox.calls import tried
from megagrpo.system.user_function import load_function

Program = Callable  # (base_url=, key=, row=, **args) -> reward or {"reward", "turn_rewards", "info"}

LONGEST_LINE = 2**28  # bytes
_THREADS = 1024  # programs that are no coroutines, at once
COMMAND = "megagrpo.rollout.agents.command:run_command"


def load_program(name: str) -> Program:
    """Imports the user's agent function. Raises ValueError."""
    return load_function(name, {}, "sampling.agent.function")


def read_result(value: object) -> tuple[float, list[float] | None, str]:
    """Returns (reward, rewards of turns, note) of what a program returned. Raises ValueError for anything else."""
    found: dict = {"reward": value} if not isinstance(value, Mapping) else dict(value)
    turns, info = found.get("turn_rewards"), found.get("info")
    if turns is not None and not (isinstance(turns, Sequence) and all(map(_is_number, turns))):
        raise ValueError(f"it returned the turn_rewards {turns!r:.80}, not a list of finite numbers")
    reward = found.get("reward", sum(turns) if turns is not None else None)
    if not _is_number(reward) or found.keys() - {"reward", "turn_rewards", "info"}:
        raise ValueError(f"it returned {value!r:.80}, not a finite reward or {{reward, turn_rewards, info}}")
    note = "" if info is None else info if isinstance(info, str) else json.dumps(info, default=str)
    return float(reward or 0), None if turns is None else [float(each) for each in turns], note[:1000]


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


async def serve_programs(fd: int, function: str) -> None:
    """Runs programs until the socket is closed."""
    program, running = load_program(function), dict[int, asyncio.Task]()
    is_async = inspect.iscoroutinefunction(program)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd), limit=LONGEST_LINE)
    writer.write(b"[null, null]\n")
    async for line in reader:
        number, arguments = json.loads(line)
        if arguments is not None:
            work = program(**arguments) if is_async else asyncio.to_thread(program, **arguments)
            running[number] = asyncio.ensure_future(work)
            running[number].add_done_callback(partial(_report, running, number, function, writer))
        elif number in running and is_async:  # a thread would go on
            running[number].cancel()
    for task in running.values():
        task.cancel()
    await asyncio.gather(*running.values(), return_exceptions=True)
    sys.stdout.flush()
    os._exit(0)  # a thread of a program may go on for ever


def _report(
    running: dict[int, asyncio.Task], number: int, function: str, writer: asyncio.StreamWriter, task: asyncio.Task
) -> None:
    """Writes the end of a program."""
    del running[number]
    result, raised = tried(lambda: read_result(task.result()))
    error = None if raised is None else f"{function} raised {type(raised).__name__}: {raised}"
    writer.write(json.dumps([number, result, error]).encode() + b"\n")


if __name__ == "__main__":
    asyncio.run(serve_programs(int(sys.argv[1]), sys.argv[2]))
