"""Admission of requests to the engines: in order, while their caches have room.

AdmissionQueue decides which request leaves next, ResponseLengths estimates how many tokens one will
occupy.
"""

import asyncio
import heapq
import itertools
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from megagrpo.types import EngineInfo

# tokens in flight for each that the caches hold: the next request is there when one ends
_IN_FLIGHT = 1.1
_BURST = 64  # requests admitted before the event loop sends them: it would prepare all others first
_REMEMBERED = 4096  # samples: older ones were sampled by another policy
_ASSUMED = 8  # samples of the full length, as a prior


class AdmissionQueue:
    """Admits requests in order while at most `limit` are in flight and these occupy at most
    `tokens`.

    For one event loop. tokens: capacity of the engines' caches.
    """

    def __init__(self, limit: int = 1, tokens: float = math.inf) -> None:
        self.limit = limit
        self.tokens = tokens
        self._in_flight = 0
        self._occupied = 0.0
        self._waiting: list[_Waiting] = []  # a heap
        self._arrivals = itertools.count()
        self._burst = _BURST  # that may be admitted now

    def share(self, engines: Sequence[EngineInfo], at_once: int, num_leaders: int) -> None:
        """Sets both limits to one leader's share of these engines; at_once: requests per engine."""
        # one that has used up its restarts is listed for ever
        number = sum(engine.state != "dead" for engine in engines) or len(engines)
        self.limit = max(1, number * at_once // num_leaders)
        sizes = [engine.cache_tokens for engine in engines if engine.cache_tokens]
        if sizes:
            self.tokens = _IN_FLIGHT * number * sum(sizes) / len(sizes) / num_leaders
        self.admit()

    @asynccontextmanager
    async def admitted(
        self, order: tuple[float, ...] = (), tokens: Callable[[], float] = lambda: 0.0
    ) -> AsyncIterator[None]:
        """Waits until the request is admitted; it is in flight until the block ends.

        order: the smallest goes first, then the one that arrived first; all have the same length.
        tokens: how much of a cache the request will occupy, evaluated when it may leave.
        """
        waiting = _Waiting(
            (*order, next(self._arrivals)), tokens, asyncio.get_running_loop().create_future()
        )
        heapq.heappush(self._waiting, waiting)
        self.admit()
        try:
            await waiting.admitted
            yield
        finally:
            # Perhaps it was admitted just before a cancellation.
            if waiting.admitted.done() and not waiting.admitted.cancelled():
                self._in_flight -= 1
                self._occupied -= waiting.admitted.result()
            self.admit()

    def admit(self) -> None:
        """Admits the requests that fit; call it when `limit` or `tokens` has grown.

        Small requests do not pass large ones, which would starve. A request that is alone is always
        admitted.
        """
        while self._waiting and self._in_flight < self.limit and self._burst:
            first = self._waiting[0]
            if not first.admitted.done():
                tokens = first.tokens()
                if self._in_flight and self._occupied + tokens > self.tokens:
                    return
                self._in_flight += 1
                self._occupied += tokens
                first.admitted.set_result(tokens)
                self._burst -= 1
                if not self._burst:
                    asyncio.get_running_loop().call_soon(self._next_burst)
            heapq.heappop(self._waiting)

    def _next_burst(self) -> None:
        self._burst = _BURST
        self.admit()


@dataclass(order=True)
class _Waiting:
    """Holds a request that has not left."""

    order: tuple[float, ...]
    tokens: Callable[[], float] = field(compare=False)
    admitted: "asyncio.Future[float]" = field(compare=False)  # the tokens that it occupies


def tokens_in_cache(mean: float, mean_square: float) -> float:
    """Returns E[L^2] / (2 E[L]), the mean response tokens of a running sample in an engine that is
    always busy.

    At any moment long responses are the larger part, and half complete on average.
    """
    return mean_square / (2 * mean)


class ResponseLengths:
    """Estimates how many tokens a running sample occupies, from the responses so far. For one event
    loop.

    max_tokens: the limit of a response, which is assumed until the first one is complete.
    """

    def __init__(self, max_tokens: int) -> None:
        self._sum = float(_ASSUMED * max_tokens)
        self._sum_of_squares = float(_ASSUMED * max_tokens**2)

    def add(self, length: int) -> None:
        """Adds a response, in tokens."""
        keep = 1 - 1 / _REMEMBERED
        self._sum = keep * self._sum + length
        self._sum_of_squares = keep * self._sum_of_squares + length**2

    def occupied(self) -> float:
        """Returns the mean response tokens of a running sample."""
        return tokens_in_cache(max(self._sum, 1.0), self._sum_of_squares)
