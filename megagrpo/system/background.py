"""An asyncio loop in a background thread: requests run there while the main thread trains."""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import TypeVar

T = TypeVar("T")
_CLOSE_S = 10.0  # how long cancelled work may take to end


class BackgroundLoop:
    """Runs coroutines in an event loop, in a thread that starts with the first coroutine."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, work: Coroutine[object, None, T]) -> "Future[T]":
        """Starts the work. The caller may cancel the future."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, daemon=True, name=self._name
            )
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, *last: Callable[[], Awaitable[None]]) -> None:
        """Cancels the work in progress, awaits each of `last` in the loop, and ends the thread.

        Idempotent. It is often called because of an exception, so it raises none of its own: a loop
        that is busy for too long ends with its process.
        """
        if self._loop is not None:
            with ExitStack() as stack:
                stack.callback(self._end_thread)
                ending = asyncio.run_coroutine_threadsafe(_cancel_others(last), self._loop)
                problem: object = f"did not end within {_CLOSE_S:g} s"
                with suppress(TimeoutError):
                    problem = ending.exception(_CLOSE_S)
                if problem is not None:
                    print(f"{self._name}: {problem}", file=sys.stderr)

    def _end_thread(self) -> None:
        assert self._loop is not None and self._thread is not None, "started together"
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._loop = self._thread = None


async def _cancel_others(last: tuple[Callable[[], Awaitable[None]], ...]) -> None:
    await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})
    for close in last:
        await close()


async def end_tasks(tasks: Iterable[asyncio.Future]) -> None:
    """Cancels tasks and waits until they have ended, whether or not they fail."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
