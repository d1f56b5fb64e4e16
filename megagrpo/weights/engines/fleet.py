"""Rank 0's view of all engines: which take part in a publish, and which died in it."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from megagrpo.config.schema import ExperimentConfig
from megagrpo.types import EngineInfo
from megagrpo.weights.copies.record import Copy, Specs
from megagrpo.weights.engines.client import EngineConnection, EngineDown, EngineRefused
from megagrpo.weights.transports.protocol import Transport
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.mailbox import Mailbox, address_towards, listening_store

_POLL_S = 0.5
_LEAVE_S = 10.0


class EngineRegistry(Protocol):
    """The rollout service's record of its engines. Used on rank 0 only, from several threads."""

    api_key: str

    def engines(self) -> list[EngineInfo]:
        """Returns all engines, whatever state they are in."""

    def begin_update(self, engine_id: str, incarnation: int) -> bool:
        """Announces that weights are about to change. Returns False if this incarnation has died
        meanwhile."""

    def wake(self, engine_id: str, incarnation: int) -> bool:
        """Gives an engine on trainers' GPUs its cache back. Returns False likewise."""

    def mark_ready(self, engine_id: str, incarnation: int, weight_version: int) -> bool:
        """Notes which weights were verified. Returns False likewise."""

    def report_lost(self, engine_id: str, incarnation: int) -> None:
        """Reports an update that failed half-way: the engine must be started again."""


