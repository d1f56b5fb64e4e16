"""The agent program `verifiers`: an environment of that library, played by the interpreter that has
it.

verifiers and SGLang want different versions of openai, so that they cannot share an interpreter. A
process of that one plays many episodes (verifiers_episodes.py), each against its rollout's own
endpoint.
"""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from megagrpo.rollout.agents.program_worker import LONGEST_LINE, foreign_environment
from megagrpo.system.processes import dies_with_parent

_EPISODES = 500  # of a process: verifiers keeps a client for each endpoint that it has seen
_SCRIPT = Path(__file__).with_name("verifiers_episodes.py")


class _Player:
    """A process of the user's interpreter, for a number of episodes. Coroutines are of one loop."""

    def __init__(self, python: str, environment: str):
        self._command = (python, str(_SCRIPT), environment, "--serve")
        self._results: dict[int, asyncio.Future[object]] = {}
        self._numbers = itertools.count()
        self._started = asyncio.ensure_future(self._start())
        self._left = _EPISODES
        self.is_open = True

    async def play(self, base_url: str, index: int) -> dict[str, object]:
        """Returns the reward of an episode and a note. Raises RuntimeError."""
        commands = (await asyncio.shield(self._started)).stdin
        assert commands is not None, "a pipe"
        if self._reading.done():
            raise RuntimeError(f"{' '.join(self._command[:3])} has ended")
        self._left -= 1
        self.is_open = self.is_open and self._left > 0
        number = next(self._numbers)
        result = asyncio.get_running_loop().create_future()
        self._results[number] = result
        with ExitStack() as stack:
            stack.callback(self._end, number, commands)
            commands.write(
                json.dumps([number, {"base_url": base_url, "index": index}]).encode() + b"\n"
            )
            reward, note = await result
        return {"reward": reward, "info": note}

    def _end(self, number: int, commands: asyncio.StreamWriter) -> None:
        """Cancels an episode that has no result, and ends the process after its last one."""
        if self._results.pop(number).cancelled():
            commands.write(json.dumps([number, None]).encode() + b"\n")
        if not self.is_open and not self._results:
            commands.close()

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            env=foreign_environment({}),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE,
            preexec_fn=dies_with_parent(os.getpid(), signal.SIGKILL),
        )
        self._reading = asyncio.ensure_future(self._read(process))
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Gives each result to its episode, until the process is gone."""
        assert process.stdout is not None, "a pipe"
        async for line in process.stdout:
            number, found, error = json.loads(line)
            if (result := self._results.get(number)) is not None and not result.done():
                result.set_exception(RuntimeError(error)) if found is None else result.set_result(
                    found
                )
        self.is_open = False
        code = await process.wait()
        for result in self._results.values():
            if not result.done():
                result.set_exception(
                    RuntimeError(f"{' '.join(self._command[:3])} ended with exit code {code}")
                )


_players: dict[tuple[str, str], _Player] = {}


async def play_verifiers(
    base_url: str, key: str, row: Mapping[str, dict], python: str, environment: str
) -> dict[str, object]:
    """Returns the reward of an episode. The row's extra.index is the task's place in its
    environment.

    python: the interpreter that has verifiers. environment: a name, or a TOML file with an [env]
    block. The key is in the URL. Raises ValueError without an index, RuntimeError for an episode
    with an error.
    """
    index = row["extra"].get("index") if isinstance(row["extra"], Mapping) else None
    if not isinstance(index, int):
        raise ValueError(
            f"the row has no extra.index (data.extra_key); {_SCRIPT} prints the rows of "
            f"{environment}"
        )
    player = _players.get((python, environment))
    if player is None or not player.is_open:
        player = _players[python, environment] = _Player(python, environment)
    return await player.play(base_url, index)
