"""Runs what samples in a thread of its own, beside what the main thread computes and its collectives."""

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
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
            if not self._thread.is_alive():
                self._loop.close()
            self._loop = self._thread = None


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Turnstile:
    """Lets requests leave in order, while no more than `limit` are on their way and these hold no more than `tokens`.

    For one event loop. tokens: of the engines' caches; None: as many as come.
    """

    def __init__(self, limit: int = 1, tokens: float | None = None) -> None:
        self.limit, self.tokens = limit, tokens
        self._inside, self._held = 0, 0.0
        self._waiting: list[_Waiting] = []  # a heap
        self._came = itertools.count()

    @asynccontextmanager
    async def passing(
        self, order: tuple[float, ...] = (), tokens: Callable[[], float] = lambda: 0.0
    ) -> AsyncIterator[None]:
        """Waits for its turn; the block is the request's way.

        order: the least goes first, of equal ones the one that came first; all of one length. tokens: what it will hold
        in a cache, asked for when it may leave.
        """
        waiting = _Waiting((*order, next(self._came)), tokens, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, waiting)
        self.admit()
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.done() and not waiting.turn.cancelled():  # let in a moment before
                self._leave(waiting)
            self.admit()  # those behind it, where it was the first
            raise
        try:
            yield
        finally:
            self._leave(waiting)

    def _leave(self, gone: "_Waiting") -> None:
        self._inside, self._held = self._inside - 1, self._held - gone.turn.result()
        self.admit()

    def admit(self) -> None:
        """Lets in those that may; to be called when `limit` or `tokens` has grown.

        None passes another for being small: what needs much room would wait for ever. One alone always may.
        """
        while self._waiting and self._inside < self.limit:
            first = self._waiting[0]
            if not first.turn.done():
                tokens = first.tokens()
                if self._inside and self.tokens is not None and self._held + tokens > self.tokens:
                    return
                self._inside, self._held = self._inside + 1, self._held + tokens
                first.turn.set_result(tokens)
            heapq.heappop(self._waiting)


@dataclass(order=True)
class _Waiting:
    """Holds a request that has not left."""

    order: tuple[float, ...]
    tokens: Callable[[], float] = field(compare=False)
    turn: "asyncio.Future[float]" = field(compare=False)  # what it holds, from when it may leave


class Patience:
    """Bounds what a block may take from the moment when somebody waits for it, which any thread may say.

    An async context manager that raises TimeoutError. What is sampled while others train has no hurry.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None  # of time.monotonic
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timeout: asyncio.Timeout | None = None

    def begin(self) -> None:
        """Counts from now."""
        self._set(time.monotonic() + self._seconds)

    def end(self) -> None:
        """Counts no more: nobody waits."""
        self._set(None)

    def _set(self, until: float | None) -> None:
        self._until = until
        if (loop := self._loop) is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._apply)

    async def __aenter__(self) -> None:
        self._loop, self._timeout = asyncio.get_running_loop(), asyncio.timeout(None)
        await self._timeout.__aenter__()
        self._apply()  # after the loop is known: `begin` in the other thread sees one or the other

    async def __aexit__(self, *exc_info: Any) -> None:
        assert self._timeout is not None, "entered"
        timeout, self._timeout = self._timeout, None
        await timeout.__aexit__(*exc_info)

    def _apply(self) -> None:
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self._until)  # the clock of event loops is time.monotonic
