"""Chooses the engine for a request: one with the fewest requests, or the one whose cache already has
the beginning of it."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from megagrpo.rollout.control import ServiceControl, ServiceUnreachable
from megagrpo.types import EngineInfo

LOOK_S = 2.0  # between looks at the service's status, which reads loads once a second
_FRESH_S = 0.2  # a look this young is not repeated: many requests fail with one engine
# engines for a request: to compare 1,000 takes as long as to send it
_COMPARED = 64
_PROCESS = ("stale", "ready", "asleep", "draining")  # states in which an engine's server runs


@dataclass
class Affinity:
    """Requests that share an Affinity go to the same engine, while it serves."""

    url: str = ""  # of the engine that got the last request


class Engines:
    """Chooses the engine of every request of one process, from the service's last status.

    The service decides which engines serve, so weights that are not verified never sample. The load
    of an engine is this process's requests in flight and, as of the last look, those of other
    processes. All serving engines have the same weights, or soon will. For one event loop.
    """

    def __init__(self, listing: Callable[[], Sequence[EngineInfo]], api_key: str):
        """listing: returns all engines; called in another thread, may raise ServiceUnreachable.
        api_key: the key that engines require."""
        self._listing = listing
        self.api_key = api_key
        self.listed: Sequence[EngineInfo] = ()  # at the last look, in whatever state
        self._serving: dict[str, EngineInfo] = {}  # by URL, as all below
        self._elsewhere: dict[str, float] = {}  # requests of other processes
        self._in_flight: defaultdict[str, set[Callable[[], None]]] = defaultdict(set)
        self._looking = asyncio.Lock()
        self._looked = float("-inf")
        # Its own generator: no other number of the process depends on how many requests there were.
        self._random = random.Random()

    @classmethod
    def from_service(cls, control: ServiceControl, model: str = "") -> "Engines":
        """Returns the engines of a service that sample, or those of a served model."""
        return cls(lambda: control.status().engines_of(model), control.api_key)

    async def look(self, older_than_s: float = 0.0) -> None:
        """Reads the service's status, unless the last look is younger; concurrent calls share one.

        Raises ServiceUnreachable.
        """
        asked = time.monotonic()
        async with self._looking:
            if self._looked >= asked - older_than_s:
                return
            began = time.monotonic()
            # In a thread: a service that is slow to answer must not hold up requests in flight.
            engines = await asyncio.to_thread(self._listing)
            self._looked = began
            self._take(engines)

    async def watch(self) -> None:
        """Looks every LOOK_S seconds until it is canceled. The code that waits for samples reports
        a service that does not answer."""
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(ServiceUnreachable):
                await self.look(LOOK_S / 2)

    def _take(self, engines: Sequence[EngineInfo]) -> None:
        """Takes a status of the service. Abandons the requests in flight to servers that have
        ended, because a server that went down with its host closes no connection."""
        self.listed = engines
        self._serving = {engine.url: engine for engine in engines if engine.serves}
        self._elsewhere = {
            url: max(0.0, _requests(engine) - self._load(url))
            for url, engine in self._serving.items()
        }
        running = {engine.url for engine in engines if engine.state in _PROCESS}
        for url in self._in_flight.keys() - running:
            for abandon in tuple(self._in_flight[url]):
                abandon()

    async def choose(self, affinity: Affinity | None = None, avoid: str = "") -> EngineInfo | None:
        """Returns the engine of a request, or None if none serves, even after a look.

        avoid: URL of an engine that has just failed; it is chosen only if no other serves.
        """
        if not self._serving or avoid:
            with suppress(ServiceUnreachable):
                await self.look(_FRESH_S)
        if not self._serving:
            return None
        affinity = affinity or Affinity()
        if affinity.url not in self._serving or affinity.url == avoid:
            affinity.url = self._least_loaded(avoid)
        return self._serving[affinity.url]

    @contextmanager
    def in_flight(self, url: str, abandon: Callable[[], None]) -> Iterator[None]:
        """Counts a request to the engine at `url` until the block ends.

        abandon: called in the event loop if the engine's server is gone.
        """
        self._in_flight[url].add(abandon)
        try:
            yield
        finally:
            self._in_flight[url].discard(abandon)
            if not self._in_flight[url]:
                del self._in_flight[url]

    def _load(self, url: str) -> int:
        return len(self._in_flight.get(url, ()))

    def _least_loaded(self, avoid: str) -> str:
        """Returns the engine with the fewest requests of this process, which it knows exactly.

        If several are equal, it takes the one of two with fewer requests of other processes, not
        the best of all: processes that saw the same loads would all choose that one.
        """
        urls = [url for url in self._serving if url != avoid] or list(self._serving)
        compared = self._random.sample(urls, min(_COMPARED, len(urls)))
        two = sorted(compared, key=self._load)[:2]
        return min(two, key=lambda url: (self._load(url), self._elsewhere[url]))


def _requests(engine: EngineInfo) -> float:
    """Returns an engine's requests when the service last looked; 0 if it did not answer."""
    return engine.load_now.get("running", 0.0) + engine.load_now.get("waiting", 0.0)
