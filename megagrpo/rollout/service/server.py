"""The rollout service: SGLang engines, a supervisor for each, and a small HTTP endpoint through which
trainers list the engines and report the verified ones.

- GET /status: {"failed", "engines": [{"id", "url", "state", "serves", ...}]}
- GET /metrics: the engines and the run's last step, for Prometheus
- POST /engines: starts one more engine; answers {"id"}
- POST /engines/{id}/drain: finishes the engine's requests and ends it; 409 if too few would remain
- POST /engines/update, {"incarnations": {id: incarnation}}: a trainer starts writing weights, and a
  late answer is no hang; answers {"ended": [ids of incarnations that have ended]}, as the next three
- POST /engines/ready, {"incarnations", "weight_version"}: published and verified
- POST /engines/wake, {"incarnations"}: verified engines there resume their cache memory
- POST /engines/lost, {"incarnations"}: the update failed half-way, so the engines must restart
- POST /sleep: makes the engines on trainers' GPUs release their memory and lets none start; answers
  when they have
- POST /may_start: lets engines that died meanwhile restart

Every request carries the run's API key, which engines require as well.
"""

import asyncio
import hmac
import json
import os
import random
import secrets
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path

import aiohttp
import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from megagrpo.config.schema import ExperimentConfig
from megagrpo.monitor.prometheus import exposition
from megagrpo.rollout.control import ServiceFailed, ServiceUnreachable, find_service
from megagrpo.rollout.service.addresses import own_address, reachable_host
from megagrpo.rollout.service.engine_command import on_gpus
from megagrpo.rollout.service.engine_model import as_engines_see_it
from megagrpo.rollout.service.node import Machines, ThisMachine, free_port
from megagrpo.rollout.service.sleep import CACHE
from megagrpo.rollout.service.supervisor import StaleReport, SupervisedEngine
from megagrpo.system import environment
from megagrpo.system.background import end_tasks
from megagrpo.system.environment import visible_gpus
from megagrpo.system.run_folder import RunFolder, write_whole

_FAILED_LINGER_S = 60.0  # a failed service stays that long, so that waiting trainers can read why
_STARTING_POLL_S = 0.1
_HTTP_TIMEOUT_S = 30.0  # of requests to engines, unless they set another

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve(config: ExperimentConfig, run_dir: Path, ray_address: str | None = None) -> int:
    """Runs the service until SIGTERM, SIGINT or failure; returns the exit code. No process remains.

    ray_address: "host:port" of a running Ray cluster, whose machines engines share; without it they
    run on this machine. When the engines are up, run_dir/service.json holds {"url": ...}. Raises
    ValueError if rollout.host is not an address or interface of this machine, engines cannot start
    from a quantized model, they require GPUs and none is visible, or Ray cannot be joined.
    """
    folder = RunFolder(run_dir.absolute())
    _refuse_beside_another(folder)
    folder.service.unlink(missing_ok=True)  # an older run's URL would mislead trainers
    api_key = make_key(folder.service_key)
    try:
        with ExitStack() as stack:
            machines: Machines
            if ray_address is None:
                machines = ThisMachine(visible_gpus())
            else:
                from megagrpo.rollout.service.ray_cluster import in_ray_cluster  # takes a second

                machines = stack.enter_context(in_ray_cluster(ray_address))
            cuda = on_gpus(config, machines.num_gpus)
            engine_config = as_engines_see_it(config, folder, cuda)
            service = _Service(engine_config, folder, machines=machines, api_key=api_key)
            return asyncio.run(service.run())
    finally:
        # with another key they are of a start since this run's launcher was killed
        with suppress(FileNotFoundError):
            if api_key == folder.service_key.read_text():
                for left in (folder.service, folder.service_key, folder.service_progress):
                    left.unlink(missing_ok=True)


def _refuse_beside_another(folder: RunFolder) -> None:
    # there is none, or that of a run that was killed, or it failed
    with suppress(ServiceUnreachable, ServiceFailed):
        service = find_service(folder.path)
        service.healthy_status()
        raise ValueError(
            f"output_dir {folder.path}: the rollout service of a run there answers at "
            f"{service.url}; wait for the end of that run or name another output_dir"
        )


