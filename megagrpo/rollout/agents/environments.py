"""Environments in killable processes: every call has a result within its time limit, whatever an
environment does."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

from megagrpo.config.rollout import EnvironmentConfig
from megagrpo.rewards.workers import WorkerError, WorkerProcess
from megagrpo.rollout.agents.renderer import Renderer, Said
from megagrpo.system.user_function import load_function

if TYPE_CHECKING:  # it pulls in torch, which the processes of environments need not
    from megagrpo.monitor.metrics import Metrics

T = TypeVar("T")
_MODULE = "megagrpo.rollout.agents.worker"
_BUILT_IN = "megagrpo.environments"
BUILT_IN = {
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


class EnvironmentFailed(Exception):
    """Raised for an episode that cannot go on. end: one of ENDS. worker: the process it was in."""

    def __init__(self, end: str, detail: str, worker: "_Worker | None" = None):
        super().__init__(detail)
        self.end, self.worker = end, worker


@dataclass
class Used:
    """What rollouts took of a leader's time."""

    rollouts: int = 0
    calls: int = 0
    call_s: float = 0.0
    queue_s: float = 0.0  # that calls waited for a process
    engines_s: float = 0.0  # that rollouts waited for the model's turns
    begun_again: int = 0


@dataclass(eq=False)
class _Worker:
    process: WorkerProcess | None = None  # None: it starts with the next episode
    free: asyncio.Lock = field(default_factory=asyncio.Lock)  # one call at a time
    episodes: int = 0


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


class Environments:
    """Runs the environments of one leader's rollouts, many in a process. Coroutines are of one
    loop.

    The processes start with the first episode and run until `close`. renderer: of what environments
    say.
    """

    def __init__(self, config: EnvironmentConfig, renderer: Renderer):
        self.config, self.renderer = config, renderer
        self._threads = ThreadPoolExecutor(config.workers, "environments")
        self._workers = [_Worker() for _ in range(config.workers)]
        self._numbers = itertools.count()
        self._open = (
            nullcontext() if config.max_open is None else asyncio.Semaphore(config.max_open)
        )
        self.used = Used()

    def add_metrics(self, metrics: "Metrics") -> None:
        """Adds the mean seconds of the calls and rollouts that ended since the last time."""
        used, self.used = self.used, Used()
        metrics.add_mean("environment/call_s", used.call_s, used.calls)
        metrics.add_mean("environment/queue_s", used.queue_s, used.calls)
        metrics.add_mean("environment/rollout_s", used.call_s, used.rollouts)
        metrics.add_mean("environment/engines_s", used.engines_s, used.rollouts)
        metrics.add_sum("environment/begun_again", used.begun_again)

    def close(self) -> None:
        """Ends all processes."""
        for process in [worker.process for worker in self._workers if worker.process is not None]:
            process.kill()
        self._threads.shutdown()

    @asynccontextmanager
    async def episode(
        self, row: Mapping[str, object], seed: int, avoid: _Worker | None = None
    ) -> "AsyncIterator[Episode]":
        """Makes the environment of one rollout, which is closed after the block; elsewhere than in
        `avoid` if it can.

        Raises EnvironmentFailed if the environment raises or does not answer in time, or if another
        episode's call has ended its process.
        """
        async with self._open:
            worker = min(self._workers, key=lambda each: (each is avoid, each.episodes))
            worker.episodes += 1
            try:
                episode = Episode(self, worker, await self._process_of(worker), next(self._numbers))
                try:
                    await episode.call("make", row, seed, self.config.args)
                    yield episode
                finally:
                    with suppress(EnvironmentFailed):  # its rollout is over, or has failed already
                        await episode.call("close")
            finally:
                worker.episodes -= 1

    async def ask(self, episode: "Episode", message: Sequence[object]) -> list:
        """Returns the answer of an episode's process, which is ended unless it gives one. Raises as
        `episode` does."""
        asked, worker, process = time.monotonic(), episode.worker, episode.process
        async with worker.free:
            if worker.process is not process:
                lost = "its process was ended while another episode's call hung"
                raise EnvironmentFailed("infrastructure", lost, worker)
            worker.process = None  # unless this call, which may be cancelled, comes to its end
            began = time.monotonic()
            try:
                number = next(self._numbers)
                answer = await self._in_thread(
                    lambda: process.ask([number, *message], self.config.timeout_s)
                )
                if not isinstance(answer, list) or len(answer) != 4 or answer[0] != number:
                    raise WorkerError(
                        f"it wrote {answer!r:.80} to its socket, which answers no call"
                    )
                worker.process = process
            except TimeoutError as exc:
                limit = f"{message[1]} gave no answer in {self.config.timeout_s:g} s"
                raise EnvironmentFailed("timeout", limit) from exc
            except (OSError, WorkerError, json.JSONDecodeError) as exc:
                end = "infrastructure" if process.was_killed else "error"
                raise EnvironmentFailed(
                    end, f"{message[1]}: the environment's process died: {exc}", worker
                ) from exc
            finally:
                if worker.process is None:
                    process.kill()
                took = time.monotonic() - began
                episode.seconds += took
                self.used.calls += 1
                self.used.queue_s += began - asked
                self.used.call_s += took
            return answer[1:]

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
                    raise EnvironmentFailed("infrastructure", str(exc), worker) from exc
            return worker.process

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class Episode:
    """The environment of one rollout."""

    def __init__(self, of: Environments, worker: _Worker, process: WorkerProcess, number: int):
        self._of, self.worker, self.process, self._number = of, worker, process, number
        self.seconds = 0.0  # of its calls

    async def reset(self) -> Said | None:
        """Returns what the environment says first; None: the prompt of the data is all."""
        return cast(Said | None, await self.call("reset"))

    async def step(self, text: str) -> tuple[Said | None, float, bool]:
        """Returns what the environment says to a turn of the model, its reward, and whether the
        rollout is over."""
        said, reward, done = cast(list, await self.call("step", text))
        return said, reward, done

    async def call(self, method: str, *arguments: object) -> object:
        """Returns what a method of the environment gives. Raises as Environments.episode does."""
        result, error, end = await self._of.ask(self, [self._number, method, list(arguments)])
        if error is not None:
            raise EnvironmentFailed(end, error, self.worker)
        return result
