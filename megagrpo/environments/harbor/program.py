"""The agent program `harbor`: the model writes shell commands, which run in a task's sandbox, and the
task's tests give the reward.

`python -m megagrpo.environments.harbor.program FOLDER ...` prints the rows of all tasks below these
folders for `data.path`.
"""

import json
import re
import shlex
import sys
import time
import tomllib
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from megagrpo.environments.answers import shortened
from megagrpo.environments.harbor.local import Local, reward_in
from megagrpo.rollout.agents.program_worker import foreign_environment
from megagrpo.system.errors import explained
from megagrpo.system.worker_process import WorkerProcess

_ABOUT = """You work on a computer. A shell command between ```bash and ``` runs, and what it prints follows.
Write one command per turn. A turn without a command is your last one: then tests judge your work.

"""
_COMMAND = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)
_LIMITS = ("context_length_exceeded", "max_turns")
_MAX_CHARS = 4000  # the last ones of an output, which the model sees
_LONGEST = 100_000  # bytes of a command: Linux takes 128 KiB for a word of a command line
# keys of task.toml without which a task would be another one
_UNKNOWN = {
    "steps",
    "agent.network_mode",
    "agent.user",
    "environment.healthcheck",
    "environment.mcp_servers",
    "verifier.collect",
    "verifier.environment",
    "verifier.environment_mode",
    "verifier.network_mode",
    "verifier.user",
}
_HOSTED = Path(__file__).with_name("hosted.py")


class Hosted:
    """A sandbox of Harbor's package, in a process of the interpreter that has it."""

    def __init__(self, folder: Path, runtime: str, python: str):
        command = [python or sys.executable, str(_HOSTED), str(folder), runtime]
        self._process = WorkerProcess(command, variables=foreign_environment({}))

    def written(self, text: str) -> str:
        """Returns a command as it stands in a command line."""
        return shlex.quote(text)

    async def run(self, command: str, seconds: float) -> tuple[str, str]:
        """Returns how a command ended, and its output. Raises RuntimeError."""
        return await self._call(command=command, seconds=seconds)

    async def verify(self, seconds: float) -> object:
        """Returns the rewards of the tests; None if they reach the limit. Raises RuntimeError."""
        return await self._call(seconds=seconds)

    async def start(self) -> None:
        """Builds and starts the sandbox. Raises RuntimeError."""
        await self._process.ready()
        await self._call()

    async def close(self) -> None:
        """Ends the process; another one deletes the sandbox in the background."""
        self._process.kill()

    async def _call(self, **message: object):
        result, error = await self._process.call(message)
        if error is not None:
            raise RuntimeError(error)
        return result


async def play_harbor(
    base_url: str,
    key: str,
    row: Mapping,
    runtime: str = "bubblewrap",
    python: str = "",
    introduction: str = _ABOUT,
    command_s: float = 60.0,
) -> dict[str, object]:
    """Returns the reward of the tests of the task in the row's extra.task, a folder; also at a limit
    of turns, of tokens, or of the task's seconds for all commands.

    runtime: bubblewrap, subprocess, or a name that Harbor's package knows. python: the interpreter
    that has the package. introduction: text before that in the row's last message. command_s: seconds
    for a command. Raises ValueError for a row, a task or a runtime that cannot be played,
    RuntimeError for a sandbox that fails.
    """
    folder = Path(str((row["extra"] or {}).get("task") or "extra.task (data.extra_key)"))
    with explained(f"{folder} is not the folder of a task of Harbor"):
        task = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        limits = [task.get(part, {}).get("timeout_sec", 600.0) for part in ("agent", "verifier")]
    _refuse_unknown(task, folder)
    messages = list(row["messages"])
    messages[-1] = messages[-1] | {"content": introduction + messages[-1]["content"]}
    used = 0.0
    killed = 0
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {key}"},
                timeout=aiohttp.ClientTimeout(total=None),  # turns wait for engines
            )
        )
        sandbox: Local | Hosted
        if runtime in ("bubblewrap", "subprocess"):
            sandbox = Local(folder, task, runtime == "bubblewrap")
        else:
            sandbox = Hosted(folder, runtime, python)
        stack.push_async_callback(sandbox.close)
        await sandbox.start()
        while (turn := await _turn(client, base_url, messages)) is not None:
            found = _COMMAND.findall(turn["content"] or "")
            if not found or used >= limits[0]:
                break
            began = time.monotonic()
            command = found[-1]
            end = "exit code 126"
            output = f"it has a null character, or over {_LONGEST:,} bytes"
            if _fits(sandbox.written(command)):
                end, output = await sandbox.run(command, min(command_s, limits[0] - used))
            used += time.monotonic() - began
            killed += end == "time limit"
            said = f"{end}\n```\n{shortened(output, _MAX_CHARS, end=True)}\n```\n"
            messages += [turn, {"role": "user", "content": said}]
        began = time.monotonic()
        rewards = await sandbox.verify(limits[1])
        killed += rewards is None
    return {
        "reward": _reward(rewards, folder),
        "sandbox_s": used + time.monotonic() - began,
        "sandbox_killed": killed,
    }


def _refuse_unknown(task: Mapping, folder: Path) -> None:
    parts = {name: part for name, part in task.items() if isinstance(part, dict)}
    keys = {f"{name}.{key}" for name, part in parts.items() for key in part}
    if unknown := (keys | task.keys()) & _UNKNOWN:
        raise ValueError(f"{folder}/task.toml: no agent here knows {', '.join(sorted(unknown))}")


def _fits(command: str) -> bool:
    return "\0" not in command and len(command.encode()) <= _LONGEST


async def _turn(client: aiohttp.ClientSession, base_url: str, messages: list) -> dict | None:
    """Returns the model's message; None at a limit of the rollout. Raises RuntimeError."""
    request = {"model": "policy", "messages": messages}
    async with client.post(f"{base_url}/chat/completions", json=request) as response:
        answer = await response.json()
    if "error" not in answer:
        return answer["choices"][0]["message"]
    if answer["error"]["code"] in _LIMITS:
        return None
    raise RuntimeError(answer["error"]["message"])


def _reward(rewards: object, folder: Path) -> float:
    """Returns the reward of tests; 0 for those that reached their limit. Raises ValueError."""
    number = 0.0 if rewards is None else reward_in(rewards)
    if number is None:
        raise ValueError(
            f"{folder}/tests/test.sh wrote no number to reward.txt, and none as `reward` to "
            f"reward.json: {rewards!r:.500}"
        )
    return number


if __name__ == "__main__":
    for path in (path for name in sys.argv[1:] for path in sorted(Path(name).rglob("task.toml"))):
        prompt = path.with_name("instruction.md").read_text(encoding="utf-8")
        print(json.dumps({"prompt": prompt, "answer": "", "extra": {"task": str(path.parent)}}))
