"""The agent program `verifiers`: an environment from that library, played in the interpreter that
has the library.

verifiers and SGLang need different versions of openai, so they cannot share an interpreter. A
process of the other interpreter plays many episodes (verifiers_episodes.py), each against the
endpoint of its rollout.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from megagrpo.rollout.agents.program_worker import foreign_environment
from megagrpo.system.errors import translated
from megagrpo.system.worker_process import WorkerError, WorkerProcess, WorkerSlot

_EPISODES = 500  # of a process: verifiers keeps a client for each endpoint that it has seen
_SCRIPT = Path(__file__).with_name("verifiers_episodes.py")


@cache
def _slot(python: str, environment: str) -> WorkerSlot:
    command = (python, str(_SCRIPT), environment, "--serve")
    return WorkerSlot(lambda: WorkerProcess(command, variables=foreign_environment({})))


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
    died = f"{python} {_SCRIPT} {environment}: its process died"
    with translated(died, WorkerError, raised=RuntimeError):
        process = await _slot(python, environment).started()
        process.is_retired |= process.num_calls >= _EPISODES
        result, error = await process.call({"base_url": base_url, "index": index})
    if error is not None:
        raise RuntimeError(error)
    return dict(zip(("reward", "info"), result, strict=True))
