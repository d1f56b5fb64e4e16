"""sglang-router: one URL in front of the engines whose weights are verified."""

import asyncio
import sys
import time
from pathlib import Path
from subprocess import Popen

import aiohttp

from megagrpo.environment import child_environment
from megagrpo.processes import spawn, stop_tree

_START_S = 60.0
_ADD_S = 60.0
_POLL_S = 0.1
_MAX_RESTARTS = 5


class RouterFailed(RuntimeError):
    """The router did not start, or did not take a worker, in time."""


class Router:
    """The child process and the list of its workers. A router that dies is started again with the same workers."""

    def __init__(self, bind_host: str, host: str, port: int, metrics_port: int, request_timeout_s: float, log: Path):
        self.url = f"http://{host}:{port}"
        self._log = log
        self._command = [sys.executable, "-m", "sglang_router.launch_router", "--host", bind_host, "--port", str(port)]
        self._command += ["--prometheus-host", bind_host, "--prometheus-port", str(metrics_port), "--log-level", "warn"]
        self._command += ["--request-timeout-secs", str(int(request_timeout_s) + 1), "--worker-startup-check-interval", "1"]
        # Even load matters more than a shared prompt prefix: a step is as slow as its slowest engine.
        self._command += ["--policy", "round_robin"]
        # One judge of an engine's health and one place that retries: the supervisor and the trainers' client.
        self._command += ["--disable-retries", "--disable-circuit-breaker", "--disable-health-check"]
        self._workers: set[str] = set()
        self._process: Popen | None = None
        self.restarts = 0

    async def start(self, http: aiohttp.ClientSession) -> None:
        """Raises RouterFailed."""
        self._http = http
        self._process = spawn(self._command, child_environment(), self._log)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                async with http.get(f"{self.url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(_POLL_S)
        raise RouterFailed(f"sglang-router did not start in {_START_S:.0f} s, see {self._log}")

    async def watch(self) -> None:
        """Start it again whenever it ends, with the workers that it had. Raises RouterFailed when that does not help."""
        while True:
            await asyncio.sleep(0.5)
            if self._process.poll() is None:
                continue
            self.restarts += 1
            if self.restarts > _MAX_RESTARTS:
                raise RouterFailed(f"sglang-router ended {self.restarts} times, see {self._log}")
            await self.start(self._http)
            for url in sorted(self._workers):
                await self.add(url)

    async def add(self, engine_url: str) -> None:
        """Returns when requests reach the engine; adding one that is there changes nothing. Raises RouterFailed."""
        self._workers.add(engine_url)
        if engine_url in await self._known():
            return
        async with self._http.post(f"{self.url}/workers", json={"url": engine_url}) as answer:
            answer.raise_for_status()  # accepted: the router asks the engine about itself, then lists it
        deadline = time.monotonic() + _ADD_S
        while time.monotonic() < deadline:
            if engine_url in await self._known():
                return
            await asyncio.sleep(_POLL_S)
        raise RouterFailed(f"sglang-router did not take the engine at {engine_url} within {_ADD_S:.0f} s, see {self._log}")

    async def remove(self, engine_url: str) -> None:
        self._workers.discard(engine_url)
        worker = (await self._known()).get(engine_url)
        if worker is not None:
            async with self._http.delete(f"{self.url}/workers/{worker}") as answer:
                answer.raise_for_status()

    async def _known(self) -> dict[str, str]:
        """URL -> the router's id, of the workers that it sends requests to."""
        async with self._http.get(f"{self.url}/workers") as answer:
            answer.raise_for_status()
            return {worker["url"]: worker["id"] for worker in (await answer.json())["workers"] if worker["is_healthy"]}

    async def stop(self) -> None:
        if self._process is not None:
            await asyncio.to_thread(stop_tree, self._process.pid, 0.5)  # its own grace is for other people's requests
            self._process.wait()
