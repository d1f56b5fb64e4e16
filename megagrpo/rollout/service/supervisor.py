"""The life of one engine: placed, started, watched, started again when it dies or hangs, until its budget is spent.

    starting -> stale -> ready -> dead -> starting -> ...        ready -> draining -> gone

`stale`: it answers, but nobody vouches for its weights: it has just started, or a trainer is writing into it. The trainer
verifies and says so (`mark_ready`); only then does the router send it requests. Every start is a new incarnation, so a late
word about the last one is not believed.

Two questions tell whether it hangs, each with `rollout.health_timeout_s` of patience. /health is answered by the HTTP process
alone, at once, whatever the engine does. /server_info goes through the scheduler, between two forward passes; it is asked of
ready engines only, since a transfer of weights occupies the scheduler: there the trainer has deadlines of its own.
"""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

import aiohttp
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.service.node import EngineNode, loopback
from megagrpo.rollout.service.router import Router

_WATCH_S = 1.0
_DRAIN_POLL_S = 0.5
_PLACE_POLL_S = 0.1
_LOST_NODE_S = 30.0
_LOG_TAIL = 2000  # characters of the engine's log in an error


class EngineDied(Exception):
    """Why an incarnation ended."""


class StaleReport(ValueError):
    """A trainer spoke about an incarnation that is not the present one."""


