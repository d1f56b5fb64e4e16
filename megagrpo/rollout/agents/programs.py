"""Agent programs in killable processes, each against the endpoint of its rollout: every rollout has
an outcome."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from megagrpo.config.rollout import AgentConfig
from megagrpo.rollout.agents.answering import RolloutTask, SamplePart
from megagrpo.rollout.agents.conversation import Conversation
from megagrpo.rollout.agents.gateway import Gateway
from megagrpo.rollout.agents.parsers import TurnParsers
from megagrpo.rollout.agents.program_worker import COMMAND, MEASURED
from megagrpo.rollout.agents.renderer import Renderer
from megagrpo.system.worker_process import WorkerError, WorkerProcess, WorkerSlot, python_module
from megagrpo.types import Outcome

if TYPE_CHECKING:  # it pulls in torch
    from megagrpo.monitor.metrics import Metrics

_MODULE = "megagrpo.rollout.agents.program_worker"
_ALONE = 8  # programs that begin again, each in a separate process, at once


class Programs:
    """Runs the agent programs of one leader's rollouts, many per process. Coroutines run in one
    loop.

    The processes and the endpoint start with the first program. host: address of the endpoint.
    """

    waited_for = "the engines or the agent"

    def __init__(self, config: AgentConfig, renderer: Renderer, host: str, model: str):
        self.config, self._renderer = config, renderer
        self._gateway = Gateway(host, model)
        self._args = dict(config.args) if config.function else {"command": config.command}
        arguments = [config.function or COMMAND, host]
        self._make = partial(WorkerProcess, python_module(_MODULE), arguments)
        # how many programs run in each
        self._running = {WorkerSlot(self._make): 0 for _ in range(config.workers)}
        self._alone = asyncio.Semaphore(_ALONE)
        self._parsers = TurnParsers(config.tool_parser, config.reasoning_parser)
        self._ended, self._seconds, self._waited_s = 0, 0.0, 0.0  # since the last `add_metrics`
        self._measured: list[dict[str, float]] = []  # by programs, since then

    def add_metrics(self, metrics: "Metrics") -> None:
        """Adds the mean seconds of programs since the last call, outside and inside the engines'
        time, the means of their own measurements, and the turns that the parsers could not read."""
        metrics.add_sum("agent/unparsed_turns", self._parsers.unparsed)
        self._parsers.unparsed = 0
        metrics.add_mean("agent/program_s", self._seconds, self._ended)
        metrics.add_mean("agent/engines_s", self._waited_s, self._ended)
        for name in MEASURED:
            values = [measured[name] for measured in self._measured if name in measured]
            metrics.add_mean(f"agent/{name}", sum(values), len(values))
        self._measured.clear()
        self._ended, self._seconds, self._waited_s = 0, 0.0, 0.0

    def close(self) -> None:
        """Ends all processes, after the loop has ended."""
        for slot in self._running:
            slot.close()
        self._parsers.close()
        self._gateway.close()

    async def rollout(self, task: RolloutTask) -> tuple[Sequence[SamplePart], Outcome]:
        """Returns the samples of a rollout and its outcome: never a reward for a program that
        failed.

        If another program ended its process, a program begins again in a separate process. Raises
        GenerationFailed.
        """
        self._gateway.start()
        outcome, talk = Outcome(""), None
        for place in (self._shared, self._separate):
            async with place() as slot:
                talk = Conversation(self.config, self._renderer, task, self._parsers.message)
                try:
                    outcome = await self._run(slot, task, talk)
                    break
                except WorkerError as exc:
                    outcome = Outcome("error", detail=f"the process of its program died: {exc}")
        assert talk is not None, "one of both places"
        return talk.samples()[0], outcome

    @asynccontextmanager
    async def _shared(self) -> AsyncIterator[WorkerSlot]:
        slot = min(self._running, key=self._running.__getitem__)
        self._running[slot] += 1
        try:
            yield slot
        finally:
            self._running[slot] -= 1

    @asynccontextmanager
    async def _separate(self) -> AsyncIterator[WorkerSlot]:
        async with self._alone:
            slot = WorkerSlot(self._make)
            try:
                yield slot
            finally:
                await asyncio.to_thread(slot.close)

    async def _run(self, slot: WorkerSlot, task: RolloutTask, talk: Conversation) -> Outcome:
        """Returns the outcome of one program. Raises WorkerError if its process is gone, or is held
        by this program or another one, and GenerationFailed."""
        process = await slot.started()
        began = time.monotonic()
        with self._gateway.session(talk) as (base_url, key):
            row = task.row | {"seed": task.seed_of("agent")}
            arguments = {"base_url": base_url, "key": key, "row": row} | self._args
            call = asyncio.ensure_future(process.call(arguments))
            awaited: list[asyncio.Future] = [call, talk.failed]
            try:
                while not call.done():
                    left = self.config.timeout_s + talk.waited_s - (time.monotonic() - began)
                    if left <= 0:
                        if slot in self._running and not await process.reacts():
                            raise WorkerError("a program in it does not let the others run")
                        return Outcome(
                            "timeout", detail=f"no reward in {self.config.timeout_s:g} s"
                        )
                    await asyncio.wait(awaited, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                    if talk.failed.done() and not call.done():
                        talk.failed.result()
                result, error = call.result()
                self._ended += 1
                self._waited_s += talk.waited_s
                self._seconds += time.monotonic() - began - talk.waited_s
                return self._outcome(talk, result, error)
            finally:
                # its process ends with the others that it has if the program goes on
                call.cancel()

    def _outcome(self, talk: Conversation, result: list | None, error: str | None) -> Outcome:
        if result is not None:
            reward, turn_rewards, note, measured = result
            self._measured.append(measured)
            return talk.outcome(reward, turn_rewards, note, self.config.credit == "turn")
        if talk.stopped and self.config.truncated_reward is not None:
            return talk.outcome(self.config.truncated_reward, None, str(error), False)
        raised = f"{self.config.function or COMMAND} raised {error}"
        return Outcome("error", detail="; ".join(filter(None, (talk.stopped, raised))))
