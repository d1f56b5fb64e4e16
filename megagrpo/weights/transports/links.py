"""Links between trainers and engines, shared by the transports that send slices (reshard, ipc)."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from torch._C

from megagrpo.weights.copies.record import Copy
from megagrpo.weights.engines.client import EngineConnection, EngineDown
from megagrpo.weights.engines.fleet import EngineFleet
from megagrpo.weights.transports.protocol import TrainerWeights
from megagrpo.weights.transports.reshard_plan import Cover, TransferPlan, make_cover, piece_limit, trainer_atoms
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.group import PeerLost
from megagrpo.weights.wire.messages import Message, encode_batches

_JOIN_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Link:
    """Describes one incarnation of an engine to all trainer ranks."""

    name: str  # unique, also as the name of a process group
    url: str
    num_ranks: int
    slot: int  # the engine's number among those with equal slices
    copy_list: int  # id of its copy list in LinkRegistry
    store: tuple[str, int]  # address and port on rank 0
    patience_s: float  # for one batch
    join_s: float  # for all ranks of a group to meet
    left_s: float  # for the whole transfer

    def open_store(self, timeout_s: float = _JOIN_S) -> TCPStore:
        """Connects to the store on rank 0."""
        return TCPStore(*self.store, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


@dataclass(frozen=True)
class Round:
    """One transfer, as rank 0 describes it to all trainer ranks."""

    links: list[Link]
    copy_lists: list[list[list[Copy]]]  # new ones: by engine rank
    transfer: str  # unique, for keys in the store


class LinkRegistry:
    """Registry of engine copy lists: one shared id per distinct list, its plans, and one link per engine.

    Ids and plans are the same on all ranks; links are known to rank 0 only. make_plan: plans a link's transfer.
    """

    def __init__(self, weights: TrainerWeights, make_plan: Callable[[Cover, Link], TransferPlan]):
        self._weights, self._make_plan = weights, make_plan
        self._atoms = trainer_atoms(weights.copies, weights.specs)
        self._covers: list[Cover] = []  # by id
        self._plans: dict[tuple[int, int], TransferPlan] = {}  # by id and slot
        self._copy_lists: list[list[list[Copy]]] = []  # by id
        self._names: dict[str, str] = {}  # engine id -> name of this incarnation's link
        self._planned: set[str] = set()  # names of links whose engine ranks have their batches

    def describe(self, engines: EngineFleet, slot: Callable[[EngineConnection], int]) -> Round:
        """Returns the round of the living engines. Rank 0 only."""
        links = [self._link(engine, slot(engine)) for engine in engines.alive]
        return Round(links, self._copy_lists[len(self._covers) :], uuid.uuid4().hex)

    def learn(self, now: Round) -> None:
        """Plans transfers to engines of a new kind. Every rank for itself."""
        limit = piece_limit(self._weights.bucket_bytes)
        self._covers += [make_cover(self._atoms, one, self._weights.specs, limit) for one in now.copy_lists]
        for link in now.links:
            key = link.copy_list, link.slot
            if key not in self._plans:
                self._plans[key] = self._make_plan(self._covers[link.copy_list], link)

    def plan(self, link: Link) -> TransferPlan:
        """Returns the transfer into the link's engine."""
        return self._plans[link.copy_list, link.slot]

    def link_of(self, engine: EngineConnection, now: Round) -> Link:
        """Returns the engine's link in this round. Rank 0 only."""
        return next(link for link in now.links if link.name == self._names[engine.id])

    def put_batches(
        self, engine: EngineConnection, link: Link, batches: Sequence[list[Message]], ranks: Mapping[int, int]
    ) -> str:
        """Puts the batches of an engine rank into the mailbox, once per link. Returns their key, "" later on.

        ranks: see encode_batches. Rank 0 only.
        """
        if link.name in self._planned:
            return ""
        key = engine.mailbox.new_key("plan")
        engine.mailbox.put(key, encode_batches(batches, ranks))
        return key

    def accept(self, engine: EngineConnection, link: Link, answers: list[dict]) -> None:
        """Raises EngineDown if a rank of the engine reports that it lost the trainers. Rank 0 only."""
        if reasons := [answer["lost"] for answer in answers if answer["lost"]]:
            raise EngineDown(f"{engine} lost the trainers in the transfer: {reasons[0]}")
        self._planned.add(link.name)

    def settle(self, engines: EngineFleet, lost: Mapping[str, str], failure: BaseException | None) -> list[str]:
        """Collective. Sets aside the engines of links that some rank lost (name -> reason). Returns all link names.

        Raises LeaderError for `failure`, any other failure on rank 0.
        """
        reasons = {name: why for part in self._weights.mesh.gather_world(lost) for name, why in part.items()}

        def refuse(engine: EngineConnection) -> None:
            if (name := self._names[engine.id]) in reasons:
                raise EngineDown(f"a trainer lost {engine} in the transfer: {reasons[name]}")

        def settle() -> list[str]:
            if failure is not None:
                raise failure
            engines.each(refuse)
            return list(self._names.values())

        return self._weights.mesh.from_main(settle, "send weights to engines")

    def drop(self, engine: EngineConnection) -> str:
        """Forgets the engine's link. Returns its name, "" if there is none."""
        name = self._names.pop(engine.id, "")
        self._planned.discard(name)
        return name

    def leave(self, engine: EngineConnection) -> None:
        """Makes an engine that has a link forget it. Rank 0 only."""
        if engine.id in self._names:
            engine.ask("leave", [{}] * engine.tp)

    def _link(self, engine: EngineConnection, slot: int) -> Link:
        if engine.slices not in self._copy_lists:
            self._copy_lists.append(engine.slices)
        copy_list = self._copy_lists.index(engine.slices)
        engine.slices = self._copy_lists[copy_list]  # one list for all: it may have a million entries
        return Link(
            name=self._names.setdefault(engine.id, f"weights-{uuid.uuid4().hex}"),
            url=engine.url,
            num_ranks=engine.tp,
            slot=slot,
            copy_list=copy_list,
            store=(engine.mailbox.address, engine.mailbox.port),
            patience_s=engine.patience,
            join_s=min(_JOIN_S, engine.deadline.left / 4),  # leaves time for the other engines if one does not come
            left_s=engine.deadline.left,
        )


class CutFlag:
    """Reports to all ranks of a link, through the store on rank 0, that the link is cut, so that no rank waits for it.

    As a context manager: an exception inside cuts the link.
    """

    def __init__(self, link: Link, store: TCPStore | None = None):
        self._key, self._store = f"{link.name}/cut", store or link.open_store()

    def cut(self, reason: str) -> None:
        """Cuts the link, unless it is cut already."""
        if not self.reason:
            self._store.set(self._key, reason or "unknown")

    @property
    def reason(self) -> str:
        """Returns why the link is cut, "" while it is not."""
        return self._store.get(self._key).decode() if self._store.check([self._key]) else ""

    def __enter__(self) -> "CutFlag":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.cut(str(error))


def wait_until(done: Callable[[], bool], deadline: Deadline, flag: CutFlag, what: str) -> None:
    """Polls until `done`. Raises PeerLost when the link is cut or the deadline is over."""
    while not done():
        if reason := flag.reason:
            raise PeerLost(reason)
        if deadline.over:
            raise PeerLost(f"waited {deadline.seconds:.0f} s for {what}")
        time.sleep(_POLL_S)
