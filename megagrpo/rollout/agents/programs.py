"""Agent programs in killable processes, each against its rollout's own endpoint: every rollout has
an outcome."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megagrpo.config.rollout import AgentConfig
from megagrpo.rewards.workers import WorkerError, WorkerProcess
from megagrpo.rollout.agents.conversation import Conversation
from megagrpo.rollout.agents.gateway import Gateway
from megagrpo.rollout.agents.parsers import EngineParsers
from megagrpo.rollout.agents.play import Part
from megagrpo.rollout.agents.program_worker import COMMAND, LONGEST_LINE
from megagrpo.rollout.agents.renderer import Renderer
from megagrpo.rollout.control import ServiceControl
from megagrpo.rollout.response import SampleTurn
from megagrpo.types import Outcome

if TYPE_CHECKING:  # it pulls in torch
    from megagrpo.monitor.metrics import Metrics

_MODULE = "megagrpo.rollout.agents.program_worker"
_GRACE_S = 5.0  # for a cancelled program to end by itself
_POLL_S = 0.05


@dataclass(eq=False)
class _Worker:
    process: WorkerProcess | None = None  # None: it starts with the next program
    writer: asyncio.StreamWriter | None = None
    results: dict[int, "asyncio.Future[list]"] = field(default_factory=dict)
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    reading: asyncio.Task[None] | None = None


class Programs:
    """Runs the agent programs of one leader's rollouts, many in a process. Coroutines are of one
    loop.

    The processes and the endpoint start with the first program. host: address of the endpoint.
    decode: ids of a turn -> text.
    """

    def __init__(
        self,
        config: AgentConfig,
        renderer: Renderer,
        host: str,
        model: str,
        decode: Callable[[np.ndarray], str],
    ):
        self.config, self._renderer, self._decode = config, renderer, decode
        self._gateway = Gateway(host, model)
        self._function = config.function or COMMAND
        self._args = dict(config.args) if config.function else {"command": config.command}
        self._workers = [_Worker() for _ in range(config.workers)]
        self._processes: set[WorkerProcess] = set()
        self._numbers = itertools.count()
        self._parsers: EngineParsers | None = None
        self._ended, self._seconds, self._waited_s = 0, 0.0, 0.0  # since the last `add_metrics`

    def add_metrics(self, metrics: "Metrics") -> None:
        """Adds the mean seconds of programs since the last time, without and in the engines'
        time."""
        metrics.add_mean("agent/program_s", self._seconds, self._ended)
        metrics.add_mean("agent/engines_s", self._waited_s, self._ended)
        self._ended, self._seconds, self._waited_s = 0, 0.0, 0.0

    def close(self) -> None:
        """Ends all processes, after the loop has ended."""
        for process in list(self._processes):
            process.kill()
        self._gateway.close()

    async def rollout(
        self,
        row: Mapping[str, object],
        prompt: np.ndarray,
        sample: SampleTurn,
        max_tokens: int,
        control: ServiceControl,
    ) -> tuple[list[Part], Outcome]:
        """Returns the samples of a rollout and its outcome: never a reward for a program that
        failed.

        prompt: ids [T] of the group's prompt. max_tokens: of a sample's response.
        A program whose process was ended by another one begins again, in a process of its own.
        Raises GenerationFailed.
        """
        self._gateway.start()
        if self._parsers is None:
            self._parsers = EngineParsers(
                control, self.config.tool_parser, self.config.reasoning_parser
            )
        parse = self._parsers.message
        for worker in (min(self._workers, key=lambda each: len(each.results)), _Worker()):
            talk = Conversation(
                self.config, max_tokens, self._renderer, sample, prompt, self._decode, parse
            )
            with ExitStack() as stack:
                if worker not in self._workers:
                    stack.callback(self._end, worker)
                base_url, key = stack.enter_context(self._gateway.session(talk))
                outcome = await self._run(
                    worker, {"base_url": base_url, "key": key, "row": row}, talk
                )
            if outcome is not None:
                break
        parts, _ = talk.samples()
        return parts, outcome or Outcome("error", detail="the process of its program died")

    async def _run(
        self, worker: _Worker, request: dict[str, object], talk: Conversation
    ) -> Outcome | None:
        """Returns the outcome of one program; None if its process is gone. Raises
        GenerationFailed."""
        try:
            await self._started(worker)
        except WorkerError as exc:
            return Outcome("error", detail=str(exc))
        number, began = next(self._numbers), time.monotonic()
        assert worker.writer is not None, "started"
        result = worker.results[number] = asyncio.get_running_loop().create_future()
        with ExitStack() as stack:
            stack.callback(worker.results.pop, number, None)
            worker.writer.write(json.dumps([number, request | self._args]).encode() + b"\n")
            cancelled = stack.enter_context(ExitStack())
            cancelled.callback(self._cancel, worker, number)
            while not result.done():
                left = self.config.timeout_s + talk.waited_s - (time.monotonic() - began)
                if left <= 0:
                    cancelled.close()
                    talk.close()
                    await self._give_up(worker, result)
                    return Outcome("timeout", detail=f"no reward in {self.config.timeout_s:g} s")
                await asyncio.wait(
                    [result, talk.failed], timeout=max(left, _POLL_S), return_when="FIRST_COMPLETED"
                )
                if talk.failed.done() and not result.done():
                    talk.failed.result()
            cancelled.pop_all()
            self._ended += 1
            self._waited_s += talk.waited_s
            self._seconds += time.monotonic() - began - talk.waited_s
            return self._outcome(talk, *result.result()) if result.result() else None

    def _outcome(self, talk: Conversation, found: list | None, error: str | None) -> Outcome:
        if found is not None:
            reward, turn_rewards, note = found
            return talk.outcome(reward, turn_rewards, note, self.config.credit == "turn")
        if talk.stopped and self.config.truncated_reward is not None:
            return talk.outcome(self.config.truncated_reward, None, str(error), False)
        return Outcome("error", detail="; ".join(filter(None, (talk.stopped, error))))

    async def _give_up(self, worker: _Worker, result: "asyncio.Future[list]") -> None:
        """Ends the process of a cancelled program unless the program ends by itself."""
        await asyncio.wait([result], timeout=_GRACE_S)
        if not result.done():
            self._end(worker)

    def _cancel(self, worker: _Worker, number: int) -> None:
        if worker.writer is not None:
            worker.writer.write(json.dumps([number, None]).encode() + b"\n")

    async def _started(self, worker: _Worker) -> None:
        """Starts its process if it has none. Raises WorkerError."""

        def started() -> WorkerProcess:
            process = WorkerProcess(_MODULE, self._function)
            self._processes.add(process)
            process.wait_ready()
            return process

        async with worker.starting:
            if worker.process is None:
                process = await asyncio.to_thread(started)
                reader, writer = await asyncio.open_connection(
                    sock=process.connection(), limit=LONGEST_LINE
                )
                worker.process, worker.writer = process, writer
                worker.reading = asyncio.create_task(self._read(worker, reader))

    async def _read(self, worker: _Worker, reader: asyncio.StreamReader) -> None:
        """Gives each result to its rollout, until the process is gone."""
        with suppress(OSError):  # a process that was killed resets its socket
            async for line in reader:
                number, found, error = json.loads(line)
                if (result := worker.results.pop(number, None)) is not None and not result.done():
                    result.set_result([found, error])
        self._end(worker)

    def _end(self, worker: _Worker) -> None:
        """Ends a process; the programs in it are lost, and the next one starts another."""
        process, writer, lost = worker.process, worker.writer, list(worker.results.values())
        worker.process = worker.writer = None
        worker.results.clear()
        if writer is not None:
            writer.close()
        if process is not None:
            process.kill()
            self._processes.discard(process)
        for result in lost:
            if not result.done():
                result.set_result([])
