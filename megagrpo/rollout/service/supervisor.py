"""Supervises one engine: places, starts, monitors and restarts it within a budget.

    starting -> stale -> ready -> dead -> starting -> ...        ready -> draining -> gone
                  ^        |
                  +- asleep <-  under rollout.colocate, while the actor trains; no engine starts then

`stale`: it answers, but its weights are not verified: it has just started, or a trainer is writing into it. The trainer
reports verified weights (`mark_ready`); only then the router sends requests to it. Every start is a new incarnation, so
a late report about the previous one is ignored.

Two probes detect a hang, each with a timeout of `rollout.health_timeout_s`. /health is answered by the HTTP process at
once, whatever the engine does. /server_info passes through the scheduler, between two forward passes; only ready
engines get it, because a transfer of weights occupies the scheduler: there the trainer's deadlines apply.
"""

import asyncio
import json
import time
from collections.abc import Coroutine, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.control import bearer
from megagrpo.rollout.service.node import EngineNodeActor, loopback
from megagrpo.rollout.service.router import Router, RouterFailed
from megagrpo.rollout.service.sleep import WEIGHTS, EngineMemory, SleepFailed
from megagrpo.system import environment
from megagrpo.types import EngineInfo

_WATCH_S = 1.0  # between two looks at the processes
_DRAIN_POLL_S = 0.5
_PLACE_POLL_S = 0.1
_START_POLL_S = 0.25
_LOST_NODE_S = 30.0  # how long the actors of an engine may take to stop it
_ANSWERING = ("stale", "ready", "asleep")
_LOG_TAIL = 2000  # characters of the engine's log in an error


class EngineDied(Exception):
    """Raised with the reason when an incarnation has ended or must end."""


class StaleReport(ValueError):
    """Raised when a trainer reports about an engine or incarnation that is gone."""


