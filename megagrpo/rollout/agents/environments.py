"""Environments in killable processes: every call has a result within its time limit, whatever an
environment does."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from megagrpo.config.rollout import EnvironmentConfig
from megagrpo.rollout.agents.answering import RolloutTask, SamplePart
from megagrpo.rollout.agents.renderer import Observation, Renderer
from megagrpo.system.user_function import load_function
from megagrpo.system.worker_process import WorkerError, WorkerProcess, WorkerSlot, python_module
from megagrpo.types import Outcome

if TYPE_CHECKING:  # it pulls in torch, which the processes of environments need not
    from megagrpo.monitor.metrics import Metrics

_MODULE = "megagrpo.rollout.agents.worker"
_BUILT_IN = "megagrpo.environments"
BUILT_IN = {
    "calculator": f"{_BUILT_IN}.calculator:Calculator",
    "sql": f"{_BUILT_IN}.sql:Sql",
    "python": f"{_BUILT_IN}.python_programs:PythonPrograms",
    "gymnasium": f"{_BUILT_IN}.gymnasium_text:GymnasiumText",
    "mcp": f"{_BUILT_IN}.mcp_tools:McpTools",
    "openenv": f"{_BUILT_IN}.openenv:OpenEnv",
}
# What a built-in one needs of the machine that plays it: returns what is wrong.
_MACHINE_CHECKS = {"python": "megagrpo.sandbox.sandbox:machine_problem"}
# What ends a rollout: its environment; a limit of tokens, turns or seconds; a call that hung; an
# environment that raised or returned nonsense; what it needs and lacked, three times; a row that it
# cannot play, twice.
ENDS = ("done", "tokens", "turns", "time", "timeout", "error", "infrastructure", "data")

_TRIES = {"infrastructure": 3, "data": 2}  # by what ended the one before
_PAUSE_S = 0.25  # doubled before each further try


class EnvironmentFailed(Exception):
    """Raised for an episode that cannot go on.

    end: one of ENDS. slot: of its process. bystander: whether another episode's call ended that.
    """

    def __init__(
        self, end: str, detail: str, slot: WorkerSlot | None = None, bystander: bool = False
    ):
        super().__init__(detail)
        self.end, self.slot, self.bystander = end, slot, bystander


@dataclass
class EnvironmentUsage:
    """What rollouts took of a leader's time."""

    rollouts: int = 0
    calls: int = 0
    call_s: float = 0.0
    queue_s: float = 0.0  # that calls waited for a process
    engines_s: float = 0.0  # that rollouts waited for the model's turns
    begun_again: int = 0


def load_environment(name: str) -> Callable[..., object]:
    """Imports the user's function that makes an environment. Raises ValueError."""
    return load_function(name, BUILT_IN, "sampling.environment.function")


def refuse_machine(config: EnvironmentConfig) -> None:
    """Raises ValueError, with the remedy, if an environment cannot run on this machine."""
    name = config.function
    if name in _MACHINE_CHECKS:
        check = load_function(name, _MACHINE_CHECKS, "sampling.environment.function")
        if problem := check(config.args):
            raise ValueError(f"environment {name}: {problem}")


@dataclass
class EpisodeResult:
    """A rollout so far."""

    parts: list[SamplePart] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)  # (last token of a turn, reward)
    end: str = "done"  # one of ENDS
    stopped: str = ""  # by which limit, in words

    @property
    def num_tokens(self) -> int:
        """Counts the tokens of all responses."""
        return sum(len(part.response.token_ids) for part in self.parts)

    def outcome(self, by_turn: bool) -> Outcome:
        """Returns the sum of the rewards; by_turn: each belongs to the last token of its turn."""
        token_rewards = tuple(each for each in self.rewards if each[1] and by_turn)
        rewards = tuple(reward for _, reward in self.rewards)
        return Outcome("score", sum(rewards), self.stopped, {}, token_rewards, self.end, rewards)

    def stop(self, end: str, detail: str) -> None:
        """Ends it by a limit."""
        self.end, self.stopped = end, detail
        self.parts[-1].response = replace(self.parts[-1].response, finish_reason="length")


