"""Rank 0's view of all engines: which ones take part in a publish, and which ones died in it."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from megagrpo.config.schema import ExperimentConfig
from megagrpo.types import EngineEvent, EngineInfo
from megagrpo.weights.copies.recorder import Copy, Specs
from megagrpo.weights.copies.views import tuples
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

    def report(
        self, event: EngineEvent, engines: Mapping[str, int], weight_version: int = 0
    ) -> set[str]:
        """Reports an event of incarnations, by engine id. Returns those that died."""


class EngineFleet:
    """Connections to all engines, and calls to those of the current *round*.

    A round is the set of engines that are opened, updated and verified together. All ranks may use
    `for_each`, `alive`, `kinds`, `waiting` and `close`, but only rank 0 has connections; on the
    others the round is empty. patience_s: see EngineConnection.
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
        # the engines' distinct copy lists, by engine rank; see Exchange
        self.kinds: list[list[list[Copy]]] = []
        self._kind_of: dict[tuple[str, ...], int] = {}  # by the lists' keys
        # by engine id, kept from publish to publish
        self._connections: dict[str, EngineConnection] = {}
        self._round: list[str] = []
        self._lost: dict[str, EngineDown] = {}  # engines that died in this publish
        self._mailbox: Mailbox | None = None  # opened towards the first engine
        self._specs_key = ""  # in the mailbox
        self._deadline = Deadline(0.0)  # of the publish

    @property
    def alive(self) -> list[EngineConnection]:
        """Returns the engines of the round that are alive."""
        return [self._connections[id] for id in self._round if id not in self._lost]

    def choose(self, deadline: Deadline, ids: list[str] | None = None) -> list[str]:
        """Begins a publish: waits until the service has enough usable engines, and returns their
        ids.

        Of `ids`, engines that died or were drained meanwhile are left out: they get their weights
        after their restart. Raises TimeoutError with the state of every engine.
        """
        self._lost.clear()
        least = self._config.rollout.min_healthy_engines
        for infos in self._listed(deadline, lambda: f"{least} usable engines"):
            usable = [info.id for info in infos if info.alive]
            if len(usable) >= least:
                break
        return usable if ids is None else [id for id in usable if id in ids]

    def open(self, ids: list[str], deadline: Deadline, writing: bool) -> None:
        """Begins a round with the engines `ids` that the service still lists: connects, pauses,
        records new copy lists.

        writing: whether their weights will change, which the service must know.
        """
        infos = {info.id: info for info in self._registry.engines()}
        for id, connection in list(self._connections.items()):
            # drained, or restarted
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
        if writing:
            self._announce("update", "died before it could be updated")

        if self._mailbox is not None and not all(engine.copies for engine in self.alive):
            # once for all of them, because JSON of a trillion parameters' tensors takes 0.2 s, and
            # again for later ones, because others may have overwritten it meanwhile
            self._mailbox.delete(self._specs_key)
            message = {
                name: (shape, str(dtype).removeprefix("torch."))
                for name, (shape, dtype) in self._specs.items()
            }
            self._specs_key = self._mailbox.put("specs", message)

        def open_one(engine: EngineConnection) -> None:
            engine.pause()
            if not engine.copies:
                # an update in which earlier trainers died would block this one
                with suppress(EngineRefused):
                    engine.end()
                past_loader = self._transport.past_loader
                engine.record(self._specs_key, past_loader, self._config.rollout)

        self.for_each(open_one)

    def sort(self) -> list[list[list[Copy]]]:
        """Sets the kind of every engine of the round. Returns the copy lists of new kinds, which
        the caller adds to `kinds`. Every distinct list is read once: it may have a million
        entries."""
        lists: dict[str, list[Copy]] = {}
        kinds = list(self.kinds)
        for engine in self.alive:
            if engine.copies not in self._kind_of:
                self._kind_of[engine.copies] = len(kinds)
                for key in set(engine.copies) - lists.keys():
                    lists[key] = [Copy(*tuples(copy)) for copy in engine.mailbox.get(key)]
                kinds.append([lists[key] for key in engine.copies])
            engine.kind = self._kind_of[engine.copies]
        return kinds[len(self.kinds) :]

    def limit(self) -> None:
        """Gives the engines half of the remaining time, so that an engine that hangs can be
        restarted. Before every call, so that one that hangs in an earlier call costs the others only
        its patience."""
        for engine in self.alive:
            engine.deadline = Deadline(self._deadline.left / 2)

    def for_each(self, work: Callable[[EngineConnection], object]) -> None:
        """Runs `work` for every living engine in threads. Reports engines that raise EngineDown, and
        raises other errors."""
        if not self.alive:
            return
        self.limit()
        errors = []
        lost: dict[str, EngineDown] = {}
        with ThreadPoolExecutor(len(self.alive)) as pool:
            for engine, done in [(engine, pool.submit(work, engine)) for engine in self.alive]:
                if isinstance(error := done.exception(), EngineDown):
                    lost[engine.id] = error
                elif error is not None:
                    errors.append(error)
        self._give_up(lost)
        if errors:
            raise errors[0] if len(errors) == 1 else RuntimeError("\n".join(map(repr, errors)))

    def admit(self, version: int, verify: Callable[[EngineConnection], object]) -> None:
        """Gives every living engine that `verify` accepts its cache if it slept, its version, and
        requests. Raises as for_each does."""
        sleeps = self._config.rollout.colocate

        def admit_one(engine: EngineConnection) -> None:
            verify(engine)
            if sleeps and self._registry.report("wake", {engine.id: engine.incarnation}):
                raise EngineDown(f"{engine} did not get its cache back")
            engine.resume(version)

        self.for_each(admit_one)
        self._announce("ready", "died after it was verified", version)

    def _announce(self, event: EngineEvent, problem: str, version: int = 0) -> None:
        """Reports an event of all living engines, in one request, and gives up those that died."""
        if living := {engine.id: engine.incarnation for engine in self.alive}:
            ended = self._registry.report(event, living, version)
            self._give_up({id: EngineDown(f"{self._connections[id]} {problem}") for id in ended})

    def _give_up(self, lost: Mapping[str, EngineDown]) -> None:
        """Reports engines as lost and ends their connections."""
        if not lost:
            return
        self._lost |= lost
        self._registry.report("lost", {id: self._connections[id].incarnation for id in lost})
        for id in lost:
            self._end(self._connections[id])

    def wait_for_lost(self, version: int, deadline: Deadline) -> list[str]:
        """Returns the ids that another round must update: none if enough engines have `version`.

        Engines that died in this publish come back with their old weights. If enough others are
        ready, this does not wait, because the rollout refreshes them. Raises TimeoutError with the
        state of every engine and why they died.
        """
        least = self._config.rollout.min_healthy_engines
        restarted: list[str] = []

        def condition() -> str:
            reasons = "; ".join(map(str, self._lost.values()))
            return f"{least} engines to restart and take version {version}; they died because: {reasons}"

        if not self._lost:
            return []
        for infos in self._listed(deadline, condition):
            if sum(info.state == "ready" for info in infos) >= least:
                break
            # Past the deadline no call has time to end, so engines would come back for ever.
            if not deadline.over and (restarted := [i.id for i in infos if i.state == "stale"]):
                break
        self._lost.clear()
        return restarted

    def _listed(
        self, deadline: Deadline, condition: Callable[[], str]
    ) -> Iterator[list[EngineInfo]]:
        """Yields the service's list of all engines again and again. After the deadline raises
        TimeoutError with `condition`."""
        while True:
            infos = self._registry.engines()
            yield infos
            if deadline.over:
                states = {
                    info.id: f"{info.state}, incarnation {info.incarnation}" for info in infos
                }
                limit = f"{deadline.seconds:.0f} s (weights.timeout_s)"
                raise TimeoutError(f"rank 0 waited {limit} for {condition()}; states: {states}")
            time.sleep(_POLL_S)

    def waiting(self) -> str:
        """Returns which engines have not answered which call, "" for none. For any thread."""
        engines = list(self._connections.values())
        return ", ".join(f"{engine} to answer {engine.asked}" for engine in engines if engine.asked)

    def close(self) -> None:
        """Ends all connections, after the transport's `leave`. The engines keep their state; a dead
        one is no error."""

        def leave(engine: EngineConnection) -> None:
            engine.deadline = Deadline(_LEAVE_S)
            with suppress(EngineDown, EngineRefused):
                self._transport.leave(engine)
            self._end(engine)

        self._lost.clear()
        self._round = list(self._connections)
        self.for_each(leave)
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
