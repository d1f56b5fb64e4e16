"""Supervises one engine: places, starts, monitors and restarts it within a budget.

    starting -> stale -> ready -> dead -> starting -> ...        ready -> draining -> gone
                  ^        |
                  +- asleep <-   (on the trainers' GPUs while they train; no engine starts then)

`stale`: the engine answers, but its weights are not verified, because it has just started or a
trainer is writing into it. It serves requests from the first report of verified weights
(`mark_ready`) on. An engine of a teacher or judge has the weights of its files and is ready as soon
as it answers. Every start is a new incarnation, so a late report about the previous one is ignored.

Two probes detect a hang, each with a timeout of `rollout.health_timeout_s`. The HTTP process
answers /health at once, whatever the engine does. /server_info passes through the scheduler,
between two forward passes; only ready engines are probed with it: a transfer of weights occupies
the scheduler, and the trainer's deadlines apply instead.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import aiohttp

from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.control import bearer
from megagrpo.rollout.engine_choice import LOOK_S
from megagrpo.rollout.service.engine_command import ServerPlace, on_gpus
from megagrpo.rollout.service.node import (
    LOOPBACK,
    EngineDied,
    Machines,
    NodeSilent,
    Placed,
)
from megagrpo.rollout.service.sleep import WEIGHTS, EngineMemory, SleepFailed
from megagrpo.system.processes import end_of, namespaces
from megagrpo.types import LOADS, EngineInfo

_WATCH_S = 1.0  # between two checks of the processes
_DRAIN_POLL_S = 0.5
_LAST_REQUEST_S = 2 * LOOK_S  # until all who send requests know that it serves no more
_START_POLL_S = 0.25
_LOST_NODE_S = 30.0  # limit for an engine's nodes to stop it
_ANSWERING = ("stale", "ready", "asleep")
_LOG_TAIL = 2000  # bytes of the engine's log in an error


class StaleReport(ValueError):
    """Raised when a trainer's report concerns an engine or incarnation that has ended."""


