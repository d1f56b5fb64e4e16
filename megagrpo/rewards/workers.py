"""Runs graders in killable processes: each call has a result within its time limit, whatever the
function does."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megagrpo.config.reward import GraderArgs
from megagrpo.rewards.part_rewards import Span
from megagrpo.system.worker_process import (
    START_TIMEOUT_S,
    WorkerError,
    WorkerProcess,
    WorkerSlot,
    python_module,
)

# kind ("grade" or "group", see worker.py), function, its arguments
Call = tuple[str, str, GraderArgs]


@dataclass(frozen=True)
class Graded:
    """The result of a grader: a score for each response, or the reason why there is none."""

    status: str  # "score" | "error" | "timeout"; "none": it leaves the score to other graders
    scores: tuple[float, ...] = ()
    detail: str = ""  # why there is no score, or the grader's remark
    spans: tuple[Span, ...] = ()  # rewards of parts of the text, besides the score
    tokens: tuple[float, ...] = ()  # rewards of all tokens of the response, besides the score


class GraderWorkers:
    """Processes that grade one response at a time each, until `close`. Coroutines are of one loop.

    preload: calls whose functions are imported at start. timeout_s: seconds for one call.
    """

    def __init__(self, num_workers: int, preload: Sequence[Call], timeout_s: float):
        make = partial(
            WorkerProcess, python_module("megagrpo.rewards.worker"), [json.dumps(preload)]
        )
        self._preload, self._timeout_s = preload, timeout_s
        self._slots = [WorkerSlot(make) for _ in range(num_workers)]
        self._idle = asyncio.Queue[WorkerSlot]()
        for slot in self._slots:
            self._idle.put_nowait(slot)

    async def start(self) -> None:
        """Starts all processes. Raises WorkerError."""
        await asyncio.gather(*(slot.started() for slot in self._slots))

    async def grade(self, call: Call, inputs: Sequence[object]) -> Graded:
        """Returns the function's result for `inputs`."""
        slot = await self._idle.get()
        try:
            # a start and an import of a row's grader do not count towards the time limit
            process = await slot.started()
            if call not in self._preload:
                await process.only_call(call, START_TIMEOUT_S)
            value, error = await process.only_call([*call, list(inputs)], self._timeout_s)
        except TimeoutError:
            return Graded("timeout", detail=f"{call[1]} gave no result in {self._timeout_s:g} s")
        except WorkerError as exc:
            return Graded("error", detail=f"{call[1]}: the worker process died: {exc}")
        finally:
            self._idle.put_nowait(slot)
        if error is not None:
            return Graded("error", detail=f"{call[1]}: {error}")
        status, scores, detail, spans, tokens = value
        return Graded(status, tuple(scores), detail, tuple(map(tuple, spans)), tuple(tokens))

    def close(self) -> None:
        """Ends every process; calls without a result get an error. Idempotent."""
        for slot in self._slots:
            slot.close()