def make_key(file: Path) -> str:
    """Returns the API key of this run: that of the environment, else a new one. It is written to
    `file` for the run's trainers, `status`, `engines` and Prometheus.

    Only this user can read the file.
    """
    key = environment.get(environment.API_KEY) or secrets.token_hex(32)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    file.touch(0o600, exist_ok=False)
    file.write_text(key)
    return key


class _Service:
    """Runs the engines and the control endpoint, from their start to their end."""

    def __init__(
        self, config: ExperimentConfig, folder: RunFolder, *, machines: Machines, api_key: str
    ):
        self._machines = machines
        self._config, self._folder, self._api_key = config, folder, api_key
        self._address = own_address(config.rollout.host)
        self._host = reachable_host(self._address)
        self._engines: dict[str, SupervisedEngine] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of each engine by id, and `_watch`
        self._num_added = 0
        # runs that share a machine begin elsewhere
        self._next_slot = random.randrange(1000)
        self._failed: str | None = None
        self._stop, self._may_start = asyncio.Event(), asyncio.Event()
        self._may_start.set()

    async def run(self) -> int:
        """Serves until a stop signal or a failure; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=_HTTP_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),
        )
        async with AsyncExitStack() as stack:
            self._http = await stack.enter_async_context(session)
            runner = web.AppRunner(self._application())
            stack.push_async_callback(self._end, runner)
            for model, size in self._config.engine_sizes.items():
                for index in range(size.num_engines):
                    self._add_engine(index, model)
            self._tasks["watch"] = asyncio.create_task(self._watch())
            await self._open(runner)
            await self._stop.wait()
        if self._failed:
            print(f"rollout service failed: {self._failed}", flush=True)
        return int(bool(self._failed))

    async def _end(self, runner: web.AppRunner) -> None:
        await end_tasks(self._tasks.values())
        await asyncio.gather(*(engine.stop() for engine in self._engines.values()))
        await runner.cleanup()

    def _add_engine(self, index: int, model: str = "") -> SupervisedEngine:
        engine = SupervisedEngine(
            index,
            self._config,
            machines=self._machines,
            api_key=self._api_key,
            log_dir=self._folder.logs,
            may_start=self._may_start,
            model=model,
        )
        self._num_added += not model
        self._engines[engine.id] = engine
        self._tasks[engine.id] = engine.begin(self._http, self._next_slot)
        self._next_slot += self._config.engine_sizes[model].nodes_per_engine
        return engine

    async def _open(self, runner: web.AppRunner) -> None:
        """Waits for the engines, then listens and writes service.json.

        Returns early if the service is stopped or has failed.
        """
        last_line = ""
        while starting := sum(engine.is_starting for engine in self._engines.values()):
            if self._stop.is_set():
                return
            number = len(self._engines)
            logs = f"{self._folder.logs}/*.node-*.log"
            line = f"{number - starting} of {number} engines answer; {logs}"
            if line != last_line:
                write_whole(self._folder.service_progress, line)
            last_line = line
            await asyncio.sleep(0.1)
        if self._failed:
            return
        await runner.setup()
        port = free_port(self._address)
        await web.TCPSite(runner, self._address, port).start()
        url = f"http://{self._host}:{port}"
        write_whole(self._folder.service, json.dumps({"url": url, "pid": os.getpid()}))
        print(f"rollout service at {url}, {len(self._engines)} engine(s)", flush=True)

    async def _watch(self) -> None:
        """Sets the failure if too few engines are left or a task of the service raised."""
        while not self._failed:
            await asyncio.sleep(0.1)
            ended = [task for task in self._tasks.values() if task.done() and not task.cancelled()]
            errors = list(filter(None, (task.exception() for task in ended)))
            if errors:
                self._failed = "; ".join(f"{type(exc).__name__}: {exc}" for exc in errors)
            for model in self._config.engine_sizes:
                if self._num_left(model) >= self._least(model):
                    continue
                reasons = "\n".join(
                    f"{engine.id} after {engine.restarts} restart(s): {engine.reason}"
                    for engine in self._engines.values()
                    if engine.gave_up and engine.model == model
                )
                self._failed = f"{self._too_few(model)} are left. {reasons}"
                break
        if self._folder.service.exists():
            await asyncio.sleep(_FAILED_LINGER_S)
        self._stop.set()

    def _num_left(self, model: str) -> int:
        return sum(
            not engine.gave_up and engine.state != "draining"
            for engine in self._engines.values()
            if engine.model == model
        )

    def _least(self, model: str) -> int:
        return 1 if model else self._config.rollout.min_healthy_engines

    def _too_few(self, model: str) -> str:
        if model:
            return f"fewer than 1 engine of {model}"
        return f"fewer than rollout.min_healthy_engines {self._least(model)}"

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._demand_key])
        app.add_routes(
            [
                web.get("/status", self._on_status),
                web.get("/metrics", self._on_metrics),
                web.post("/engines", self._on_add),
                web.post("/engines/{id}/drain", self._on_drain),
                web.post("/engines/{event:update|ready|wake|lost}", self._on_event),
                web.post("/sleep", self._on_sleep),
                web.post("/may_start", self._on_may_start),
            ]
        )
        return app

    @web.middleware
    async def _demand_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        header, expected = request.headers.get("Authorization", ""), f"Bearer {self._api_key}"
        if not hmac.compare_digest(header.encode(), expected.encode()):
            raise web.HTTPUnauthorized(text="this service requires the API key of its run")
        return await handler(request)

    async def _on_status(self, request: web.Request) -> web.Response:
        engines = [engine.status() for engine in self._engines.values()]
        # orjson: every process that samples asks every two seconds, and engines may be many.
        body = orjson.dumps({"failed": self._failed, "engines": engines})
        return web.Response(body=body, content_type="application/json")

    async def _on_metrics(self, request: web.Request) -> web.Response:
        engines = [engine.status() for engine in self._engines.values()]
        metrics = self._folder.metrics
        text = await asyncio.to_thread(exposition, self._config.name, metrics, engines)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _on_add(self, request: web.Request) -> web.Response:
        if self._config.rollout.colocate:
            raise web.HTTPBadRequest(
                text="rollout.colocate: no GPU of the trainers is left for one more engine"
            )
        return web.json_response({"id": self._add_engine(self._num_added).id})

    async def _on_drain(self, request: web.Request) -> web.Response:
        engine = self._engines.get(request.match_info["id"])
        if engine is None:
            raise web.HTTPConflict(text=f"there are only {sorted(self._engines)}")
        model = engine.model
        if engine.state == "draining":
            return web.json_response({})
        if not engine.gave_up and self._num_left(model) - 1 < self._least(model):
            raise web.HTTPConflict(text=f"{self._too_few(model)} would be left")
        self._tasks[engine.id] = asyncio.create_task(self._drain(engine))
        await asyncio.sleep(0)  # so that it is marked as draining before the answer is sent
        return web.json_response({})

    async def _drain(self, engine: SupervisedEngine) -> None:
        await engine.drain(self._http)
        del self._engines[engine.id], self._tasks[engine.id]
        print(f"{engine.id} is drained and gone", flush=True)

    async def _on_event(self, request: web.Request) -> web.Response:
        body = await request.json()
        ended = []

        async def report(engine_id: str, incarnation: int) -> None:
            engine = self._engines.get(engine_id)
            try:
                if engine is None:
                    raise StaleReport("it is drained: the trainer's list of engines is older")
                match request.match_info["event"]:
                    case "update":
                        await engine.begin_update(self._http, incarnation)
                    case "ready":
                        engine.mark_ready(incarnation, int(body["weight_version"]))
                    case "wake":
                        await engine.wake(self._http, incarnation, CACHE)
                    case "lost":
                        engine.lost(incarnation)
            except StaleReport:
                ended.append(engine_id)

        await asyncio.gather(*(report(*engine) for engine in body["incarnations"].items()))
        return web.json_response({"ended": ended})

    async def _on_sleep(self, request: web.Request) -> web.Response:
        self._may_start.clear()
        engines = list(self._engines.values())
        while any(engine.state == "starting" for engine in engines):
            await asyncio.sleep(_STARTING_POLL_S)
        await asyncio.gather(*(engine.sleep(self._http) for engine in engines))
        return web.json_response({})

    async def _on_may_start(self, request: web.Request) -> web.Response:
        self._may_start.set()
        return web.json_response({})
