"""The rollout service: SGLang engines under Ray's placement, a supervisor for each, sglang-router in front, and a small
HTTP endpoint where trainers learn who is there and say whose weights they have verified.

    GET  /status                -> {"router", "failed", "lost_hosts", "engines": [{"id", "url", "state", "incarnation", ...}]}
    POST /engines               one more; answers {"id"}
    POST /engines/{id}/drain    it finishes what it has and goes; 409 when too few would be left
    POST /engines/{id}/update   {"incarnation"}: a trainer begins to write weights; 409 when that incarnation is gone
    POST /engines/{id}/ready    {"incarnation", "weight_version"}: published and verified; 409 as above
    POST /engines/{id}/lost     {"incarnation"}: an update of it failed half-way, it is to be started again
    POST /shutdown

Every request carries the run's API key, which engines and router demand as well.
"""

import asyncio
import hmac
import json
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import ray
from aiohttp import web

from megagrpo import environment
from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.service.node import free_port, own_address, reachable_host
from megagrpo.rollout.service.router import Router, RouterFailed
from megagrpo.rollout.service.supervisor import StaleReport, SupervisedEngine
from megagrpo.run_folder import RunFolder, write_whole

_FAILED_LINGER_S = 60.0  # a failed service stays that long, so that waiting trainers can read why
_SPARE_NODES = 2  # for engines added while it runs; a CPU here is a place, GPUs are counted
_OBJECT_STORE_BYTES = 80 * 2**20  # no batch passes through Ray: its least


def serve(config: ExperimentConfig, run_dir: Path, ray_address: str | None = None) -> int:
    """Run the service until SIGTERM, SIGINT, /shutdown or failure; returns the exit code. Nothing is left behind.

    `ray_address` joins a running Ray cluster, else a private one is started on this machine. When the engines are up,
    run_dir/service.json holds {"url": ...}. Raises ValueError when rollout.host is nothing of this machine.
    """
    folder = RunFolder(run_dir.absolute())
    folder.service.unlink(missing_ok=True)  # an older run's URL would mislead trainers
    api_key = make_key(folder.service_key)
    try:
        with _ray(config, ray_address):
            cuda = ray.cluster_resources().get("GPU", 0) > 0
            return asyncio.run(_Service(config, folder, cuda, api_key).run())
    finally:
        folder.service.unlink(missing_ok=True)
        folder.service_key.unlink(missing_ok=True)


def make_key(file: Path) -> str:
    """The key of this run: given by the environment, else made up and left for the run's trainers, readable by this user only."""
    given = environment.get(environment.API_KEY)
    if given:
        return given
    key = secrets.token_hex(32)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
        output.write(key)
    return key


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
            num_cpus=num_nodes + _SPARE_NODES,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            _system_config={"worker_niceness": 0},  # an engine is no background job
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
            **quiet,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


