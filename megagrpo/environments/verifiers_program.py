"""The agent program `verifiers`: an environment from that library, played in the interpreter that
has the library.

verifiers and SGLang need different versions of openai, so they cannot share an interpreter. A
process of the other interpreter plays many episodes (verifiers_episodes.py), each against the
endpoint of its rollout.
"""

from collections.abc import Mapping
from pathlib import Path

from megagrpo.rollout.agents.program_worker import foreign_environment
from megagrpo.system.worker_process import WorkerError, WorkerProcess, WorkerSlot

_EPISODES = 500  # of a process: verifiers keeps a client for each endpoint that it has seen
_SCRIPT = Path(__file__).with_name("verifiers_episodes.py")


class _Player:
    """A process of the user's interpreter, for a number of episodes. Coroutines are of one loop."""

    def __init__(self, python: str, environment: str):
        command = (python, str(_SCRIPT), environment, "--serve")
        self._slot = WorkerSlot(lambda: WorkerProcess(command, variables=foreign_environment({})))
        self._name = " ".join(command[:3])
        self._running = 0
        self.left = _EPISODES

    async def play(self, base_url: str, index: int) -> dict[str, object]:
        """Returns the reward of an episode and a note. Raises RuntimeError."""
        self.left -= 1
        self._running += 1
        try:
            process = await self._slot.started()
            result, error = await process.call({"base_url": base_url, "index": index})
        except WorkerError as exc:
            raise RuntimeError(f"{self._name}: its process died: {exc}") from exc
        finally:
            self._running -= 1
            if self.left <= 0 and not self._running:
                self._slot.kill()
        if error is not None:
            raise RuntimeError(error)
        return dict(zip(("reward", "info"), result, strict=True))


_players: dict[tuple[str, str], _Player] = {}


async def play_verifiers(
    base_url: str, key: str, row: Mapping[str, dict], python: str, environment: str
) -> dict[str, object]:
    """Returns the reward of an episode. The row's extra.index is the task's place in its
    environment.

    python: the interpreter that has verifiers. environment: a name, or a TOML file with an [env]
    block. The URL contains the key. Raises ValueError without an index, RuntimeError for an episode
    with an error.
    """
    index = row["extra"].get("index") if isinstance(row["extra"], Mapping) else None
    if not isinstance(index, int):
        raise ValueError(
            f"the row has no extra.index (data.extra_key); {_SCRIPT} "
            f"prints the rows of {environment}"
        )
    player = _players.get((python, environment))
    if player is None or player.left <= 0:
        player = _players[python, environment] = _Player(python, environment)
    return await player.play(base_url, index)