class Environments:
    """Runs the environments of one leader's rollouts, many in a process. Coroutines are of one
    loop.

    The processes start with the first episode and run until `close`. renderer: of what environments
    say.
    """

    waited_for = "the engines or the environment"

    def __init__(self, config: EnvironmentConfig, renderer: Renderer):
        self.config, self.renderer = config, renderer
        make = partial(WorkerProcess, python_module(_MODULE), [config.function])
        self._episodes = {WorkerSlot(make): 0 for _ in range(config.workers)}  # how many are open
        self._numbers = itertools.count()
        self.usage = EnvironmentUsage()

    def add_metrics(self, metrics: "Metrics") -> None:
        """Adds the mean seconds of the calls and rollouts that ended since the last time."""
        usage, self.usage = self.usage, EnvironmentUsage()
        metrics.add_mean("environment/call_s", usage.call_s, usage.calls)
        metrics.add_mean("environment/queue_s", usage.queue_s, usage.calls)
        metrics.add_mean("environment/rollout_s", usage.call_s, usage.rollouts)
        metrics.add_mean("environment/engines_s", usage.engines_s, usage.rollouts)
        metrics.add_sum("environment/begun_again", usage.begun_again)

    def close(self) -> None:
        """Ends all processes."""
        for slot in self._episodes:
            slot.close()

    async def rollout(self, task: RolloutTask) -> tuple[Sequence[SamplePart], Outcome | None]:
        """Plays a rollout to its end, from its beginning again if what it needs was lacking: 3
        times in all, elsewhere.

        A try that another rollout's call has ended does not count. The outcome is None if graders
        score the rollout and it did not fail.
        """
        row, seed = task.row, task.seed_of("environment")
        failed: EnvironmentFailed | None = None
        tries = 0
        while True:
            result = EpisodeResult()
            try:
                avoid = failed.slot if failed else None
                async with self.episode(row, seed, avoid) as episode:
                    await self._play(result, episode, task)
                failed = None
                break
            except EnvironmentFailed as exc:
                failed = exc
            tries += not failed.bystander
            if tries >= _TRIES.get(failed.end, 1):
                break
            self.usage.begun_again += 1
            await asyncio.sleep(_PAUSE_S * 2**tries)
        self.usage.rollouts += 1
        parts = result.parts or [SamplePart(None)]
        if failed is not None:
            status = "timeout" if failed.end == "timeout" else "error"
            return parts, Outcome(status, detail=str(failed), end=failed.end)
        if not self.config.rewards:
            return parts, None
        return parts, result.outcome(self.config.credit == "turn")

    async def _play(self, result: EpisodeResult, episode: "Episode", task: RolloutTask) -> None:
        """Fills `result` until the environment is done or a limit is met.

        A message that leaves no room for another token is not put in. Raises as `episode` does.
        """
        config, renderer = self.config, self.renderer
        limit_s = config.episode_timeout_s
        said = await episode.reset()
        for number in range(config.max_turns):
            if limit_s is not None and number and episode.seconds > limit_s:
                return result.stop("time", f"its environment took {episode.seconds:.1f} s")
            fresh = number == 0 or config.history == "last"
            if fresh:
                result.parts.append(
                    SamplePart(
                        None if said is None else _rendered(renderer.start, said, task.prompt)
                    )
                )
            part, known = result.parts[-1], 0
            begin = task.prompt.token_ids if part.prompt_ids is None else part.prompt_ids
            if not fresh:
                answer = part.response.token_ids
                known = len(begin) + len(answer) - 1
                ids = _rendered(renderer.after_turn, said or "", answer, task.prompt.tools)
                if len(answer) + len(ids) >= task.max_tokens:
                    return result.stop("tokens", "no room for another turn")
                part.add_said(ids)
            context = np.concatenate([begin, part.response.token_ids])
            left = task.max_tokens - len(part.response.token_ids)
            asked = time.monotonic()
            sampled = await task.turn(number, context, left, known)
            self.usage.engines_s += time.monotonic() - asked
            part.add(sampled, sampled=True)
            if sampled.finish_reason != "stop":
                return result.stop("tokens", "a turn reached the limit of tokens")
            said, reward, done = await episode.step(task.decode(sampled.token_ids))
            result.rewards.append((result.num_tokens - 1, reward))
            if done:
                return None
        return result.stop("turns", f"{config.max_turns} turns")

    @asynccontextmanager
    async def episode(
        self, row: Mapping[str, object], seed: int, avoid: WorkerSlot | None = None
    ) -> "AsyncIterator[Episode]":
        """Makes the environment of one rollout, which is closed after the block; elsewhere than in
        `avoid` if it can.

        Raises EnvironmentFailed if the environment raises or does not answer in time, or if another
        episode's call has ended its process.
        """
        slot = min(self._episodes, key=lambda each: (each is avoid, self._episodes[each]))
        self._episodes[slot] += 1
        try:
            episode = Episode(self, slot, await self._process_of(slot), next(self._numbers))
            try:
                await episode.call("make", row, seed, self.config.args)
                yield episode
            finally:
                with suppress(EnvironmentFailed):  # its rollout is over, or has failed already
                    await episode.call("close")
        finally:
            self._episodes[slot] -= 1

    async def ask(self, episode: "Episode", message: Sequence[object]) -> list:
        """Returns the answer of an episode's process, which is ended unless it gives one. Raises as
        `episode` does."""
        asked = time.monotonic()
        slot, process = episode.slot, episode.process
        async with slot.busy:
            if not process.is_open:
                lost = "its process was ended while another episode's call hung"
                raise EnvironmentFailed("infrastructure", lost, slot, bystander=True)
            began = time.monotonic()
            try:
                answer, error = await process.only_call(list(message), self.config.timeout_s)
            except TimeoutError as exc:
                limit = f"{message[1]} gave no answer in {self.config.timeout_s:g} s"
                raise EnvironmentFailed("timeout", limit) from exc
            except WorkerError as exc:
                end = "infrastructure" if process.was_killed else "error"
                died = f"{message[1]}: the environment's process died: {exc}"
                raise EnvironmentFailed(end, died, slot) from exc
            finally:
                took = time.monotonic() - began
                episode.seconds += took
                self.usage.calls += 1
                self.usage.queue_s += began - asked
                self.usage.call_s += took
            return [None, error, "error"] if error is not None else answer

    async def _process_of(self, slot: WorkerSlot) -> WorkerProcess:
        try:
            return await slot.started()
        except WorkerError as exc:
            raise EnvironmentFailed("infrastructure", str(exc), slot) from exc


class Episode:
    """The environment of one rollout."""

    def __init__(self, of: Environments, slot: WorkerSlot, process: WorkerProcess, number: int):
        self._of, self._number = of, number
        self.slot, self.process = slot, process
        self.seconds = 0.0  # of its calls

    async def reset(self) -> Observation | None:
        """Returns what the environment says first; None: the prompt of the data is all."""
        return cast(Observation | None, await self.call("reset"))

    async def step(self, text: str) -> tuple[Observation | None, float, bool]:
        """Returns what the environment says to a turn of the model, its reward, and whether the
        rollout is over."""
        said, reward, done = cast(list, await self.call("step", text))
        return said, reward, done

    async def call(self, method: str, *arguments: object) -> object:
        """Returns what a method of the environment gives. Raises as Environments.episode does."""
        result, error, end = await self._of.ask(self, [self._number, method, list(arguments)])
        if error is not None:
            raise EnvironmentFailed(end, error, self.slot)
        return result


def _rendered(render: Callable[..., np.ndarray], *said: object) -> np.ndarray:
    """Returns the ids of what an environment said, whose fault it is if they cannot be made."""
    try:
        return render(*said)
    except ValueError as exc:
        raise EnvironmentFailed("error", str(exc)) from exc
