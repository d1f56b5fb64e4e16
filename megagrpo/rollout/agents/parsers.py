"""Tool calls and reasoning in a turn of the model, read by the parsers of SGLang's registry in
killable processes.

Text that the parsers drop is missing in the agent's message, never in the ids. A text without calls
or reasoning stays as it is.
"""

import asyncio
from contextlib import suppress
from functools import partial

from megagrpo.data.messages import Message, Tools
from megagrpo.rollout.generation import GenerationFailed
from megagrpo.rollout.service.engine_command import environment_without_gpu
from megagrpo.system.errors import translated
from megagrpo.system.worker_process import WorkerError, WorkerProcess, WorkerSlot, python_module

_MODULE = "megagrpo.rollout.service.parser_worker"
_PROCESSES = 2  # so that one slow turn holds no others
_LIMIT_S = 120.0  # for a turn, which its process ends after some seconds of processor time


class TurnParsers:
    """Parses turns of the model. Empty names: the text is the message. Coroutines run in one loop.

    A process takes seconds and 340 MiB; it starts for a turn when no process is idle.
    """

    def __init__(self, tool_parser: str, reasoning_parser: str):
        self._names = tool_parser, reasoning_parser
        make = partial(
            WorkerProcess, python_module(_MODULE), self._names, environment_without_gpu()
        )
        self._slots = [WorkerSlot(make) for _ in range(_PROCESSES)]
        self._idle = asyncio.Semaphore(_PROCESSES)  # the queue of all turns; no slot has its own
        self.unparsed = 0  # turns

    async def message(self, text: str, tools: Tools, prefix: str) -> Message:
        """Returns the message of a turn: only its text if a parser raises, ends or takes too long.
        tools: functions. prefix: how the ids of calls begin.

        Cancellation ends the process that parses. Raises GenerationFailed if no process starts.
        """
        message: Message = {"role": "assistant", "content": text}
        named = [tool["function"] for tool in tools or () if self._names[0]]
        functions = [{"name": str(f["name"]), "parameters": f.get("parameters")} for f in named]
        if functions or self._names[1]:
            parsed = None
            keys = "sampling.agent.tool_parser, reasoning_parser: SGLang's parsers do not start"
            async with self._idle:
                slot = min(self._slots, key=lambda slot: slot.busy.locked())
                async with slot.busy:
                    with translated(keys, WorkerError, raised=GenerationFailed):
                        process = await slot.started()
                    with suppress(TimeoutError, WorkerError):
                        parsed, _ = await process.only_call([text, functions, prefix], _LIMIT_S)
            self.unparsed += parsed is None
            message |= parsed or {}
        return message

    def close(self) -> None:
        """Ends all processes."""
        for slot in self._slots:
            slot.close()
