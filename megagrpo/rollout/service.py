"""The rollout service: SGLang engines under Ray's placement, a supervisor for each, sglang-router in front, and a small
HTTP endpoint where trainers learn who is there and say whose weights they have verified.

    GET  /status                -> {"router", "failed", "engines": [{"id", "url", "state", "weight_version", "incarnation", ...}]}
    POST /engines/{id}/ready    {"incarnation", "weight_version"}: published and verified; 409 when that incarnation is gone
    POST /engines/{id}/suspect  could not be reached: look at once
    POST /shutdown
"""

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import ray
from aiohttp import web
from ray.util.placement_group import PlacementGroup, placement_group

from megagrpo.config import ExperimentConfig
from megagrpo.rollout.client import SERVICE_FILE
from megagrpo.rollout.service_node import free_port, reachable_host
from megagrpo.rollout.service_router import Router, RouterFailed
from megagrpo.rollout.service_supervisor import Engine, StaleReport

_FAILED_LINGER_S = 60.0  # a failed service stays that long, so that waiting trainers can read why
_OBJECT_STORE_BYTES = 80 * 2**20  # no batch passes through Ray: its least


def serve(config: ExperimentConfig, run_dir: Path, ray_address: str | None = None) -> int:
    """Run the service until SIGTERM, SIGINT, /shutdown or failure; returns the exit code. Nothing is left behind.

    `ray_address` joins a running Ray cluster, else a private one is started on this machine. When the engines are up,
    run_dir/service.json holds {"url": ...}. Raises ValueError when the machines do not suffice.
    """
    run_dir = run_dir.absolute()
    service_file = run_dir / SERVICE_FILE
    service_file.unlink(missing_ok=True)  # an older run's URL would mislead trainers
    with _ray(config, ray_address):
        cuda = ray.cluster_resources().get("GPU", 0) > 0
        group = _place(config, cuda)
        try:
            return asyncio.run(_Service(config, run_dir, group, cuda).run())
        finally:
            service_file.unlink(missing_ok=True)


