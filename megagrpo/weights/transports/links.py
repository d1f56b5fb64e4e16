"""Links between trainers and engines, and the transfer of slices over them, for reshard and ipc."""

import hashlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

from megagrpo.config.rollout import engine_number
from megagrpo.weights.engines.client import EngineConnection, EngineDown
from megagrpo.weights.engines.fleet import EngineFleet
from megagrpo.weights.transports.protocol import TrainerWeights
from megagrpo.weights.transports.reshard_plan import (
    Cover,
    TransferPlan,
    make_cover,
    piece_limit,
    trainer_atoms,
)
from megagrpo.weights.wire.clock import Deadline, PhaseTimer
from megagrpo.weights.wire.engine_group import GroupLimits, PeerLost, lost_if_cut
from megagrpo.weights.wire.mailbox import Access, Mailbox, open_mailbox
from megagrpo.weights.wire.moving import Traffic
from megagrpo.weights.wire.transfer_messages import encode_batches

_POLL_S = 0.05


@dataclass(frozen=True)
class Link:
    """One incarnation of an engine and a transfer to it, as all trainer ranks know it."""

    name: str  # unique, also the name of a process group
    url: str
    num_ranks: int
    slot: int  # the engine's number
    kind: int  # of its copy list, see EngineFleet.kinds
    # by engine rank, the trainer rank that shares memory with it; () if the transport needs none
    carriers: tuple[int, ...]
    store: Access  # on rank 0
    patience_s: float  # of trainers, for one batch
    limits: GroupLimits
    left_s: float  # for the transfer
    transfer: str  # unique, for keys in the store

    def open_store(self, timeout_s: float | None = None) -> Mailbox:
        """Connects to the store on rank 0. timeout_s: for the connection and each request. Raises
        PeerLost."""
        with lost_if_cut(f"no connection to the store for {self.url}"):
            return open_mailbox(self.store, timeout_s or self.left_s)


