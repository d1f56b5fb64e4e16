"""The life of one engine: started, watched, started again when it dies, until its budget is spent.

    starting -> stale -> ready -> dead -> starting -> ...

`stale`: it answers, but holds whatever weights it started with; a trainer publishes to it, verifies, and says so (`mark_ready`);
only then does the router send it requests. Every start is a new incarnation, so a late word about the last one is not believed.
"""

import asyncio
import time
from pathlib import Path

import aiohttp
import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megagrpo.config import ExperimentConfig
from megagrpo.rollout.service_node import EngineNode
from megagrpo.rollout.service_router import Router

_WATCH_S = 1.0
_HEALTH_TIMEOUT_S = 10.0
_MISSED_CHECKS = 6  # in a row; a loaded machine answers late
_LOG_TAIL = 2000  # characters of the engine's log in an error


class EngineDied(Exception):
    """Why an incarnation ended."""


class StaleReport(ValueError):
    """A trainer spoke about an incarnation that is not the present one."""


class Engine:
    """One engine under supervision. `run` is its life; the other methods are what trainers ask and say."""

    def __init__(self, index: int, config: ExperimentConfig, group: PlacementGroup, cuda: bool, router: Router, log_dir: Path):
        self.id = f"engine-{index}"
        self.state, self.url, self.pid = "starting", "", 0
        self.incarnation = self.restarts = 0
        self.weight_version: int | None = None
        self.reason = ""  # of the last death
        self.gave_up = self._was_up = False
        self._index, self._config, self._group, self._cuda, self._router, self._log_dir = index, config, group, cuda, router, log_dir
        self._nodes: list = []
        self._suspected = asyncio.Event()

    def status(self) -> dict:
        names = ("id", "url", "state", "weight_version", "incarnation", "restarts", "pid", "reason")
        return {name: getattr(self, name) for name in names}

    async def mark_ready(self, incarnation: int, weight_version: int) -> None:
        """The trainer has verified that this incarnation holds these weights: requests may come. Raises StaleReport."""
        self._check_current(incarnation)
        await self._router.add(self.url)
        self._check_current(incarnation)  # it may have died while the router looked at it
        self.state, self.weight_version = "ready", weight_version

    def _check_current(self, incarnation: int) -> None:
        if incarnation != self.incarnation or self.state not in ("stale", "ready"):
            raise StaleReport(f"{self.id} is incarnation {self.incarnation} and {self.state}; the report is about {incarnation}")

    def suspect(self) -> None:
        """Somebody could not reach it: look now, and believe one missed answer."""
        self._suspected.set()

    async def run(self, http: aiohttp.ClientSession) -> None:
        """Returns when the budget of restarts is spent, with `gave_up` set and the reason in `reason`."""
        while True:
            try:
                await self._start(http)
                await self._watch(http)
            except (EngineDied, ray.exceptions.RayError) as exc:
                self.reason = f"{exc}" if isinstance(exc, EngineDied) else f"its node was lost: {type(exc).__name__}: {exc}"
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
        """End the server processes and the actors that hold them."""
        nodes, self._nodes = self._nodes, []
        for stopping in [node.stop.remote() for node in nodes]:
            try:
                await asyncio.wait_for(asyncio.wrap_future(stopping.future()), 30.0)
            except (ray.exceptions.RayError, TimeoutError):
                pass  # the actor is gone, and the kernel ended its server process with it
        for node in nodes:
            ray.kill(node)

    async def _start(self, http: aiohttp.ClientSession) -> None:
        """Raises EngineDied when no answer comes within start_timeout_s, RayError when the machine is lost."""
        rollout = self._config.rollout
        self.incarnation += 1
        self.state, self.weight_version, self.url, self.pid = "starting", None, "", 0
        deadline = time.monotonic() + rollout.start_timeout_s
        self._nodes = [self._make_node(rank) for rank in range(rollout.nodes_per_engine)]
        waiting = asyncio.gather(*(node.address.remote() for node in self._nodes))
        try:
            addresses = await asyncio.wait_for(waiting, rollout.start_timeout_s)
        except TimeoutError:
            raise EngineDied(f"Ray found no machine for it in {rollout.start_timeout_s:.0f} s (rollout.start_timeout_s)") from None
        rendezvous = f"{addresses[0][0]}:{addresses[0][2]}"
        starts = [
            node.start.remote(address[1], rendezvous, str(self._log(rank)))
            for rank, (node, address) in enumerate(zip(self._nodes, addresses, strict=True))
        ]
        self.pid = (await asyncio.gather(*starts))[0]
        url = f"http://{addresses[0][0]}:{addresses[0][1]}"
        while not await _answers(http, url):
            await self._check_processes()
            if time.monotonic() > deadline:
                raise EngineDied(f"did not answer within {rollout.start_timeout_s:.0f} s (rollout.start_timeout_s)\n{self._log_tail(0)}")
            await asyncio.sleep(0.25)
        self.url, self.state, self._was_up = url, "stale", True
        print(f"{self.id} is up at {url} (incarnation {self.incarnation}, pid {self.pid})", flush=True)

    async def _watch(self, http: aiohttp.ClientSession) -> None:
        """Raises EngineDied when a process ended or nothing answers, RayError when the machine is lost."""
        missed = 0
        while True:
            try:
                await asyncio.wait_for(self._suspected.wait(), _WATCH_S)
            except TimeoutError:
                pass
            suspected = self._suspected.is_set()
            self._suspected.clear()
            await self._check_processes()
            missed = 0 if await _answers(http, self.url) else missed + 1
            if missed >= _MISSED_CHECKS or missed and suspected:
                raise EngineDied(f"{self.url} does not answer (missed {missed} checks of {_HEALTH_TIMEOUT_S:.0f} s)")

    async def _check_processes(self) -> None:
        codes = await asyncio.gather(*(node.exit_code.remote() for node in self._nodes))
        for rank, code in enumerate(codes):
            if code is not None:
                how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                raise EngineDied(f"the server process of node {rank} ended, {how}\n{self._log_tail(rank)}")

    def _make_node(self, rank: int):
        rollout = self._config.rollout
        bundle = self._index * rollout.nodes_per_engine + rank
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        num_gpus = rollout.tp // rollout.nodes_per_engine if self._cuda else 0
        # On a CPU all engines of the experiment may share one machine; its cores are shared out between them.
        cores_share = rollout.num_engines * rollout.nodes_per_engine
        options = EngineNode.options(num_cpus=1, num_gpus=num_gpus, scheduling_strategy=strategy, max_restarts=0)
        return options.remote(self._config, rank, self._cuda, cores_share)

    def _log(self, rank: int) -> Path:
        return self._log_dir / f"{self.id}.node-{rank}.log"

    def _log_tail(self, rank: int) -> str:
        log = self._log(rank)
        text = log.read_text(errors="replace")[-_LOG_TAIL:] if log.exists() else ""
        return f"the end of {log}:\n{text}"


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