class EngineFleet:
    """Connections to all engines, and calls to those of the current *round*.

    A round is the set of engines that are opened, updated and verified together. Only `each`,
    `alive`, `kinds`, `waiting` and `close` are for all ranks; on ranks other than 0 there are no
    connections and the round is empty.
    patience_s: see EngineConnection.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        registry: EngineRegistry,
        specs: Specs,
        transport: Transport,
        patience_s: float,
    ):
        self._config = config
        self._registry = registry
        self._specs = specs
        self._transport = transport
        self._patience_s = patience_s
        # distinct copy lists of engines, each by engine rank; see Exchange
        self.kinds: list[list[list[Copy]]] = []
        # by engine id, kept from publish to publish
        self._connections: dict[str, EngineConnection] = {}
        self._round: list[str] = []
        self._lost: dict[str, EngineDown] = {}  # died in this publish and are not back
        self._mailbox: Mailbox | None = None  # opened towards the first engine
        self._deadline = Deadline(0.0)  # of the publish

    @property
    def alive(self) -> list[EngineConnection]:
        """Returns the engines of the round that have not died."""
        return [self._connections[id] for id in self._round if id not in self._lost]

    def choose(self, deadline: Deadline, ids: list[str] | None = None) -> list[str]:
        """Begins a publish: waits until the service has enough usable engines, and returns their
        ids.

        Of `ids`, engines that died or were drained meanwhile are left out: they get their weights
        after their restart. Raises TimeoutError with the state of every engine.
        """
        self._lost.clear()
        wanted = self._config.rollout.min_healthy_engines
        for infos in self._listed(deadline, lambda: f"{wanted} usable engines"):
            usable = [info.id for info in infos if info.alive]
            if len(usable) >= wanted:
                break
        return usable if ids is None else [id for id in usable if id in ids]

    def open(self, ids: list[str], deadline: Deadline, writing: bool) -> None:
        """Begins a round with those of `ids` that the service still lists: connects, pauses,
        records new copy lists.

        writing: whether their weights are about to change, which the service must know.
        """
        infos = {info.id: info for info in self._registry.engines()}
        for id, connection in list(self._connections.items()):
            # drained, or started again
            if id not in infos or connection.incarnation != infos[id].incarnation:
                self._end(self._connections.pop(id))
        listed = [infos[id] for id in ids if id in infos]
        self._round = [info.id for info in listed if info.alive]
        self._lost |= {
            info.id: EngineDown(f"{info.id} died before its update began")
            for info in listed
            if not info.alive
        }
        for id in self._round:
            if id not in self._connections:
                self._connections[id] = self._connect(infos[id])
        self._deadline = deadline
        self.limit()

        def open_one(engine: EngineConnection) -> None:
            if writing and not self._registry.begin_update(engine.id, engine.incarnation):
                raise EngineDown(f"{engine} died before it could be updated")
            engine.pause()
            if not engine.slices:
                # unless earlier trainers died in an update, which would block this one
                with suppress(EngineRefused):
                    engine.end()
                rollout = self._config.rollout
                engine.record(
                    self._specs,
                    self._transport.past_loader,
                    rollout.load_format == "dummy",
                    forgets=rollout.colocate,
                )

        self.each(open_one)

    def limit(self) -> None:
        """Gives the engines half of the time that is left: one that hangs must leave time to
        restart it."""
        for engine in self.alive:
            engine.deadline = Deadline(self._deadline.left / 2)

    def each(self, work: Callable[[EngineConnection], object]) -> None:
        """Runs `work` for every living engine in threads. Reports engines that raise EngineDown;
        raises other errors"""
        if not self.alive:
            return
        errors = []
        with ThreadPoolExecutor(len(self.alive)) as pool:
            for engine, done in [(engine, pool.submit(work, engine)) for engine in self.alive]:
                if isinstance(error := done.exception(), EngineDown):
                    self._lost[engine.id] = error
                    self._registry.report_lost(engine.id, engine.incarnation)
                    self._end(engine)
                elif error is not None:
                    errors.append(error)
        if errors:
            raise errors[0] if len(errors) == 1 else RuntimeError("\n".join(map(repr, errors)))

    def admit(self, engine: EngineConnection, version: int) -> None:
        """Gives a verified engine its cache back if it slept, its version, and requests. Raises
        EngineDown."""
        sleeps = self._config.rollout.colocate
        if sleeps and not self._registry.wake(engine.id, engine.incarnation):
            raise EngineDown(f"{engine} did not get its cache back")
        engine.resume(version)
        if not self._registry.mark_ready(engine.id, engine.incarnation, version):
            raise EngineDown(f"{engine} died after it was verified")

    def wait_for_lost(self, version: int, deadline: Deadline) -> list[str]:
        """Returns the ids that a further round must update: none, unless too few engines hold
        `version`.

        Engines that died in this publish come back with their old weights. If enough others are
        ready, this does not wait: the rollout refreshes them. Raises TimeoutError with the state of
        every engine and why they died.
        """
        wanted = self._config.rollout.min_healthy_engines
        back: list[str] = []

        def what() -> str:
            reasons = "; ".join(map(str, self._lost.values()))
            return (
                f"{wanted} engines to restart and take version {version}; they "
                f"died because: {reasons}"
            )

        for infos in self._listed(deadline, what) if self._lost else ():
            if sum(info.state == "ready" for info in infos) >= wanted:
                break
            # Past the deadline no call has time to end: engines would come back for ever.
            if not deadline.over and (back := [i.id for i in infos if i.state == "stale"]):
                break
        self._lost.clear()
        return back

    def _listed(self, deadline: Deadline, what: Callable[[], str]) -> Iterator[list[EngineInfo]]:
        """Yields the service's record of all engines again and again; after the deadline
        TimeoutError with `what`."""
        while True:
            infos = self._registry.engines()
            yield infos
            if deadline.over:
                states = {
                    info.id: f"{info.state}, incarnation {info.incarnation}" for info in infos
                }
                limit = f"{deadline.seconds:.0f} s (weights.timeout_s)"
                raise TimeoutError(f"rank 0 waited {limit} for {what()}; states: {states}")
            time.sleep(_POLL_S)

    def waiting(self) -> str:
        """Returns which engines have not answered which call, "" for none. Runs in any thread."""
        engines = list(self._connections.values())
        return ", ".join(f"{engine} to answer {engine.asked}" for engine in engines if engine.asked)

    def close(self) -> None:
        """Ends all connections, after the transport's `leave`. The engines stay as they are; a dead
        one is no error."""

        def leave(engine: EngineConnection) -> None:
            engine.deadline = Deadline(_LEAVE_S)
            with suppress(EngineDown, EngineRefused):
                self._transport.leave(engine)
            self._end(engine)

        self._lost.clear()
        self._round = list(self._connections)
        self.each(leave)
        self._connections.clear()

    def _connect(self, info: EngineInfo) -> EngineConnection:
        if self._mailbox is None:
            self._mailbox = Mailbox(
                listening_store(address_towards(info.url), self._config.weights.timeout_s)
            )
        tp = self._config.rollout.tp
        key = self._registry.api_key
        engine = EngineConnection(info, tp, self._mailbox, key, self._patience_s)
        engine.has_draft = self._config.rollout.draft_tokens is not None
        return engine

    def _end(self, engine: EngineConnection) -> None:
        engine.close()
        self._transport.drop(engine)
