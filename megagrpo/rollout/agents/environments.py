"""Environments in killable processes: every call has a result within its time limit, whatever the
environment does."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from megagrpo.config.rollout import EnvironmentConfig
from megagrpo.rewards.graders.functions import machine_problem
from megagrpo.rollout.agents.answering import RolloutTask, SamplePart
from megagrpo.rollout.agents.renderer import Observation, Renderer, in_time
from megagrpo.system.user_function import load_function
from megagrpo.system.worker_process import (
    Value,
    WorkerError,
    WorkerProcess,
    WorkerSlot,
    python_module,
)
from megagrpo.types import Outcome

if TYPE_CHECKING:  # it pulls in torch, which the processes of environments need not
    from megagrpo.monitor.metrics import Metrics

_MODULE = "megagrpo.rollout.agents.environment_worker"
_BUILT_IN = "megagrpo.environments"
BUILT_IN = {
    "calculator": f"{_BUILT_IN}.calculator:Calculator",
    "sql": f"{_BUILT_IN}.sql:Sql",
    "python": f"{_BUILT_IN}.python_programs:PythonPrograms",
    "gymnasium": f"{_BUILT_IN}.gymnasium_text:GymnasiumText",
    "mcp": f"{_BUILT_IN}.mcp_tools:McpTools",
    "openenv": f"{_BUILT_IN}.openenv:OpenEnv",
}
# What ends a rollout: the environment; a limit of tokens, turns or seconds; a call that hung; an
# environment that raised or returned nonsense; a service that was missing three times; a row that
# could not be played twice.
ENDS = ("done", "tokens", "turns", "time", "timeout", "error", "infrastructure", "data")

_TRIES = {"infrastructure": 3, "data": 2}  # by the end of the previous try
_PAUSE_S = 0.25  # doubled before each further try


class EnvironmentFailed(Exception):
    """Raised for an episode that cannot go on.

    end: one of ENDS. slot: the slot of its process. bystander: whether another episode's call ended
    that process.
    """

    def __init__(
        self, end: str, detail: str, slot: WorkerSlot | None = None, bystander: bool = False
    ):
        super().__init__(detail)
        self.end, self.slot, self.bystander = end, slot, bystander


@dataclass
class EnvironmentUsage:
    """The time that rollouts took."""

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
    # its programs run as those of grader `code`
    if config.function == "python" and (problem := machine_problem("code", {**config.args})):
        raise ValueError(f"environment python: {problem}")


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
        token_rewards = tuple(pair for pair in self.rewards if pair[1] and by_turn)
        rewards = tuple(reward for _, reward in self.rewards)
        return Outcome("score", sum(rewards), self.stopped, {}, token_rewards, self.end, rewards)

    def stop(self, end: str, detail: str) -> None:
        """Ends the rollout because of a limit."""
        self.end, self.stopped = end, detail
        self.parts[-1].response = replace(self.parts[-1].response, finish_reason="length")


class Environments:
    """Runs the environments of one leader's rollouts, many per process. Coroutines run in one loop.

    The processes start with the first episode and run until `close`. renderer: renders the messages
    of environments.
    """

    waited_for = "the engines or the environment"

    def __init__(self, config: EnvironmentConfig, renderer: Renderer):
        self.config, self.renderer = config, renderer
        make = partial(WorkerProcess, python_module(_MODULE), [config.function])
        self._episodes = {WorkerSlot(make): 0 for _ in range(config.workers)}  # how many are open
        self._numbers = itertools.count()
        self.usage = EnvironmentUsage()

    def add_metrics(self, metrics: "Metrics") -> None:
        """Adds the mean seconds of the calls and rollouts that ended since the last call."""
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

    async def rollout(self, task: RolloutTask) -> tuple[Sequence[SamplePart], Outcome]:
        """Plays a rollout to its end. If the environment lacked a service, it begins again in
        another process, 3 times in all.

        A try that another rollout's call has ended does not count.
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
            return parts, Outcome("", end=result.end)
        return parts, result.outcome(self.config.credit == "turn")

    async def _play(self, result: EpisodeResult, episode: "Episode", task: RolloutTask) -> None:
        """Fills `result` until the environment is done or a limit is reached.

        A message that leaves no room for another token is not put in. Raises as `episode` does.
        """
        config, renderer = self.config, self.renderer
        limit_s = config.episode_timeout_s
        observation = await episode.call("reset")  # None: only the prompt of the data
        for number in range(config.max_turns):
            if limit_s is not None and number and episode.seconds > limit_s:
                return result.stop("time", f"its environment took {episode.seconds:.1f} s")
            fresh = number == 0 or config.history == "last"
            if fresh:
                begun = SamplePart(None)
                if observation is not None:
                    begun.prompt_ids = await _rendered(renderer.start, observation, task.prompt)
                result.parts.append(begun)
            part, known = result.parts[-1], 0
            begin = part.prompt_ids
            if begin is None:
                begin = task.prompt.token_ids
            if not fresh:
                answer = part.response.token_ids
                known = len(begin) + len(answer) - 1
                room = task.max_tokens - len(answer)
                follow = (answer, task.prompt.tools, room)
                ids = await _rendered(renderer.after_turn, observation or "", *follow)
                if len(answer) + len(ids) >= task.max_tokens:
                    return result.stop("tokens", "no room for another turn")
                part.add_context(ids)
            context = np.concatenate([begin, part.response.token_ids])
            left = task.max_tokens - len(part.response.token_ids)
            asked = time.monotonic()
            sampled = await task.turn(number, context, left, known)
            self.usage.engines_s += time.monotonic() - asked
            part.add(sampled, sampled=True)
            if sampled.finish_reason != "stop":
                return result.stop("tokens", "a turn reached the limit of tokens")
            text = task.decode(sampled.token_ids)
            if config.function in BUILT_IN:
                text = task.prompt.answer_in(text, renderer.reasoning_end)
            observation, reward, done = await episode.call("step", text)
            result.rewards.append((result.num_tokens - 1, reward))
            if done:
                return None
        return result.stop("turns", f"{config.max_turns} turns")

    @asynccontextmanager
    async def episode(
        self, row: Mapping[str, object], seed: int, avoid: WorkerSlot | None = None
    ) -> "AsyncIterator[Episode]":
        """Makes the environment of one rollout, which is closed after the block. It runs in another
        slot than `avoid` if possible.

        Raises EnvironmentFailed if the environment raises or does not answer in time, or if another
        episode's call has ended its process.
        """
        slot = min(self._episodes, key=lambda slot: (slot is avoid, self._episodes[slot]))
        self._episodes[slot] += 1
        try:
            try:
                process = await slot.started()
            except WorkerError as exc:
                raise EnvironmentFailed("infrastructure", str(exc), slot) from exc
            episode = Episode(self, slot, process, next(self._numbers))
            try:
                await episode.call("make", row, seed, self.config.args)
                yield episode
            finally:
                with suppress(EnvironmentFailed):  # its rollout is over, or has failed already
                    await episode.call("close")
        finally:
            self._episodes[slot] -= 1