@contextmanager
def _ray(config: ExperimentConfig, address: str | None) -> Iterator[None]:
    quiet = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    if address is not None:
        ray.init(address=address, **quiet)
        try:
            yield
        finally:
            ray.shutdown()
        return
    num_nodes = config.rollout.num_engines * config.rollout.nodes_per_engine
    folder = tempfile.mkdtemp(prefix="mgr-")  # short: Unix socket paths end at 107 characters
    try:
        # "local": a Ray of our own, whatever else runs on this machine. Its processes end with this one, even by SIGKILL.
        ray.init(
            address="local",
            num_cpus=num_nodes,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            _system_config={"worker_niceness": 0},  # an engine is no background job
            _temp_dir=folder,
            **quiet,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _place(config: ExperimentConfig, cuda: bool) -> PlacementGroup:
    """A bundle for every node of every engine. Raises ValueError when Ray cannot place them in time."""
    rollout = config.rollout
    bundle = {"CPU": 1.0} | ({"GPU": float(rollout.tp // rollout.nodes_per_engine)} if cuda else {})
    bundles = [bundle] * (rollout.num_engines * rollout.nodes_per_engine)
    group = placement_group(bundles, strategy="PACK")
    if not group.wait(rollout.start_timeout_s):
        have = {name: amount for name, amount in ray.cluster_resources().items() if name in ("CPU", "GPU")}
        raise ValueError(
            f"rollout: {len(bundles)} x {bundle} did not fit on the machines within {rollout.start_timeout_s:.0f} s; they have {have} "
            "in all. Lower rollout.num_engines or rollout.tp, or add machines"
        )
    return group


class _Service:
    def __init__(self, config: ExperimentConfig, run_dir: Path, group: PlacementGroup, cuda: bool):
        self._config, self._run_dir = config, run_dir
        host = config.rollout.host
        self._host = reachable_host(host)
        logs = run_dir / "logs"
        self._router = Router(
            host, self._host, free_port(host), free_port(host), config.rollout.request_timeout_s, logs / "router.log"
        )
        numbers = range(config.rollout.num_engines)
        self._engines = {e.id: e for e in (Engine(i, config, group, cuda, self._router, logs) for i in numbers)}
        self._failed: str | None = None
        self._stop = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        timeout = aiohttp.ClientTimeout(total=30.0)
        tasks: list[asyncio.Task] = []
        async with aiohttp.ClientSession(timeout=timeout) as http:
            runner = web.AppRunner(self._application())
            try:
                await self._router.start(http)
                tasks = [asyncio.create_task(engine.run(http)) for engine in self._engines.values()]
                tasks.append(asyncio.create_task(self._router.watch()))
                tasks.append(asyncio.create_task(self._watch(tasks[:])))
                await self._open(runner)
                await self._stop.wait()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.gather(self._router.stop(), *(engine.stop() for engine in self._engines.values()))
                await runner.cleanup()
        if self._failed:
            print(f"rollout service failed: {self._failed}", flush=True)
        return 1 if self._failed else 0

    async def _open(self, runner: web.AppRunner) -> None:
        """Wait for the engines, then listen and say where. Returns early when the service is stopped or has failed."""
        while any(engine.state == "starting" or engine.state == "dead" and not engine.gave_up for engine in self._engines.values()):
            if self._stop.is_set():
                return
            await asyncio.sleep(0.1)
        if self._failed:
            return
        await runner.setup()
        port = free_port(self._config.rollout.host)
        await web.TCPSite(runner, self._config.rollout.host, port).start()
        url = f"http://{self._host}:{port}"
        target = self._run_dir / SERVICE_FILE
        draft = target.with_suffix(".tmp")
        draft.write_text(json.dumps({"url": url, "pid": os.getpid()}))
        draft.replace(target)
        print(f"rollout service at {url}, {len(self._engines)} engine(s) behind {self._router.url}", flush=True)

    async def _watch(self, lives: list[asyncio.Task]) -> None:
        """Declare failure when too few engines are left or when a part of the service itself broke."""
        while not self._failed:
            await asyncio.sleep(0.1)
            broken = [task.exception() for task in lives if task.done() and task.exception() is not None]
            if broken:
                self._failed = "; ".join(f"{type(exc).__name__}: {exc}" for exc in broken)
            gone = [engine for engine in self._engines.values() if engine.gave_up]
            if len(self._engines) - len(gone) < self._config.rollout.min_healthy_engines:
                reasons = "\n".join(f"{e.id} after {e.restarts} restart(s): {e.reason}" for e in gone)
                self._failed = f"fewer than rollout.min_healthy_engines {self._config.rollout.min_healthy_engines} are left. {reasons}"
        if (self._run_dir / SERVICE_FILE).exists():
            await asyncio.sleep(_FAILED_LINGER_S)
        self._stop.set()

    def _application(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/status", self._on_status),
                web.post("/engines/{id}/ready", self._on_ready),
                web.post("/engines/{id}/suspect", self._on_suspect),
                web.post("/shutdown", self._on_shutdown),
            ]
        )
        return app

    async def _on_status(self, request: web.Request) -> web.Response:
        engines = [engine.status() for engine in self._engines.values()]
        return web.json_response({"router": self._router.url, "failed": self._failed, "engines": engines})

    async def _on_ready(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            await self._engine(request).mark_ready(int(body["incarnation"]), int(body["weight_version"]))
        except StaleReport as exc:
            return web.json_response({"error": str(exc)}, status=409)
        except (RouterFailed, aiohttp.ClientError) as exc:
            return web.json_response({"error": f"{type(exc).__name__}: {exc}"}, status=503)
        return web.json_response({})

    async def _on_suspect(self, request: web.Request) -> web.Response:
        self._engine(request).suspect()
        return web.json_response({})

    async def _on_shutdown(self, request: web.Request) -> web.Response:
        self._stop.set()
        return web.json_response({})

    def _engine(self, request: web.Request) -> Engine:
        found = self._engines.get(request.match_info["id"])
        if found is None:
            raise web.HTTPNotFound(text=f"no engine {request.match_info['id']}; there are {sorted(self._engines)}")
        return found
