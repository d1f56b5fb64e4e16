"""Environments in killable processes: every call has a result within its time limit, whatever an environment does."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from megagrpo.config.rollout import EnvironmentConfig
from megagrpo.rewards.workers import WorkerError, WorkerProcess
from megagrpo.rollout.agents.renderer import Renderer, Said
from megagrpo.system.user_function import load_function

if TYPE_CHECKING:  # it pulls in torch, which the processes of environments need not
    from megagrpo.monitor.metrics import Metrics

T = TypeVar("T")
_MODULE = "megagrpo.rollout.agents.worker"
BUILT_IN = {"sql": "megagrpo.rollout.agents.sql:Sql"}


class EnvironmentFailed(Exception):
    """Raised for an episode that cannot go on. status: "error" | "timeout", of its outcome."""

    def __init__(self, status: str, detail: str):
        super().__init__(detail)
        self.status = status


class EpisodeLost(Exception):
    """Raised for an episode whose process was ended by another one's fault: it may begin again from its seed."""


class Step(NamedTuple):
    """What an environment says to a turn of the model."""

    said: Said | None  # what follows; None: nothing
    reward: float
    done: bool


@dataclass(eq=False)
class _Worker:
    process: WorkerProcess | None = None  # None: it starts with the next episode
    free: asyncio.Lock = field(default_factory=asyncio.Lock)  # one call at a time
    episodes: int = 0


def load_environment(name: str) -> Callable[..., object]:
    """Imports the user's function that makes an environment. Raises ValueError."""
    return load_function(name, BUILT_IN, "sampling.environment.function")


class Environments:
    """Runs the environments of one leader's rollouts, many in a process. Coroutines are of one loop.

    The processes start with the first episode and run until `close`. renderer: of what environments say.
    """

    def __init__(self, config: EnvironmentConfig, renderer: Renderer):
        self.config, self.renderer = config, renderer
        self._threads = ThreadPoolExecutor(config.workers, "environments")
        self._workers = [_Worker() for _ in range(config.workers)]
        self._numbers = itertools.count()
        self._calls, self._call_s, self._queue_s = 0, 0.0, 0.0  # since the last `add_metrics`

    def add_metrics(self, metrics: "Metrics") -> None:
        """Adds the mean seconds of the calls since the last time, and those for which they waited for a process."""
        metrics.add_mean("environment/call_s", self._call_s, self._calls)
        metrics.add_mean("environment/queue_s", self._queue_s, self._calls)
        self._calls, self._call_s, self._queue_s = 0, 0.0, 0.0

    def close(self) -> None:
        """Ends all processes."""
        for process in [worker.process for worker in self._workers if worker.process is not None]:
            process.kill()
        self._threads.shutdown()

    @asynccontextmanager
    async def episode(self, row: Mapping[str, object], seed: int) -> "AsyncIterator[Episode]":
        """Makes the environment of one rollout, which is closed after the block.

        Raises EnvironmentFailed if the environment raises or does not answer in time, EpisodeLost as it says.
        """
        worker = min(self._workers, key=lambda each: each.episodes)
        worker.episodes += 1
        try:
            episode = Episode(self, worker, await self._process_of(worker), next(self._numbers))
            try:
                await episode.call("make", row, seed, self.config.args)
                yield episode
            finally:
                with suppress(EnvironmentFailed, EpisodeLost):  # its rollout is over, or has failed already
                    await episode.call("close")
        finally:
            worker.episodes -= 1

    async def ask(self, worker: _Worker, process: WorkerProcess, message: Sequence[object]) -> list:
        """Returns the answer of an episode's process, which is ended unless it gives one. Raises as `episode` does."""
        asked = time.monotonic()
        async with worker.free:
            if worker.process is not process:
                raise EpisodeLost("its process was ended while another episode's call hung")
            worker.process = None  # unless this call, which may be cancelled, comes to its end
            began = time.monotonic()
            try:
                answer = await self._in_thread(lambda: process.ask(message, self.config.timeout_s))
                worker.process = process
            except TimeoutError as exc:
                limit = f"{message[1]} gave no answer in {self.config.timeout_s:g} s"
                raise EnvironmentFailed("timeout", limit) from exc
            except (OSError, WorkerError) as exc:
                raise EnvironmentFailed("error", f"{message[1]}: the environment's process died: {exc}") from exc
            finally:
                if worker.process is None:
                    process.kill()
                self._calls += 1
                self._queue_s += began - asked
                self._call_s += time.monotonic() - began
            return answer

    async def _process_of(self, worker: _Worker) -> WorkerProcess:
        def started() -> WorkerProcess:
            process = WorkerProcess(_MODULE, self.config.function)
            process.wait_ready()
            return process

        async with worker.free:
            if worker.process is None:
                try:
                    worker.process = await self._in_thread(started)
                except WorkerError as exc:
                    raise EnvironmentFailed("error", str(exc)) from exc
            return worker.process

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class Episode:
    """The environment of one rollout."""

    def __init__(self, of: Environments, worker: _Worker, process: WorkerProcess, number: int):
        self._of, self._worker, self._process, self._number = of, worker, process, number

    async def reset(self) -> Said | None:
        """Returns what the environment says first; None: the prompt of the data is all."""
        return cast(Said | None, await self.call("reset"))

    async def step(self, text: str) -> Step:
        """Returns what the environment says to a turn of the model."""
        return Step(*cast(list, await self.call("step", text)))

    async def call(self, method: str, *arguments: object) -> object:
        """Returns what a method of the environment gives. Raises as Environments.episode does."""
        result, error = await self._of.ask(self._worker, self._process, [self._number, method, list(arguments)])
        if error is not None:
            raise EnvironmentFailed("error", error)
        return result