class SupervisedEngine:
    """One engine under supervision. `run` is its life; the other methods are what trainers and people ask and say."""

    def __init__(self, index: int, config: ExperimentConfig, cuda: bool, router: Router, api_key: str, log_dir: Path):
        self.id = f"engine-{index}"
        self.state, self.url, self.pid = "starting", "", 0
        self.incarnation = self.restarts = self.lost_hosts = 0
        self.weight_version: int | None = None
        self.reason = ""  # of the last death
        self.gave_up = self._was_up = False
        self._config, self._cuda, self._router, self._api_key, self._log_dir = config, cuda, router, api_key, log_dir
        self._group: PlacementGroup | None = None
        self._nodes: list = []
        self._lost = asyncio.Event()
        self._life: asyncio.Task | None = None

    def status(self) -> dict:
        names = ("id", "url", "state", "weight_version", "incarnation", "restarts", "pid", "reason")
        return {name: getattr(self, name) for name in names}

    def begin_update(self, incarnation: int) -> None:
        """A trainer is about to write weights into it. Raises StaleReport."""
        self._check_current(incarnation)
        self.state, self.weight_version = "stale", None

    async def mark_ready(self, incarnation: int, weight_version: int) -> None:
        """The trainer has verified that this incarnation holds these weights: requests may come. Raises StaleReport."""
        self._check_current(incarnation)
        try:
            await self._router.add(self.url)
        finally:
            self._check_current(
                incarnation
            )  # it may have died while the router looked at it, which is then no failure of the router
        self.state, self.weight_version = "ready", weight_version

    def lost(self, incarnation: int) -> None:
        """A trainer could not finish an update of it: what it holds is unknown, so this incarnation ends."""
        if incarnation == self.incarnation and self.state in ("stale", "ready"):
            self.state, self.weight_version = "dead", None  # at once: the trainer's next look must not find it usable
            self._lost.set()

    def _check_current(self, incarnation: int) -> None:
        if incarnation != self.incarnation or self.state not in ("stale", "ready"):
            raise StaleReport(
                f"{self.id} is incarnation {self.incarnation} and {self.state}; the report is about {incarnation}"
            )

    def begin(self, http: aiohttp.ClientSession) -> asyncio.Task:
        self._life = asyncio.create_task(self._run(http))
        return self._life

    async def drain(self, http: aiohttp.ClientSession) -> None:
        """Finish the requests that it has, take no other, and end. Returns when it has ended."""
        was_up = self.state in ("stale", "ready")
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
        """Returns when the budget of restarts is spent, with `gave_up` set and the reason in `reason`."""
        while True:
            try:
                await self._start(http)
                await self._watch(http)
            except EngineDied as exc:
                self.reason = str(exc)
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
        """End the server processes and the actors that hold them, and give their place back."""
        nodes, self._nodes = self._nodes, []
        for stopping in [node.stop.remote() for node in nodes]:
            try:
                await asyncio.wait_for(asyncio.wrap_future(stopping.future()), _LOST_NODE_S)
            except (ray.exceptions.RayError, TimeoutError):
                pass  # the actor is gone, and the kernel ended its server process with it
        for node in nodes:
            ray.kill(node)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    async def _start(self, http: aiohttp.ClientSession) -> None:
        """Raises EngineDied when no answer comes within start_timeout_s, RayError when the machine is lost."""
        rollout = self._config.rollout
        self.incarnation += 1
        self.state, self.weight_version, self.url, self.pid = "starting", None, "", 0
        self._lost.clear()
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
        while not await self._answers(http, url, "/health", rollout.health_timeout_s):
            await self._check_processes()
            if time.monotonic() > deadline:
                raise EngineDied(
                    f"did not answer within {rollout.start_timeout_s:.0f} s (rollout.start_timeout_s)\n{self._log_tail(0)}"
                )
            await asyncio.sleep(0.25)
        self.url, self.state, self._was_up = url, "stale", True
        print(f"{self.id} is up at {url} (incarnation {self.incarnation}, pid {self.pid})", flush=True)

    async def _place(self) -> None:
        """Find machines anew for every start: those of the last one may be gone. Raises EngineDied."""
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
                    f"{rollout.nodes_per_engine} x {bundle} did not fit on the machines within {rollout.start_timeout_s:.0f} s "
                    f"(rollout.start_timeout_s); they have {have} in all. Lower rollout.num_engines or rollout.tp, or add machines"
                )
            await asyncio.sleep(_PLACE_POLL_S)

    async def _watch(self, http: aiohttp.ClientSession) -> None:
        """Raises EngineDied when a process ended or nothing answers, RayError when the machine is lost."""
        patience_s = self._config.rollout.health_timeout_s
        answered = time.monotonic()
        while True:
            state, path = self.state, "/server_info" if self.state == "ready" else "/health"
            probe = asyncio.create_task(self._answers(http, self.url, path, patience_s))
            try:
                while not probe.done() and self.state == state:
                    await self._look()
            finally:
                probe.cancel()
            if self.state != state or probe.result():  # in an update the scheduler may be silent for longer
                answered = time.monotonic()
            elif time.monotonic() - answered >= patience_s:
                raise EngineDied(
                    f"{self.url} hangs: no answer to {path} for {patience_s:.0f} s (rollout.health_timeout_s)"
                )
            await self._look()

    async def _look(self) -> None:
        """One round of watching for what is known at once. Raises EngineDied."""
        try:
            await asyncio.wait_for(self._lost.wait(), _WATCH_S)
        except TimeoutError:
            await self._check_processes()
            return
        raise EngineDied("a trainer lost it in the middle of an update of its weights")

    async def _check_processes(self) -> None:
        try:
            codes = await self._ask(node.exit_code.remote() for node in self._nodes)
        except ray.exceptions.ActorUnavailableError:
            return  # a broken connection: Ray will say whether the node is lost, and until then the probe has a time limit
        for rank, code in enumerate(codes):
            if code is not None:
                how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                raise EngineDied(f"the server process of node {rank} ended, {how}\n{self._log_tail(rank)}")

    async def _ask(self, calls: Iterable) -> list:
        """What every node's Ray actor answers. Raises EngineDied when one says nothing, RayError when it is lost."""
        limit_s = (
            self._config.rollout.start_timeout_s
        )  # Ray starts a process for the first call; later ones answer at once
        try:
            return await asyncio.wait_for(asyncio.gather(*calls), limit_s)
        except TimeoutError:
            raise EngineDied(
                f"a Ray actor of its nodes does not answer within {limit_s:.0f} s (rollout.start_timeout_s)"
            ) from None

    def _make_node(self, rank: int):
        rollout = self._config.rollout
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        num_gpus = rollout.tp // rollout.nodes_per_engine if self._cuda else 0
        # On a CPU all engines of the experiment may share one machine; its cores are shared out between them.
        cores_share = rollout.num_engines * rollout.nodes_per_engine
        options = EngineNode.options(num_cpus=1, num_gpus=num_gpus, scheduling_strategy=strategy, max_restarts=0)
        return options.remote(self._config, rank, self._cuda, cores_share, self._api_key)

    def _log(self, rank: int) -> Path:
        return self._log_dir / f"{self.id}.node-{rank}.log"

    def _log_tail(self, rank: int) -> str:
        log = self._log(rank)
        text = log.read_text(errors="replace")[-_LOG_TAIL:] if log.exists() else ""
        return f"the end of {log}:\n{text}"

    async def _answers(self, http: aiohttp.ClientSession, url: str, path: str, patience_s: float) -> bool:
        try:
            async with self._get(http, url + path, patience_s) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _is_busy(self, http: aiohttp.ClientSession) -> bool:
        try:
            async with self._get(
                http, f"{self.url}/v1/loads?include=core", self._config.rollout.health_timeout_s
            ) as answer:
                answer.raise_for_status()
                return any(
                    load["num_running_reqs"] + load["num_waiting_reqs"] for load in (await answer.json())["loads"]
                )
        except (aiohttp.ClientError, TimeoutError):
            return False  # it died: nothing is left to wait for

    def _get(self, http: aiohttp.ClientSession, url: str, timeout_s: float):
        headers = {"Authorization": f"Bearer {self._api_key}"}
        return http.get(url, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout_s))
