"""The process that runs environments: `python -m megagrpo.rollout.agents.worker FD FUNCTION`.

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
    """Returns what an exception of an environment means for its rollout, one of ENDS."""
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
    """Returns what a method gives, checked. Raises what it raises, and ValueError for what it
    should not return."""

    def result_of(value: object) -> object:
        return loop.run_until_complete(value) if inspect.iscoroutine(value) else value

    if method == "make":
        row, seed, options = arguments
        episodes[number] = result_of(make(row, seed, **options))
        return None
    if method == "close":
        if hasattr(environment := episodes.pop(number, None), "close"):
            result_of(environment.close())
        return None
    found = result_of(getattr(episodes[number], method)(*arguments))
    if method == "reset":
        return _said(found, method)
    if not isinstance(found, Sequence) or len(found) != 3:
        raise ValueError(f"step returned {found!r:.80}, not (message, reward, done)")
    said, reward, done = found
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise ValueError(f"step returned the reward {reward!r:.80}, not a finite number")
    return [_said(said, method), float(reward), bool(done)]


def _said(said: object, method: str) -> object:
    if said is None or isinstance(said, str):
        return said
    for each in said if isinstance(said, list) else [None]:
        if not isinstance(each, dict) or not {"role", "content"} <= each.keys():
            raise ValueError(
                f"{method} returned {said!r:.80}, not a text or a list of "
                "messages with role and content"
            )
        if not isinstance(each["content"], str):
            raise ValueError(f"{method} returned {said!r:.80}: the content of a message is a text")
    return said


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