class LinkTransport(ABC):
    """A transport with plans, which are the same on all ranks. Only rank 0 knows which engine has
    which link."""

    past_loader = True

    def __init__(self, weights: TrainerWeights):
        self._weights = weights
        self._mesh = weights.mesh
        self._atoms = trainer_atoms(weights.copies, weights.specs)
        self._covers: list[Cover] = []  # by kind of engine
        # by kind, slot and carriers; engines with the same sources share a plan
        self._plans: dict[tuple[int, int, tuple[int, ...]], TransferPlan] = {}
        self._distinct: dict[tuple[int, int, bytes], TransferPlan] = {}  # by kind, limit, sources
        self._batch_keys: dict[TransferPlan, list[str]] = {}  # in the mailbox, by engine rank
        self._received: dict[str, TransferPlan] = {}  # by engine id, since its connection was made
        self._names: dict[str, str] = {}  # engine id -> name of this incarnation's link
        self._announced: set[str] = set()  # names that all ranks know
        self._writing = Lock()  # of batches into the mailbox, once per plan

    def transfer(self, version: int, engines: EngineFleet, timer: PhaseTimer) -> Traffic:
        """Collective. See Transport."""
        links = self._mesh.from_main(
            lambda: [self._link(engine) for engine in engines.alive],
            "plan the transfer to the engines",
        )
        with timer("plan"):
            self._learn(links, engines)
        traffic = Traffic()
        with ThreadPoolExecutor(1) as pool:
            staged: list[int] = []  # bytes, by engine rank
            receiving = pool.submit(
                engines.for_each, lambda engine: staged.extend(self._receive(engine, links))
            )
            failed = self._move(links, traffic)
            failure = receiving.exception()  # raised below: the other ranks are still sending
        traffic.staging_bytes = max(traffic.staging_bytes, *staged, 0)
        self._settle(engines, failed, failure)
        return traffic

    def drop(self, engine: EngineConnection) -> None:
        """Forgets the engine's link. See Transport."""
        self._names.pop(engine.id, None)
        plan = self._received.pop(engine.id, None)
        if plan is None:
            return
        # perhaps it could not read them; those of other plans stay, of which there may be hundreds
        for key in self._batch_keys.pop(plan, ()):
            engine.mailbox.delete(key)

    def leave(self, engine: EngineConnection) -> None:
        """Makes an engine that has a link forget it. Rank 0 only."""
        if engine.id in self._names:
            engine.ask("leave", [{}] * engine.tp)

    def _carriers(self, engine: EngineConnection, slot: int) -> tuple[int, ...]:
        """Returns Link.carriers. Rank 0 only."""
        return ()

    @abstractmethod
    def _make_plan(self, cover: Cover, link: Link) -> TransferPlan:
        """Returns the transfer into the link's engine."""

    @abstractmethod
    def _move(self, links: list[Link], traffic: Traffic) -> dict[str, Exception]:
        """Sends this rank's part and counts it. Returns failures by the link's name. A PeerLost means
        that the engine is lost."""

    @abstractmethod
    def _request(self, link: Link, rank: int) -> dict[str, object]:
        """Returns the entries of ReceiveRequest that only this transport has."""

    def _link(self, engine: EngineConnection) -> Link:
        slot = engine_number(engine.id)
        # a quarter, so that the other engines have time if one does not come
        limits = self._weights.limits
        limits = limits._replace(join_s=min(limits.join_s, engine.deadline.left / 4))
        return Link(
            name=self._names.setdefault(engine.id, f"weights-{uuid.uuid4().hex}"),
            url=engine.url,
            num_ranks=engine.tp,
            slot=slot,
            kind=engine.kind,
            carriers=self._carriers(engine, slot),
            store=engine.mailbox.access,
            # earlier links may have to join
            patience_s=min(engine.patience + limits.join_s, engine.deadline.left / 2),
            limits=limits,
            left_s=engine.deadline.left,
            transfer=uuid.uuid4().hex,
        )

    def _learn(self, links: list[Link], engines: EngineFleet) -> None:
        """Plans transfers to engines of a new kind. Local."""
        limit = piece_limit(self._weights.bucket_bytes)
        new = engines.kinds[len(self._covers) :]
        self._covers += [make_cover(self._atoms, kind, self._weights.specs, limit) for kind in new]
        for link in links:
            key = link.kind, link.slot, link.carriers
            if key not in self._plans:
                plan = self._make_plan(self._covers[link.kind], link)
                sources = hashlib.sha256(plan.sources.data).digest()
                alike = link.kind, plan.limit, sources
                self._plans[key] = self._distinct.setdefault(alike, plan)

    def _plan(self, link: Link) -> TransferPlan:
        return self._plans[link.kind, link.slot, link.carriers]

    def _receive(self, engine: EngineConnection, links: list[Link]) -> list[int]:
        """Makes the engine receive its slices. Returns the staged bytes of each engine rank. Rank 0
        only.

        Raises EngineDown if an engine rank lost the trainers.
        """
        link = next(link for link in links if link.name == self._names[engine.id])
        try:
            # neither the trainers nor the engine may wait for ever for the other side
            with CutFlag(link) as flag, ThreadPoolExecutor(1) as pool:
                receiving = pool.submit(engine.ask, "receive", self._requests(engine, link))
                try:
                    flag.wait_until(receiving.done, engine.deadline, f"{engine} to receive")
                except PeerLost:
                    engine.close()  # which ends the call
                    raise
                answers = receiving.result()
        except PeerLost as exc:
            raise EngineDown(f"{engine} was lost in the transfer: {exc}") from exc
        if reasons := [answer["lost"] for answer in answers if answer["lost"]]:
            raise EngineDown(f"{engine} lost the trainers in the transfer: {reasons[0]}")
        return [answer["staging_bytes"] for answer in answers]

    def _requests(self, engine: EngineConnection, link: Link) -> list[dict[str, object]]:
        """Returns a ReceiveRequest for each rank of the engine. The batches go into the mailbox, once
        per plan, and stay there for engines that come later."""
        plan = self._received[engine.id] = self._plan(link)
        with self._writing:
            keys = self._batch_keys.get(plan)
            if keys is None:
                # the trainers' ranks in the group, in which they come first
                ranks = {trainer: rank for rank, trainer in enumerate(plan.trainers)}
                keys = [
                    engine.mailbox.put(
                        "plan", encode_batches(plan.received_by(rank).values(), ranks)
                    )
                    for rank in range(link.num_ranks)
                ]
                self._batch_keys[plan] = keys
        common = {"group": link.name, "left_s": link.left_s}
        return [
            {**common, "plan": key, **self._request(link, rank)} for rank, key in enumerate(keys)
        ]

    def _settle(
        self, engines: EngineFleet, failed: Mapping[str, Exception], failure: BaseException | None
    ) -> set[str] | None:
        """Collective. Gives up the engines of links that a rank lost (see _move). Returns the names
        of all links if these have changed.

        Raises LeaderError for any other failure of a rank, and for `failure` on rank 0.
        """
        mesh = self._mesh
        errors = [
            f"rank {mesh.rank}, send weights to engines: {type(error).__name__}: {error}"
            for error in failed.values()
            if not isinstance(error, PeerLost)
        ]
        mesh.raise_any("\n".join(errors))
        lost = {name: str(error) for name, error in failed.items()}
        everyone = mesh.gather_world(lost) if mesh.any_true(bool(lost)) else []
        reasons = {name: why for part in everyone for name, why in part.items()}

        def refuse(engine: EngineConnection) -> None:
            if (name := self._names[engine.id]) in reasons:
                raise EngineDown(f"a trainer lost {engine} in the transfer: {reasons[name]}")

        def settle() -> set[str] | None:
            if failure is not None:
                raise failure
            engines.for_each(refuse)
            names = set(self._names.values())
            if names == self._announced:
                return None  # which is not sent
            self._announced = names
            return names

        return mesh.from_main(settle, "send weights to engines")


class CutFlag:
    """Cuts a link for all its ranks, through the store on rank 0. As a context manager it cuts the
    link if an exception leaves the block."""

    def __init__(self, link: Link, store: Mailbox | None = None):
        self._key = f"{link.name}/cut"
        self._store = store or link.open_store()

    def cut(self, reason: str) -> None:
        """Cuts the link, unless it is already cut."""
        if not self.reason():
            self._store.set(self._key, reason or "unknown")

    def reason(self) -> str:
        """Returns why the link is cut, "" while it is not."""
        if self._store.has(self._key):
            return self._store.get(self._key)
        return ""

    def __enter__(self) -> "CutFlag":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.cut(str(error))

    def wait_until(self, done: Callable[[], bool], deadline: Deadline, event: str) -> None:
        """Polls until `done`. Raises PeerLost if the link is cut or the deadline is over. event: for
        the message."""
        while not done():
            if reason := self.reason():
                raise PeerLost(reason)
            if deadline.over:
                raise PeerLost(f"waited {deadline.seconds:.0f} s for {event}")
            time.sleep(_POLL_S)
