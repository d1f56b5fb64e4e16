"""The process that runs environments: `python -m megagrpo.rollout.agents.environment_worker FD FUNCTION`.

One call at a time, for any number of episodes.
"""

import asyncio
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from numbers import Real

from megagrpo.rollout.agents import Unavailable, UnusableRow
from megagrpo.rollout.agents.environments import load_environment
from megagrpo.system.worker_process import answer_calls, attempted

# reset() -> text, messages or None; step(text) -> (text, messages or None, reward, done); close()
Environment = object


def main(fd: int, function: str) -> None:
    """Answers calls until the socket is closed: [episode, method, arguments] -> [result, error,
    end]."""
    make = load_environment(function)
    loop = asyncio.new_event_loop()
    episodes = dict[int, Environment]()

    def answer(message: Sequence) -> list:
        number, method, arguments = message
        result, raised = attempted(lambda: _called(loop, make, episodes, number, method, arguments))
        if raised is None:
            return [result, None, ""]
        error = f"{function}: {method} raised {type(raised).__name__}: {raised}"
        return [None, error, _end(raised)]

    answer_calls(fd, answer)


def _end(raised: BaseException | None) -> str:
    """Returns how an exception of an environment ends the rollout, one of ENDS."""
    match raised:
        case UnusableRow():
            return "data"
        case Unavailable() | ConnectionError():
            return "infrastructure"
    return "error"


def _called(
    loop: asyncio.AbstractEventLoop,
    make: Callable[..., Environment],
    episodes: dict[int, Environment],
    number: int,
    method: str,
    arguments: list,
) -> object:
    """Returns the checked result of a method. Raises its exceptions, and ValueError for a wrong
    result."""

    def result_of(value: object) -> object:
        return loop.run_until_complete(value) if inspect.iscoroutine(value) else value

    if method == "make":
        row, seed, options = arguments
        episodes[number] = result_of(make(row, seed, **options))
        return None
    if method == "close":
        close = getattr(episodes.pop(number, None), "close", None)
        if close is not None:
            result_of(close())
        return None
    result = result_of(getattr(episodes[number], method)(*arguments))
    if method == "reset":
        return _checked(result, method)
    if not isinstance(result, Sequence) or len(result) != 3:
        raise ValueError(f"step returned {result!r:.80}, not (message, reward, done)")
    observation, reward, done = result
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise ValueError(f"step returned the reward {reward!r:.80}, not a finite number")
    return [_checked(observation, method), float(reward), bool(done)]


def _checked(observation: object, method: str) -> object:
    if observation is None or isinstance(observation, str):
        return observation
    for message in observation if isinstance(observation, list) else [None]:
        fields = message if isinstance(message, dict) else {}
        if "role" not in fields or not isinstance(fields.get("content"), str):
            raise ValueError(
                f"{method} returned {observation!r:.80}, not a text or a list of messages with role "
                "and content; the content of a message is a text"
            )
    return observation


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
