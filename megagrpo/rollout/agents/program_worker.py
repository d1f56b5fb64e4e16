"""The process that runs agent programs: `python -m megagrpo.rollout.agents.program_worker FD
FUNCTION HOST`.

A program is a function or a command. A command gets the endpoint in its environment and the row on
standard input, and writes the reward as the last line of standard output. When the socket closes,
the process ends, with everything that it started.
"""

import asyncio
import inspect
import json
import math
import os
import signal
import sys
from asyncio import to_thread
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from numbers import Real

from megagrpo.system.environment import API_KEY, USER_PATH, bypass_proxies, child_environment
from megagrpo.system.errors import explained, translated
from megagrpo.system.processes import dies_with_parent, stop_tree
from megagrpo.system.user_function import load_function
from megagrpo.system.worker_process import answer_calls_concurrently

# (base_url=, key=, row=, **args) -> reward or {"reward", "turn_rewards", "info", *MEASURED}
Program = Callable

_THREADS = 1024  # programs that are no coroutines, at once
COMMAND = "megagrpo.rollout.agents.program_worker:run_command"
BUILT_IN = {
    "harbor": "megagrpo.environments.harbor.program:play_harbor",
    "verifiers": "megagrpo.environments.verifiers_program:play_verifiers",
}
MEASURED = ("sandbox_s", "sandbox_killed")  # numbers that a program may return, for metrics
_TAIL = 2**20  # bytes at the end of a command's output, which are read
_PIECE = 2**16
_POLL_S = 0.2


def load_program(name: str) -> Program:
    """Imports the user's agent function, or a built-in one. Raises ValueError."""
    return load_function(name, BUILT_IN, "sampling.agent.function")


def read_result(value: object) -> tuple[float, list[float] | None, str, dict[str, float]]:
    """Returns (reward, rewards of turns, note, MEASURED) from the value that a program returned.
    Raises ValueError for anything else."""
    result: dict = dict(value) if isinstance(value, Mapping) else {"reward": value}
    measured = {name: float(result.pop(name)) for name in MEASURED if _is_number(result.get(name))}
    turns, note = result.get("turn_rewards"), result.get("info") or ""
    if turns is not None:
        if not (isinstance(turns, Sequence) and all(map(_is_number, turns))):
            raise ValueError(
                f"it returned the turn_rewards {turns!r:.80}, not a list of finite numbers"
            )
        turns = list(map(float, turns))
        result.setdefault("reward", sum(turns))
    reward = result.get("reward")
    if not _is_number(reward) or result.keys() - {"reward", "turn_rewards", "info"}:
        raise ValueError(
            f"it returned {value!r:.80}, not a finite reward or {{reward, turn_rewards, info}}"
        )
    if not isinstance(note, str):
        note = json.dumps(note, default=str)
    return float(reward or 0), turns, note[:1000], measured


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def foreign_environment(variables: dict[str, str]) -> dict[str, str]:
    """Returns this process's environment with these variables and the user's PYTHONPATH, for a
    program that may have another interpreter and must not reach the engines.
    """
    private = (USER_PATH, API_KEY, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    inherited = child_environment(variables)
    inherited["PYTHONPATH"] = inherited[USER_PATH]
    return {name: value for name, value in inherited.items() if name not in private}


async def run_command(
    base_url: str, key: str, row: Mapping[str, object], command: Sequence[str]
) -> object:
    """Returns the JSON of the last line that the command prints. Raises RuntimeError if the command
    fails, ValueError if the line is not JSON. Cancellation ends the command and everything that it
    started.
    """
    variables = {
        "MEGAGRPO_BASE_URL": base_url,
        "MEGAGRPO_KEY": key,
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
    }
    process = await asyncio.create_subprocess_exec(
        *command,
        env=foreign_environment(variables),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=dies_with_parent(os.getpid(), signal.SIGKILL),
    )
    assert process.stdin is not None and process.stdout is not None, "pipes"
    output = bytearray()
    reading = asyncio.create_task(_read_end(process.stdout, output))
    async with AsyncExitStack() as stack:
        stack.callback(reading.cancel)
        stack.push_async_callback(asyncio.wait, [reading], timeout=_POLL_S)
        # with everything that it left behind
        stack.push_async_callback(to_thread, stop_tree, process.pid, 0.0)
        # Not awaited: it may print before it reads, or never read.
        process.stdin.write(json.dumps(row).encode() + b"\n")
        process.stdin.close()
        # `wait` may wait for the pipe too, which a child that was left behind holds
        while process.returncode is None:
            await asyncio.sleep(_POLL_S)
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with exit code {process.returncode}")
    last = output.rstrip().rpartition(b"\n")[2].decode(errors="replace")
    with explained(f"the last line that {command[0]} printed is no reward in JSON: {last!r:.200}"):
        return json.loads(last)


async def _read_end(stream: asyncio.StreamReader, output: bytearray) -> None:
    while piece := await stream.read(_PIECE):
        output += piece
        del output[:-_TAIL]


async def serve_programs(fd: int, function: str, host: str) -> None:
    """Runs programs until the socket is closed. host: of their endpoint."""
    bypass_proxies(host)
    program = load_program(function)
    is_async = inspect.iscoroutinefunction(program)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))

    async def run(arguments: Mapping[str, object]) -> object:
        # asyncio would end the loop, with all other programs
        with translated("it calls sys.exit", SystemExit, raised=RuntimeError):
            result = program(**arguments) if is_async else await to_thread(program, **arguments)
            # also of an async function behind a decorator
            return read_result(await result if inspect.isawaitable(result) else result)

    await answer_calls_concurrently(fd, run, cancels=is_async)  # a thread would go on
    sys.stdout.flush()
    os._exit(0)  # a thread of a program may go on for ever


if __name__ == "__main__":
    asyncio.run(serve_programs(int(sys.argv[1]), *sys.argv[2:]))