class Episode:
    """The environment of one rollout."""

    def __init__(
        self, environments: Environments, slot: WorkerSlot, process: WorkerProcess, number: int
    ):
        self._environments, self._number = environments, number
        self.slot, self.process = slot, process
        self.seconds = 0.0  # of its calls

    async def call(self, method: str, *arguments: object) -> Value:
        """Returns the result of a method of the environment, see environment_worker.py. Ends its
        process if that gives no answer. Raises as Environments.episode does."""
        timeout_s = self._environments.config.timeout_s
        asked = time.monotonic()
        async with self.slot.busy:
            if not self.process.is_open:
                lost = "its process was ended while another episode's call hung"
                raise EnvironmentFailed("infrastructure", lost, self.slot, bystander=True)
            began = time.monotonic()
            message = [self._number, method, list(arguments)]
            try:
                answer, died = await self.process.only_call(message, timeout_s)
            except TimeoutError as exc:
                raise EnvironmentFailed(
                    "timeout", f"{method} gave no answer in {timeout_s:g} s"
                ) from exc
            except WorkerError as exc:
                end = "infrastructure" if self.process.was_killed else "error"
                raise EnvironmentFailed(
                    end, f"{method}: the environment's process died: {exc}", self.slot
                ) from exc
            finally:
                took = time.monotonic() - began
                self.seconds += took
                usage = self._environments.usage
                usage.calls += 1
                usage.queue_s += began - asked
                usage.call_s += took
        if died is not None:
            raise EnvironmentFailed("error", died, self.slot)
        result, error, end = answer
        if error is not None:
            raise EnvironmentFailed(end, error, self.slot)
        return result


async def _rendered(
    render: Callable[..., np.ndarray], observation: Observation, *arguments: object
) -> np.ndarray:
    """Returns the ids of an observation; if they cannot be made, the environment has failed."""
    try:
        return await in_time(render, observation, *arguments)
    except ValueError as exc:
        raise EnvironmentFailed("error", str(exc)) from exc