class _Service:
    def __init__(self, config: ExperimentConfig, folder: RunFolder, cuda: bool, api_key: str):
        self._config, self._folder, self._cuda, self._api_key = config, folder, cuda, api_key
        self._address = own_address(config.rollout.host)
        self._host = reachable_host(self._address)
        url = f"http://{self._host}:{free_port(self._address)}"
        log = folder.log("router")
        self._router = Router(
            self._address, url, free_port("127.0.0.1"), config.rollout.request_timeout_s, api_key, log
        )
        self._engines: dict[str, SupervisedEngine] = {}
        self._lives: dict[str, asyncio.Task] = {}
        self._num_added = self._lost_hosts = 0
        self._failed: str | None = None
        self._stop = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        timeout = aiohttp.ClientTimeout(total=30.0)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as self._http:
            runner = web.AppRunner(self._application())
            try:
                await self._router.start(self._http)
                for _ in range(self._config.rollout.num_engines):
                    self._add_engine()
                self._lives["router"] = asyncio.create_task(self._router.watch())
                self._lives["watch"] = asyncio.create_task(self._watch())
                await self._open(runner)
                await self._stop.wait()
            finally:
                tasks = list(self._lives.values())
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.gather(self._router.stop(), *(engine.stop() for engine in self._engines.values()))
                await runner.cleanup()
        if self._failed:
            print(f"rollout service failed: {self._failed}", flush=True)
        return 1 if self._failed else 0

    def _add_engine(self) -> SupervisedEngine:
        engine = SupervisedEngine(
            self._num_added, self._config, self._cuda, self._router, self._api_key, self._folder.logs
        )
        self._num_added += 1
        self._engines[engine.id] = engine
        self._lives[engine.id] = engine.begin(self._http)
        return engine

    async def _open(self, runner: web.AppRunner) -> None:
        """Wait for the engines, then listen and say where. Returns early when the service is stopped or has failed."""
        while any(
            engine.state == "starting" or (engine.state == "dead" and not engine.gave_up)
            for engine in self._engines.values()
        ):
            if self._stop.is_set():
                return
            await asyncio.sleep(0.1)
        if self._failed:
            return
        await runner.setup()
        port = free_port(self._address)
        await web.TCPSite(runner, self._address, port).start()
        url = f"http://{self._host}:{port}"
        write_whole(self._folder.service, json.dumps({"url": url, "pid": os.getpid()}))
        print(f"rollout service at {url}, {len(self._engines)} engine(s) behind {self._router.url}", flush=True)

    async def _watch(self) -> None:
        """Declare failure when too few engines are left or when a part of the service itself broke."""
        while not self._failed:
            await asyncio.sleep(0.1)
            ended = [task for task in self._lives.values() if task.done() and not task.cancelled()]
            broken = [task.exception() for task in ended if task.exception() is not None]
            if broken:
                self._failed = "; ".join(f"{type(exc).__name__}: {exc}" for exc in broken)
            gone = [engine for engine in self._engines.values() if engine.gave_up]
            if self._num_left() < self._config.rollout.min_healthy_engines:
                reasons = "\n".join(f"{e.id} after {e.restarts} restart(s): {e.reason}" for e in gone)
                self._failed = f"fewer than rollout.min_healthy_engines {self._config.rollout.min_healthy_engines} are left. {reasons}"
        if self._folder.service.exists():
            await asyncio.sleep(_FAILED_LINGER_S)
        self._stop.set()

    def _num_left(self) -> int:
        return sum(not engine.gave_up and engine.state != "draining" for engine in self._engines.values())

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._demand_key])
        app.add_routes(
            [
                web.get("/status", self._on_status),
                web.post("/engines", self._on_add),
                web.post("/engines/{id}/drain", self._on_drain),
                web.post("/engines/{id}/update", self._on_update),
                web.post("/engines/{id}/ready", self._on_ready),
                web.post("/engines/{id}/lost", self._on_lost),
                web.post("/shutdown", self._on_shutdown),
            ]
        )
        return app

    @web.middleware
    async def _demand_key(self, request: web.Request, handler) -> web.StreamResponse:
        if not hmac.compare_digest(
            request.headers.get("Authorization", "").encode(), f"Bearer {self._api_key}".encode()
        ):
            raise web.HTTPUnauthorized(text="this service wants the API key of its run")
        return await handler(request)

    async def _on_status(self, request: web.Request) -> web.Response:
        engines = [engine.status() for engine in self._engines.values()]
        lost_hosts = self._lost_hosts + sum(engine.lost_hosts for engine in self._engines.values())
        return web.json_response(
            {"router": self._router.url, "failed": self._failed, "lost_hosts": lost_hosts, "engines": engines}
        )

    async def _on_add(self, request: web.Request) -> web.Response:
        return web.json_response({"id": self._add_engine().id})

    async def _on_drain(self, request: web.Request) -> web.Response:
        engine, healthy = self._engine(request), self._config.rollout.min_healthy_engines
        if engine.state == "draining":
            return web.json_response({})
        if not engine.gave_up and self._num_left() - 1 < healthy:
            return web.json_response(
                {"error": f"fewer than rollout.min_healthy_engines {healthy} would be left"}, status=409
            )
        self._lives[engine.id] = asyncio.create_task(self._drain(engine))
        await asyncio.sleep(0)  # it is marked as draining before anyone hears so
        return web.json_response({})

    async def _drain(self, engine: SupervisedEngine) -> None:
        await engine.drain(self._http)
        del self._engines[engine.id], self._lives[engine.id]
        self._lost_hosts += engine.lost_hosts  # the sum never falls
        print(f"{engine.id} is drained and gone", flush=True)

    async def _on_update(self, request: web.Request) -> web.Response:
        try:
            self._engine(request).begin_update(int((await request.json())["incarnation"]))
        except StaleReport as exc:
            return web.json_response({"error": str(exc)}, status=409)
        return web.json_response({})

    async def _on_ready(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            await self._engine(request).mark_ready(int(body["incarnation"]), int(body["weight_version"]))
        except StaleReport as exc:
            return web.json_response({"error": str(exc)}, status=409)
        except RouterFailed as exc:
            return web.json_response({"error": f"{type(exc).__name__}: {exc}"}, status=503)
        return web.json_response({})

    async def _on_lost(self, request: web.Request) -> web.Response:
        self._engine(request).lost(int((await request.json())["incarnation"]))
        return web.json_response({})

    async def _on_shutdown(self, request: web.Request) -> web.Response:
        self._stop.set()
        return web.json_response({})

    def _engine(self, request: web.Request) -> SupervisedEngine:
        found = self._engines.get(request.match_info["id"])
        if found is None:  # 409: it was drained, which a trainer may learn late
            raise web.HTTPConflict(text=f"no engine {request.match_info['id']}; there are {sorted(self._engines)}")
        return found