class SupervisedEngine:
    """Keeps one engine running. `begin` starts it; the other methods serve trainers and the command
    line.

    config: the experiment, also for other models' engines. model: the served model, "" for an engine
    that samples. `state`, `url`, `incarnation` etc.: see EngineInfo. `gave_up`: the restart budget is
    spent; `reason` is the last failure. may_start: cleared while engines on the trainers' GPUs
    sleep, because a starting one allocates memory there.
    """

    def __init__(
        self,
        index: int,
        config: ExperimentConfig,
        *,
        machines: Machines,
        api_key: str,
        log_dir: Path,
        may_start: asyncio.Event,
        model: str = "",
    ):
        self.id = f"{model or 'engine'}-{index}"
        self.model, self._index, self._may_start = model, index, may_start
        self._machines, self._cuda = machines, on_gpus(config, machines.num_gpus)
        self._num_servers, self._slot = config.num_servers, 0
        if model:
            config = config.for_model(model)
        self.state, self.url, self.pid, self.reason = "starting", "", 0, ""
        self.incarnation = self.restarts = 0
        self.serves = False
        self.weight_version: int | None = None
        self.load: dict[str, float] = {}  # both as in EngineInfo
        self.load_now: dict[str, float] = {}
        self.cache_tokens: int | None = None
        self.gave_up = self._was_up = False
        self._config, self._api_key, self._log_dir = config, api_key, log_dir
        self._patience_s = config.rollout.patience_s(self._cuda)
        self._placed: Placed | None = None
        # done when a trainer reports this incarnation as lost
        self._lost: asyncio.Future[None] | None = None
        self._life: asyncio.Task[None] | None = None
        self._memory = EngineMemory("", api_key, self._patience_s)  # of this incarnation

    def status(self) -> EngineInfo:
        """Returns its present state."""
        return EngineInfo(**{field.name: getattr(self, field.name) for field in fields(EngineInfo)})

    @property
    def is_starting(self) -> bool:
        """Returns whether it is starting or will restart."""
        return self.state == "starting" or (self.state == "dead" and not self.gave_up)

    async def begin_update(self, http: aiohttp.ClientSession, incarnation: int) -> None:
        """Marks it stale because a trainer will write weights into it; a sleeping engine first
        resumes the memory of the weights.

        Raises StaleReport.
        """
        await self.wake(http, incarnation, WEIGHTS)
        self.state, self.weight_version = "stale", None  # it serves on

    async def wake(self, http: aiohttp.ClientSession, incarnation: int, part: str) -> None:
        """Resumes a part of its memory. Raises StaleReport, also if the engine is lost in the
        attempt."""
        self._check_current(incarnation)
        await self._move_memory(self._memory.resume(http, part), incarnation)
        self._check_current(incarnation)

    async def sleep(self, http: aiohttp.ClientSession) -> None:
        """Stops serving and releases the memory; an engine that fails to do so is ended. Does
        nothing to a dead engine, which restarts once `may_start` is set. Concurrent calls all
        return when the memory is free, that of an engine that is ending included.
        """
        if self.state in _ANSWERING:
            incarnation = self.incarnation
            self._stop_serving("asleep")
            await self._move_memory(self._memory.release(http), incarnation)
        while self._placed and self.state not in _ANSWERING:
            await asyncio.sleep(_START_POLL_S)

    async def _move_memory(self, work: Coroutine[object, None, None], incarnation: int) -> None:
        try:
            await work
        except SleepFailed as exc:
            print(f"{self.id}: {exc}", flush=True)
            self.lost(incarnation)

    def mark_ready(self, incarnation: int, weight_version: int) -> None:
        """Makes it serve, after the trainer has verified `weight_version` in this incarnation.

        Raises StaleReport.
        """
        self._check_current(incarnation)
        self.state, self.weight_version, self.serves = "ready", weight_version, True
        self.load, self.load_now = {}, {}

    def lost(self, incarnation: int) -> None:
        """Ends this incarnation after an unfinished update, because its weights are undefined."""
        if incarnation == self.incarnation and self.state in _ANSWERING:
            # at once: the next status must not show it as usable
            self._stop_serving("dead")
            if self._lost is not None and not self._lost.done():
                self._lost.set_result(None)

    def _stop_serving(self, state: str) -> None:
        self.state, self.weight_version, self.serves = state, None, False

    def _check_current(self, incarnation: int) -> None:
        if incarnation != self.incarnation or self.state not in _ANSWERING:
            raise StaleReport(
                f"{self.id} is incarnation {self.incarnation} and {self.state}; "
                f"the report is about {incarnation}"
            )

    def begin(self, http: aiohttp.ClientSession, slot: int) -> asyncio.Task[None]:
        """Starts the task that runs it, which ends when its restart budget is spent.

        slot: number of its first server process among those of the run, see `server_ports`.
        """
        self._slot = slot
        self._life = asyncio.create_task(self._run(http))
        return self._life

    async def drain(self, http: aiohttp.ClientSession) -> None:
        """Stops new requests to it, waits for those in flight and ends it."""
        assert self._life is not None, "drained before its beginning"
        was_up = self.state in _ANSWERING
        # before the first await: no trainer may start an update now
        self.state, self.serves = "draining", False
        began = time.monotonic()
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)
        if was_up:
            await asyncio.sleep(_LAST_REQUEST_S)
            deadline = began + self._config.rollout.request_timeout_s
            while time.monotonic() < deadline:
                load = await self._read_load(http)
                if load["running"] + load["waiting"] == 0:  # or it does not answer: it has died
                    break
                await asyncio.sleep(_DRAIN_POLL_S)
        await self.stop()

    async def _run(self, http: aiohttp.ClientSession) -> None:
        """Starts and watches incarnations. Returns when the budget of restarts is spent, with
        `gave_up` set."""
        while True:
            # cleared again, perhaps, before this runs
            while self._config.rollout.colocate and not self._may_start.is_set():
                await self._may_start.wait()
            try:
                await self._start(http)
                await self._watch(http)
            except TimeoutError:  # of _ask
                limit_s = self._config.rollout.start_timeout_s
                limit = f"{limit_s:.0f} s (rollout.start_timeout_s)"
                self.reason = f"one of its nodes gave no answer in {limit}"
            except (EngineDied, NodeSilent, ValueError, OSError) as exc:
                self.reason = str(exc)
            self._stop_serving("dead")
            first, _, _ = self.reason.partition("\n")
            print(f"{self.id} died: {first}", flush=True)
            await self.stop()
            # An engine that never answered gets one restart only, in case another process took its
            # port.
            budget = self._config.rollout.max_restarts
            if not self._was_up:
                budget = min(1, budget)
            if self.restarts >= budget:
                self.gave_up = True
                return
            self.restarts += 1

    async def stop(self) -> None:
        """Ends the server processes, and gives their machines back."""
        if self._placed is None:
            return
        # If a node is lost, the kernel has ended its server process with it.
        stopping = asyncio.gather(
            *(ask("stop") for ask in self._placed.asks), return_exceptions=True
        )
        await asyncio.wait([stopping], timeout=_LOST_NODE_S)
        stopping.cancel()
        self._placed.release()
        self._placed = None

    async def _start(self, http: aiohttp.ClientSession) -> None:
        """Starts the next incarnation.

        Raises EngineDied if it does not answer within start_timeout_s or its node is lost,
        TimeoutError if a node does not answer.
        """
        rollout = self._config.rollout
        self.incarnation += 1
        self.state, self.weight_version, self.url, self.pid = "starting", None, "", 0
        self._lost = asyncio.get_running_loop().create_future()
        scores = self.model.startswith("teacher-")
        number = self._index + 1024 * self.restarts  # above those of other engines
        place = ServerPlace(0, cuda=self._cuda, scores=scores, engine=number)
        # On a CPU all engines of the experiment may share one machine; its cores are divided among
        # them.
        gpus = rollout.tp // rollout.nodes_per_engine if self._cuda else 0
        self._placed = await self._machines.place(
            self._config, gpus, place, self._num_servers, self._api_key
        )
        deadline = time.monotonic() + rollout.start_timeout_s
        nodes = list(enumerate(self._placed.asks))
        loopback = namespaces(LOOPBACK)
        addresses = await self._ask(
            ask("address", loopback, self._slot + rank, self.incarnation) for rank, ask in nodes
        )
        rendezvous = f"{addresses[0][0]}:{addresses[0][2]}"
        pids = await self._ask(
            ask("start", addresses[rank][1], rendezvous, str(self._log(rank)))
            for rank, ask in nodes
        )
        self.pid = pids[0]
        url = f"http://{addresses[0][0]}:{addresses[0][1]}"
        while await self._fetch(http, url + "/health") is None:
            await self._check_processes()
            if time.monotonic() > deadline:
                limit = f"{rollout.start_timeout_s:.0f} s (rollout.start_timeout_s)"
                raise EngineDied(f"did not answer within {limit}\n{self._log_tail(0)}")
            await asyncio.sleep(_START_POLL_S)
        info = await self._fetch(http, url + "/server_info")
        self.cache_tokens = _tokens_of_caches(json.loads(info or "{}"))
        self._memory = EngineMemory(url, self._api_key, self._patience_s)
        self.url, self.state, self._was_up = url, "ready" if self.model else "stale", True
        self.serves = bool(self.model)
        print(
            f"{self.id} is up at {url} (incarnation {self.incarnation}, pid {self.pid})", flush=True
        )

    async def _watch(self, http: aiohttp.ClientSession) -> None:
        """Watches this incarnation until it ends.

        Raises EngineDied if a process ended or does not answer or its node is lost, TimeoutError
        if a node does not answer.
        """
        patience_s = self._patience_s
        answered = time.monotonic()
        while True:
            state, path = self.state, "/server_info" if self.state == "ready" else "/health"
            probe = asyncio.create_task(self._fetch(http, self.url + path))
            try:
                while not probe.done() and self.state == state:
                    await self._look()
            finally:
                probe.cancel()
            # During an update the scheduler may take longer to answer.
            if self.state != state or probe.result() is not None:
                answered = time.monotonic()
                if self.state == "ready":
                    await self._read_load(http)
            elif time.monotonic() - answered >= patience_s:
                raise EngineDied(
                    f"{self.url} hangs: no answer to {path} for {patience_s:.0f} s "
                    "(rollout.health_timeout_s)"
                )
            await self._look()

    async def _look(self) -> None:
        """Waits up to _WATCH_S for a trainer's report, then checks the processes. Raises
        EngineDied."""
        assert self._lost is not None
        await asyncio.wait([self._lost], timeout=_WATCH_S)
        if self._lost.done():
            raise EngineDied("a trainer lost it in the middle of an update of its weights")
        await self._check_processes()

    async def _check_processes(self) -> None:
        assert self._placed is not None, "checked before its start"
        try:
            codes = await self._ask(ask("exit_code") for ask in self._placed.asks)
        except (
            NodeSilent
        ):  # Ray reports later if the node is lost; until then the probe's limit applies
            return
        for rank, code in enumerate(codes):
            if code is not None:
                end = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                raise EngineDied(
                    f"the server process of node {rank} ended, {end}\n{self._log_tail(rank)}"
                )

    async def _ask(self, calls: Iterable[Awaitable[Any]]) -> list[Any]:
        """Returns the nodes' answers. Raises TimeoutError without one, EngineDied if a node is
        lost."""
        # Ray starts a process for the first call; later ones are answered at once.
        return await asyncio.wait_for(asyncio.gather(*calls), self._config.rollout.start_timeout_s)

    def _log(self, rank: int) -> Path:
        return self._log_dir / f"{self.id}.node-{rank}.log"

    def _log_tail(self, rank: int) -> str:
        log = self._log(rank)
        return f"the end of {log}:\n{end_of(log, _LOG_TAIL) if log.exists() else ''}"

    async def _fetch(self, http: aiohttp.ClientSession, url: str) -> bytes | None:
        """Returns the body of a response with status 200 within rollout.health_timeout_s, else
        None."""
        timeout = aiohttp.ClientTimeout(total=self._patience_s)
        with suppress(aiohttp.ClientError, TimeoutError):
            async with http.get(url, headers=bearer(self._api_key), timeout=timeout) as answer:
                if answer.status == 200:
                    return await answer.read()
        return None

    async def _read_load(self, http: aiohttp.ClientSession) -> dict[str, float]:
        """Returns the load over all data-parallel ranks, whose maximum `load` keeps; zeros without
        an answer."""
        body = await self._fetch(http, f"{self.url}/v1/loads?include=core,queues")
        ranks = json.loads(body or '{"loads": []}')["loads"]
        now = (
            max((rank["token_usage"] for rank in ranks), default=0.0),
            *(sum(rank[f"num_{kind}_reqs"] for rank in ranks) for kind in ("running", "waiting")),
            sum(rank["queues"]["retracted"] for rank in ranks),
        )
        load = dict(zip(LOADS, now, strict=True))
        self.load = {name: max(value, self.load.get(name, 0.0)) for name, value in load.items()}
        self.load_now = load if ranks else {}
        return load


def _tokens_of_caches(server_info: dict) -> int | None:
    """Returns the tokens that an engine's caches hold; None if unknown."""
    tokens = server_info.get("max_total_num_tokens")
    if tokens and server_info.get("enable_dp_attention"):  # each replica has a separate cache
        return tokens * server_info.get("dp_size", 1)
    return tokens
