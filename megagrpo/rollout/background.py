"""Runs what samples in a thread of its own, beside what the main thread computes and its collectives."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")
_CANCEL_S = 10.0  # how long cancelled work may take to end


class BackgroundLoop:
    """Runs coroutines in an event loop of its own thread, which starts with the first one."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begins the work; its future may be cancelled."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="rollout")
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancels what still runs, and ends the thread."""
        if self._loop is None or self._thread is None:
            return
        ended = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        try:
            ended.result(_CANCEL_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CANCEL_S)
            self._loop = self._thread = None


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Turnstile:
    """Lets requests leave first come, first served, while no more than `limit` are on their way. For one event loop."""

    def __init__(self, limit: int = 1) -> None:
        self.limit = limit
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Waits for its turn; the block is the request's way."""
        if self._inside >= self.limit or self._waiting:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # let in a moment before
                    self._leave()
                raise
        else:
            self._inside += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._inside -= 1
        self.admit()

    def admit(self) -> None:
        """Lets in those that may; to be called when `limit` has grown."""
        while self._waiting and self._inside < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self._inside += 1
                turn.set_result(None)
