"""Plays a rollout against its environment: the model's turns on exact ids, what the environment
says between them."""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from megagrpo.rollout.agents.environments import EnvironmentFailed, Environments, Episode
from megagrpo.rollout.response import Response, SampleTurn
from megagrpo.types import Outcome

_TRIES = {"infrastructure": 3, "data": 2}  # by what ended the one before
_PAUSE_S = 0.25  # doubled before each further try


def _nothing() -> Response:
    return Response(np.zeros(0, np.int32), np.zeros(0, np.float32), "stop", 0)


@dataclass
class Part:
    """One sample of a rollout."""

    prompt_ids: np.ndarray | None  # [T] int32; None: the group's prompt
    response: Response = field(default_factory=_nothing)
    masks: list[np.ndarray] = field(
        default_factory=list
    )  # bool, False on what the environment said

    def add(self, response: Response, sampled: bool) -> None:
        """Appends a turn. sampled: whether it is trained on."""
        self.response = self.response.then(response) if self.masks else response
        self.masks.append(np.full(len(response.token_ids), sampled))

    def add_said(self, ids: np.ndarray) -> None:
        """Appends ids [T] int32 that no turn sampled: what an environment or a tool said."""
        said = Response(ids, np.zeros(len(ids), np.float32), "stop", self.response.newest_version)
        self.add(said, sampled=False)

    @property
    def loss_mask(self) -> np.ndarray:
        """[T] bool."""
        return np.concatenate(self.masks) if self.masks else np.zeros(0, np.bool_)


@dataclass
class Played:
    """A rollout so far."""

    parts: list[Part] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)  # (last token of a turn, reward)
    end: str = "done"  # one of ENDS
    stopped: str = ""  # by which limit, in words

    @property
    def num_tokens(self) -> int:
        """Counts the tokens of all responses."""
        return sum(len(part.response.token_ids) for part in self.parts)

    def outcome(self, by_turn: bool) -> Outcome:
        """Returns the sum of the rewards; by_turn: each belongs to the last token of its turn."""
        token_rewards = (
            tuple((index, reward) for index, reward in self.rewards if reward) if by_turn else ()
        )
        rewards = tuple(reward for _, reward in self.rewards)
        return Outcome("score", sum(rewards), self.stopped, {}, token_rewards, self.end, rewards)

    def stop(self, end: str, detail: str) -> None:
        """Ends it by a limit."""
        self.end, self.stopped = end, detail
        self.parts[-1].response = replace(self.parts[-1].response, finish_reason="length")


async def play_rollout(
    environments: Environments,
    task: tuple[Mapping[str, object], int],
    turn: SampleTurn,
    prompt: np.ndarray,
    max_tokens: int,
    decode: Callable[[np.ndarray], str],
) -> tuple[Played, Outcome]:
    """Plays a rollout to its end, from its beginning again if what it needs was lacking: 3 times in
    all, elsewhere.

    task: row and seed. See `play` for the others. A rollout that failed has an outcome without a
    score.
    """
    failed: EnvironmentFailed | None = None
    for attempt in itertools.count(1):
        played = Played()
        try:
            async with environments.episode(*task, failed.worker if failed else None) as episode:
                await play(played, episode, environments, turn, prompt, max_tokens, decode)
            outcome = played.outcome(environments.config.credit == "turn")
            break
        except EnvironmentFailed as exc:
            failed = exc
        except ValueError as exc:  # what it said cannot be rendered
            failed = EnvironmentFailed("error", str(exc))
        if attempt >= _TRIES.get(failed.end, 1):
            outcome = Outcome(
                "timeout" if failed.end == "timeout" else "error",
                detail=str(failed),
                end=failed.end,
            )
            break
        environments.used.begun_again += 1
        await asyncio.sleep(_PAUSE_S * 2**attempt)
    environments.used.rollouts += 1
    return played, outcome


async def play(
    played: Played,
    episode: Episode,
    environments: Environments,
    turn: SampleTurn,
    prompt: np.ndarray,
    max_tokens: int,
    decode: Callable[[np.ndarray], str],
) -> None:
    """Fills `played` until the environment is done or a limit is met.

    prompt: ids [T] of the group's prompt. max_tokens: limit of a sample's response, of what the
    environment said too; a message that leaves no room for another token is not put in. Raises as
    Environments.episode does.
    """
    config, renderer = environments.config, environments.renderer
    said = await episode.reset()
    for number in range(config.max_turns):
        if (
            config.episode_timeout_s is not None
            and number
            and episode.seconds > config.episode_timeout_s
        ):
            return played.stop("time", f"its environment took {episode.seconds:.1f} s")
        fresh = number == 0 or config.history == "last"
        if fresh:
            played.parts.append(Part(None if said is None else renderer.start(said)))
        part, known = played.parts[-1], 0
        begin = prompt if part.prompt_ids is None else part.prompt_ids
        if not fresh:
            known = len(begin) + len(part.response.token_ids) - 1
            ids = renderer.after_turn(said or "")
            if len(part.response.token_ids) + len(ids) >= max_tokens:
                return played.stop("tokens", "no room for another turn")
            part.add_said(ids)
        context = np.concatenate([begin, part.response.token_ids])
        asked = time.monotonic()
        sampled = await turn(number, context, max_tokens - len(part.response.token_ids), known)
        environments.used.engines_s += time.monotonic() - asked
        part.add(sampled, sampled=True)
        if sampled.finish_reason != "stop":
            return played.stop("tokens", "a turn reached the limit of tokens")
        said, reward, done = await episode.step(decode(sampled.token_ids))
        played.rewards.append((played.num_tokens - 1, reward))
        if done:
            return None
    return played.stop("turns", f"{config.max_turns} turns")
