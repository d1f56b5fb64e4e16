"""sglang-router: one URL in front of the engines whose weights are verified."""

import asyncio
import sys
import time
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from subprocess import Popen

import aiohttp

from megagrpo.rollout.control import bearer
from megagrpo.system.environment import API_KEY, child_environment
from megagrpo.system.processes import spawn, stop_tree

_START_S = 60.0  # how long it may take to start
_ADD_S = 60.0  # how long it may take to list an engine
_ASK_AGAIN_S = 15.0  # before an engine is added to it again
_REQUEST_S = 10.0  # limit of one request to it
_POLL_S = 0.1
_WATCH_S = 0.5
_MAX_RESTARTS = 5  # in a row: the count restarts after a run of _STEADY_S
_STEADY_S = 120.0
_HUNG_S = 30.0  # without an answer to /workers, which only reads a list in memory
# The key must not be on the command line, which every user of the machine can read.
_PROGRAM = f"""
import os, sys
from sglang_router.launch_router import main
sys.argv.append("--api-key=" + os.environ["{API_KEY}"])
main()
"""


class RouterFailed(RuntimeError):
    """Raised when the router did not start, or did not list an engine, in time."""


class Router:
    """The router's process and the set of engines that it should list. sticky: requests of one key
    go to one engine.

    `watch` keeps the router's own list equal to that set: after a restart of the router, and after
    engines were added or removed while it did not answer.
    """

    def __init__(
        self,
        *,
        bind_host: str,
        url: str,
        metrics_port: int,
        request_timeout_s: float,
        api_key: str,
        log: Path,
        sticky: bool = False,
    ):
        self.url = url
        self._api_key, self._log = api_key, log
        options = {
            "--host": bind_host,
            "--port": url.rpartition(":")[2],
            "--prometheus-host": "127.0.0.1",
            "--prometheus-port": str(metrics_port),
            "--log-level": "warn",
            "--request-timeout-secs": str(int(request_timeout_s) + 1),
            "--worker-startup-check-interval": "1",
            # Even load matters more than a shared prompt prefix: a step is as slow as its slowest
            # engine. Later turns of a rollout go where its cache is; a first one to the engine with
            # the fewest requests.
            **(
                {"--policy": "manual", "--assignment-mode": "min_load"}
                if sticky
                else {"--policy": "round_robin"}
            ),
        }
        # Only the supervisor judges an engine's health, and only the trainers' client retries.
        flags = ["--disable-retries", "--disable-circuit-breaker", "--disable-health-check"]
        words = [word for pair in options.items() for word in pair]
        self._command = [sys.executable, "-c", _PROGRAM, *words, *flags]
        self._wanted: set[str] = set()
        self._asked: dict[str, float] = {}  # time of the last request to add each engine
        self._process: Popen | None = None
        self._started = 0.0
        self._restarts_in_a_row = self.restarts = 0

    async def start(self, http: aiohttp.ClientSession) -> None:
        """Starts the process; returns when it answers. Raises RouterFailed."""
        self._http = http
        direct = {
            "NO_PROXY": "*",
            "no_proxy": "*",
        }  # a cluster's web proxy does not know the engines
        self._process = spawn(
            self._command, child_environment(direct | {API_KEY: self._api_key}), self._log
        )
        self._started = time.monotonic()
        deadline = self._started + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(aiohttp.ClientError):
                async with http.get(f"{self.url}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(_POLL_S)
        raise RouterFailed(f"sglang-router did not start in {_START_S:.0f} s, see {self._log}")

    async def watch(self) -> None:
        """Starts it again, at the same URL, whenever it ends or hangs. Raises RouterFailed after
        too many."""
        answered = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_S)
            if await self._reconcile() is not None:
                answered = time.monotonic()
            if (
                self._process is not None
                and self._process.poll() is None
                and time.monotonic() - answered < _HUNG_S
            ):
                continue
            await self.stop()
            self.restarts += 1
            steady = time.monotonic() - self._started > _STEADY_S
            self._restarts_in_a_row = 1 if steady else self._restarts_in_a_row + 1
            if self._restarts_in_a_row > _MAX_RESTARTS:
                raise RouterFailed(
                    f"sglang-router ended {self._restarts_in_a_row} times in a row, see {self._log}"
                )
            print("sglang-router is gone: it is started again", flush=True)
            self._asked.clear()
            await self.start(self._http)
            answered = time.monotonic()

    async def add(self, engine_url: str) -> str:
        """Returns "" once the router sends requests to the engine, else the problem. A repeated
        call is harmless."""
        self._wanted.add(engine_url)
        deadline = time.monotonic() + _ADD_S
        while engine_url in self._wanted and time.monotonic() < deadline:
            if engine_url in (await self._reconcile() or ()):
                return ""
            await asyncio.sleep(_POLL_S)
        return (
            f"sglang-router did not take the engine at {engine_url} within {_ADD_S:.0f} s, see "
            f"{self._log}"
        )

    async def remove(self, engine_url: str) -> None:
        """Stops requests to the engine."""
        self._wanted.discard(engine_url)
        self._asked.pop(engine_url, None)  # one that slept comes back at the same URL
        await self._reconcile()

    async def _reconcile(self) -> set[str] | None:
        """Makes the router's list equal to the set; returns the engines that it sends requests to.

        None if it is down or slow: `watch` repeats the call.
        """
        with suppress(aiohttp.ClientError, TimeoutError):
            return await self._update_workers()
        return None

    async def _update_workers(self) -> set[str]:
        async with self._request("GET", "/workers") as answer:
            answer.raise_for_status()
            workers = {worker["url"]: worker for worker in (await answer.json())["workers"]}
        now = time.monotonic()
        for url in self._wanted - workers.keys():
            if now - self._asked.get(url, -_ASK_AGAIN_S) < _ASK_AGAIN_S:
                continue
            self._asked[url] = now
            async with self._request(
                "POST", "/workers", {"url": url, "api_key": self._api_key}
            ) as answer:
                # accepted: the router asks the engine about itself, then lists it
                answer.raise_for_status()
        for url in workers.keys() - self._wanted:
            async with self._request("DELETE", f"/workers/{workers[url]['id']}") as answer:
                answer.raise_for_status()
        return {url for url, worker in workers.items() if worker["is_healthy"]} & self._wanted

    def _request(
        self, method: str, path: str, body: dict[str, object] | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        return self._http.request(
            method, f"{self.url}{path}", json=body, headers=bearer(self._api_key), timeout=timeout
        )

    async def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            await asyncio.to_thread(
                stop_tree, self._process.pid, 0.5
            )  # its own grace is for requests in flight
            self._process.wait()