class SupervisedEngine:
    """Keeps one engine running. `begin` starts it; the other methods serve trainers and the command line.

    `state`, `url`, `incarnation` etc.: see EngineInfo. `lost_hosts`: machines that were lost under it. `gave_up`: its
    restart budget is spent, for `reason`. may_start: cleared while engines sleep, because a starting engine takes the
    GPU's memory.
    """

    def __init__(
        self,
        index: int,
        config: ExperimentConfig,
        *,
        cuda: bool,
        router: Router,
        api_key: str,
        log_dir: Path,
        may_start: asyncio.Event,
    ):
        self.id, self._index, self._may_start = f"engine-{index}", index, may_start
        self.state, self.url, self.pid, self.reason = "starting", "", 0, ""
        self.incarnation = self.restarts = self.lost_hosts = 0
        self.weight_version: int | None = None
        self.gave_up = self._was_up = False
        self._config, self._cuda, self._router, self._api_key, self._log_dir = config, cuda, router, api_key, log_dir
        self._patience_s = config.rollout.patience_s(cuda)
        self._group: PlacementGroup | None = None
        self._nodes: list[ActorHandle] = []  # of type EngineNode
        self._lost: asyncio.Future[None] | None = None  # done when a trainer has lost this incarnation
        self._life: asyncio.Task[None] | None = None
        self._memory = EngineMemory("", api_key, self._patience_s)  # of this incarnation

    def status(self) -> dict[str, object]:
        """Returns the fields of EngineInfo."""
        return asdict(
            EngineInfo(
                id=self.id,
                url=self.url,
                state=self.state,
                weight_version=self.weight_version,
                incarnation=self.incarnation,
                restarts=self.restarts,
                pid=self.pid,
                reason=self.reason,
            )
        )

    @property
    def is_starting(self) -> bool:
        """Tells whether it is about to answer, for the first time or again."""
        return self.state == "starting" or (self.state == "dead" and not self.gave_up)

    async def begin_update(self, http: aiohttp.ClientSession, incarnation: int) -> None:
        """Notes that a trainer is about to write weights into it, for which a sleeping one takes memory again.

        Raises StaleReport.
        """
        await self.wake(http, incarnation, WEIGHTS)
        self.state, self.weight_version = "stale", None

    async def wake(self, http: aiohttp.ClientSession, incarnation: int, part: str) -> None:
        """Lets it have a part of its memory again. Raises StaleReport, too when it does not come back."""
        self._check_current(incarnation)
        await self._move_memory(self._memory.resume(http, part), incarnation)
        self._check_current(incarnation)

    async def sleep(self, http: aiohttp.ClientSession) -> None:
        """Has it release its memory, once no request reaches it; one that cannot is ended. Nothing happens to one that
        is dead: it starts again when engines may.
        """
        if self.state not in ("stale", "ready"):
            return
        incarnation = self.incarnation
        self.state, self.weight_version = "asleep", None
        await self._router.remove(self.url)
        await self._move_memory(self._memory.release(http), incarnation)

    async def _move_memory(self, work: Coroutine[object, None, None], incarnation: int) -> None:
        try:
            await work
        except SleepFailed as exc:
            print(f"{self.id}: {exc}", flush=True)
            self.lost(incarnation)

    async def mark_ready(self, incarnation: int, weight_version: int) -> None:
        """Lets requests come: the trainer has verified that this incarnation holds `weight_version`.

        Raises StaleReport, and RouterFailed when the router does not take it.
        """
        self._check_current(incarnation)
        problem = await self._router.add(self.url)
        self._check_current(incarnation)  # it may have died meanwhile, which is no failure of the router
        if problem:
            raise RouterFailed(problem)
        self.state, self.weight_version = "ready", weight_version

    def lost(self, incarnation: int) -> None:
        """Ends this incarnation: a trainer could not finish an update of it, so that what it holds is unknown."""
        if incarnation == self.incarnation and self.state in _ANSWERING:
            self.state, self.weight_version = "dead", None  # at once: the trainer's next look must not find it usable
            if self._lost is not None and not self._lost.done():
                self._lost.set_result(None)

    def _check_current(self, incarnation: int) -> None:
        if incarnation != self.incarnation or self.state not in _ANSWERING:
            raise StaleReport(
                f"{self.id} is incarnation {self.incarnation} and {self.state}; the report is about {incarnation}"
            )

    def begin(self, http: aiohttp.ClientSession) -> asyncio.Task[None]:
        """Starts its life, a task that ends when the engine has given up."""
        self._life = asyncio.create_task(self._run(http))
        return self._life

    async def drain(self, http: aiohttp.ClientSession) -> None:
        """Lets it finish the requests that it has and take no other. Returns when it has ended."""
        assert self._life is not None, "drained before its beginning"
        was_up = self.state in _ANSWERING
        self.state = "draining"  # before the first wait: no trainer may begin an update now
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)
        if was_up:
            await self._router.remove(self.url)
            deadline = time.monotonic() + self._config.rollout.request_timeout_s
            while time.monotonic() < deadline and await self._is_busy(http):
                await asyncio.sleep(_DRAIN_POLL_S)
        await self.stop()

    async def _run(self, http: aiohttp.ClientSession) -> None:
        """Starts and watches incarnations. Returns when the budget of restarts is spent, with `gave_up` set."""
        while True:
            while not self._may_start.is_set():
                await self._may_start.wait()
            try:
                await self._start(http)
                await self._watch(http)
            except EngineDied as exc:
                self.reason = str(exc)
            except TimeoutError:  # of _ask
                limit_s = self._config.rollout.start_timeout_s
                self.reason = (
                    f"a Ray actor of its nodes gave no answer within {limit_s:.0f} s (rollout.start_timeout_s)"
                )
            except ray.exceptions.RayTaskError as exc:  # its machine is there and refuses
                self.reason = str(exc.cause)
            except ray.exceptions.RayError as exc:
                self.reason = f"its node was lost: {type(exc).__name__}: {exc}"
                self.lost_hosts += 1
            self.state, self.weight_version = "dead", None
            print(f"{self.id} died: {self.reason.splitlines()[0]}", flush=True)
            if self.url:
                await self._router.remove(self.url)
            await self.stop()
            # What never came up will hardly do so at the sixth try: one more, for a port that somebody else took.
            budget = self._config.rollout.max_restarts
            if self.restarts >= (budget if self._was_up else min(1, budget)):
                self.gave_up = True
                return
            self.restarts += 1

    async def stop(self) -> None:
        """Ends the server processes and the actors that hold them, and gives their place back."""
        nodes, self._nodes = self._nodes, []
        if nodes:
            # Where an actor is gone, the kernel has ended its server process with it.
            stopping = asyncio.gather(*(node.stop.remote() for node in nodes), return_exceptions=True)
            await asyncio.wait([stopping], timeout=_LOST_NODE_S)
            stopping.cancel()
        for node in nodes:
            ray.kill(node)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    async def _start(self, http: aiohttp.ClientSession) -> None:
        """Starts the next incarnation.

        Raises EngineDied when no answer comes within start_timeout_s, TimeoutError when the machine says nothing,
        RayError when it is lost.
        """
        rollout = self._config.rollout
        self.incarnation += 1
        self.state, self.weight_version, self.url, self.pid = "starting", None, "", 0
        self._lost = asyncio.get_running_loop().create_future()
        await self._place()
        deadline = time.monotonic() + rollout.start_timeout_s
        self._nodes = [self._make_node(rank) for rank in range(rollout.nodes_per_engine)]
        addresses = await self._ask(node.address.remote(loopback()) for node in self._nodes)
        rendezvous = f"{addresses[0][0]}:{addresses[0][2]}"
        pids = await self._ask(
            node.start.remote(address[1], rendezvous, str(self._log(rank)))
            for rank, (node, address) in enumerate(zip(self._nodes, addresses, strict=True))
        )
        self.pid = pids[0]
        url = f"http://{addresses[0][0]}:{addresses[0][1]}"
        while await self._fetch(http, url + "/health") is None:
            await self._check_processes()
            if time.monotonic() > deadline:
                limit = f"{rollout.start_timeout_s:.0f} s (rollout.start_timeout_s)"
                raise EngineDied(f"did not answer within {limit}\n{self._log_tail(0)}")
            await asyncio.sleep(_START_POLL_S)
        self._memory = EngineMemory(url, self._api_key, self._patience_s)
        self.url, self.state, self._was_up = url, "stale", True
        print(f"{self.id} is up at {url} (incarnation {self.incarnation}, pid {self.pid})", flush=True)

    async def _place(self) -> None:
        """Finds machines, anew for every start: those of the last one may be gone. Raises EngineDied."""
        rollout = self._config.rollout
        bundle = {"CPU": 1.0} | ({"GPU": float(rollout.tp // rollout.nodes_per_engine)} if self._cuda else {})
        # Ray fills up one node before it takes the next. The nodes of one engine lie apart where the machines allow it.
        strategy = "STRICT_PACK" if rollout.nodes_per_engine == 1 else "SPREAD"
        self._group = placement_group([bundle] * rollout.nodes_per_engine, strategy=strategy)
        deadline = time.monotonic() + rollout.start_timeout_s
        while placement_group_table(self._group).get("state") != "CREATED":
            if time.monotonic() > deadline:
                have = {name: amount for name, amount in ray.cluster_resources().items() if name in ("CPU", "GPU")}
                raise EngineDied(
                    f"{rollout.nodes_per_engine} x {bundle} did not fit on the machines within "
                    f"{rollout.start_timeout_s:.0f} s (rollout.start_timeout_s); they have {have} in all. Lower "
                    "rollout.num_engines or rollout.tp, or add machines"
                )
            await asyncio.sleep(_PLACE_POLL_S)

    async def _watch(self, http: aiohttp.ClientSession) -> None:
        """Watches this incarnation until it ends.

        Raises EngineDied when a process ended or nothing answers, TimeoutError when the machine says nothing, RayError
        when it is lost.
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
            # In an update the scheduler may be silent for longer.
            if self.state != state or probe.result() is not None:
                answered = time.monotonic()
            elif time.monotonic() - answered >= patience_s:
                raise EngineDied(
                    f"{self.url} hangs: no answer to {path} for {patience_s:.0f} s (rollout.health_timeout_s)"
                )
            await self._look()

    async def _look(self) -> None:
        """Waits a moment for a trainer's report, then asks after the processes. Raises EngineDied."""
        assert self._lost is not None
        await asyncio.wait([self._lost], timeout=_WATCH_S)
        if self._lost.done():
            raise EngineDied("a trainer lost it in the middle of an update of its weights")
        await self._check_processes()

    async def _check_processes(self) -> None:
        try:
            codes = await self._ask(node.exit_code.remote() for node in self._nodes)
        except ray.exceptions.ActorUnavailableError:
            return  # a broken connection: Ray will say whether the node is lost; until then the probe has a time limit
        for rank, code in enumerate(codes):
            if code is not None:
                how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                raise EngineDied(f"the server process of node {rank} ended, {how}\n{self._log_tail(rank)}")

    async def _ask(self, calls: Iterable[Any]) -> list[Any]:
        """Returns the answers of Ray actors. Raises TimeoutError when one says nothing, RayError when it is lost."""
        # Ray starts a process for the first call; later ones are answered at once.
        return await asyncio.wait_for(asyncio.gather(*calls), self._config.rollout.start_timeout_s)

    def _make_node(self, rank: int) -> ActorHandle:
        rollout = self._config.rollout
        assert self._group is not None, "placed before"
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        num_gpus = rollout.tp // rollout.nodes_per_engine if self._cuda else 0
        # On a CPU all engines of the experiment may share one machine; its cores are shared out between them.
        cores_share = rollout.num_engines * rollout.nodes_per_engine
        options = EngineNodeActor.options(num_cpus=1, num_gpus=num_gpus, scheduling_strategy=strategy, max_restarts=0)
        return options.remote(
            self._config,
            engine=self.id,
            node_rank=rank,
            cuda=self._cuda,
            cores_share=cores_share,
            api_key=self._api_key,
            gpus=self._gpus(),
        )

    def _gpus(self) -> str | None:
        """Returns its GPUs under colocation: rank r of engine k shares the GPU of trainer k * tp + r."""
        if not (self._cuda and self._config.rollout.colocate):
            return None  # Ray's choice
        visible, tp = environment.get("CUDA_VISIBLE_DEVICES"), self._config.rollout.tp
        places = range(self._index * tp, (self._index + 1) * tp)
        names = visible.split(",") if visible is not None else [str(place) for place in range(places.stop)]
        return ",".join(names[places.start : places.stop])

    def _log(self, rank: int) -> Path:
        return self._log_dir / f"{self.id}.node-{rank}.log"

    def _log_tail(self, rank: int) -> str:
        log = self._log(rank)
        text = log.read_text(errors="replace")[-_LOG_TAIL:] if log.exists() else ""
        return f"the end of {log}:\n{text}"

    async def _fetch(self, http: aiohttp.ClientSession, url: str) -> bytes | None:
        """Returns the body of a good answer within rollout.health_timeout_s; None when there is none."""
        timeout = aiohttp.ClientTimeout(total=self._patience_s)
        try:
            async with http.get(url, headers=bearer(self._api_key), timeout=timeout) as answer:
                return await answer.read() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def _is_busy(self, http: aiohttp.ClientSession) -> bool:
        """Tells whether it has requests. One that does not answer has died: nothing is left to wait for."""
        body = await self._fetch(http, f"{self.url}/v1/loads?include=core")
        return body is not None and any(
            load["num_running_reqs"] + load["num_waiting_reqs"] for load in json.loads(body)["loads"]
        )
