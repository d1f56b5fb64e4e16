"""Point to point: every engine rank gets exactly its slices, from trainer ranks that hold them, into live parameters.

Each engine has a group of its own with the trainer ranks that serve it, so one that dies touches no other's transfer.
The plan of a link is made once; a publish then asks the engine one thing, to receive, while every trainer rank sends.
"""

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from torch._C

from megagrpo.system import environment
from megagrpo.weights.copies.record import Copy
from megagrpo.weights.engines.client import EngineConnection, EngineDown
from megagrpo.weights.engines.fleet import EngineFleet
from megagrpo.weights.transports.protocol import TrainerWeights
from megagrpo.weights.transports.reshard_plan import (
    Batches,
    Cover,
    TransferPlan,
    make_cover,
    piece_limit,
    plan_transfer,
    trainer_atoms,
)
from megagrpo.weights.wire.clock import Deadline, PhaseTimer
from megagrpo.weights.wire.group import EngineGroup, PeerLost, join_group
from megagrpo.weights.wire.mailbox import address_towards
from megagrpo.weights.wire.moving import Traffic, send_batches

_JOIN_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Link:
    """One incarnation of an engine, as rank 0 describes it to all trainer ranks."""

    name: str  # of the group, which an engine sees once in its life
    url: str
    num_ranks: int
    slot: int  # of the engine's number among those that the trainers serve alike
    recording: int  # number of what it copies: engines of one kind copy the same
    store: tuple[str, int]  # address and port on rank 0, where the ranks of the group meet
    patience_s: float  # for one batch
    join_s: float  # for all ranks to meet
    left_s: float  # for all of this transfer


@dataclass(frozen=True)
class Round:
    """What rank 0 tells all trainer ranks of one transfer."""

    links: list[Link]
    recordings: list[list[list[Copy]]]  # that no link had before: by engine rank
    transfer: str = ""  # in the keys of this one transfer, where it has some


class KnownRecordings:
    """Numbers what engines copy, alike on all ranks, finds once where trainers hold it, and knows engines by links."""

    def __init__(self, weights: TrainerWeights):
        self.covers: list[Cover] = []  # by number
        self.names: dict[str, str] = {}  # engine id -> name of this incarnation's link; rank 0 only
        self._weights, self._atoms = weights, trainer_atoms(weights.copies, weights.specs)
        self._known: list[list[list[Copy]]] = []  # rank 0 only

    def link(self, engine: EngineConnection, kind: str, slot: int) -> Link:
        """Describes an engine with the number of what it copies; names of new links begin with `kind`. Rank 0 only."""
        if engine.slices not in self._known:
            self._known.append(engine.slices)
        recording = self._known.index(engine.slices)
        engine.slices = self._known[recording]  # one list for all: there may be a million
        return Link(
            name=self.names.setdefault(engine.id, f"{kind}-{uuid.uuid4().hex}"),
            url=engine.url,
            num_ranks=engine.tp,
            slot=slot,
            recording=recording,
            store=(engine.mailbox.address, engine.mailbox.port),
            patience_s=engine.patience,
            join_s=min(_JOIN_S, engine.deadline.left / 4),  # time for the others if one does not come
            left_s=engine.deadline.left,
        )

    def unlearned(self) -> list[list[list[Copy]]]:
        """Returns those that the ranks have not learned. Rank 0 only."""
        return self._known[len(self.covers) :]

    def learn(self, recordings: list[list[list[Copy]]]) -> None:
        limit = piece_limit(self._weights.bucket_bytes)
        self.covers += [make_cover(self._atoms, one, self._weights.specs, limit) for one in recordings]

    def link_of(self, engine: EngineConnection, now: Round) -> Link:
        """Returns the engine's link in this round. Rank 0 only."""
        return next(link for link in now.links if link.name == self.names[engine.id])

    def refuse_lost(self, engine: EngineConnection, answers: list[dict]) -> None:
        """Raises EngineDown where a rank of the engine says that it lost the trainers."""
        if reasons := [answer["lost"] for answer in answers if answer["lost"]]:
            raise EngineDown(f"{engine} lost the trainers in the transfer: {reasons[0]}")

    def set_aside(self, engines: EngineFleet, lost: list[dict[str, str]]) -> None:
        """Sets aside the engines whose link is in what trainer ranks lost (name -> why). Rank 0 only."""
        reasons = {name: reason for part in lost for name, reason in part.items()}

        def refuse(engine: EngineConnection) -> None:
            name = self.names[engine.id]
            if name in reasons:
                raise EngineDown(f"a trainer lost {engine} in the transfer: {reasons[name]}")

        engines.each(refuse)

    def leave(self, engine: EngineConnection) -> None:
        """Makes an engine that has a link forget it. Rank 0 only."""
        if engine.id in self.names:
            engine.ask("leave", [{}] * engine.tp)


class ReshardTransport:
    """Sends slices straight from the trainers that hold them to the engine ranks that need them."""

    past_loader = True

    def __init__(self, weights: TrainerWeights):
        self._weights = weights
        self._recordings = KnownRecordings(weights)
        self._plans: dict[tuple[int, int], TransferPlan] = {}  # by recording and slot
        self._ends: dict[str, _TrainerEnd] = {}  # this rank's, by the group's name
        self._slots: dict[str, int] = {}  # engine id -> slot, also of an engine that is away; rank 0 only
        self._joined: set[str] = set()  # names of groups whose engines have their plan; rank 0 only

    def transfer(self, version: int, engines: EngineFleet, timer: PhaseTimer) -> Traffic:
        """Collective. See Transport."""
        mesh = self._weights.mesh
        now = mesh.from_main(lambda: self._describe(engines), "plan the transfer to the engines")
        with timer("plan"):
            self._learn(now)
        ends = [self._ends[link.name] for link in now.links if link.name in self._ends]
        lost: dict[str, str] = {}  # name of the group -> why
        failure: Exception | None = None
        traffic = Traffic()
        # Read when a group is made: NCCL's watchdog would end this trainer when an engine dies in a transfer.
        guard = environment.temporarily("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0") if self._on_cuda else nullcontext()
        with guard, ThreadPoolExecutor(max(len(ends), 1)) as pool:
            sending = {end.link.name: pool.submit(end.send, self._weights) for end in ends}
            try:
                engines.each(lambda engine: self._receive(engine, now, traffic))
            except Exception as exc:  # raised below: the other ranks are still sending
                failure = exc
            for name, sent in sending.items():
                try:
                    traffic.add(sent.result())
                except PeerLost as exc:
                    lost[name] = str(exc)
        self._settle(engines, lost, failure)
        return traffic

    def drop(self, engine: EngineConnection) -> None:
        """Aborts rank 0's end of the group; the other ranks drop theirs in the next transfer."""
        name = self._recordings.names.pop(engine.id, None)
        if name is not None and name in self._ends:
            self._ends.pop(name).abort()

    def leave(self, engine: EngineConnection) -> None:
        """Makes the engine forget the group."""
        self._recordings.leave(engine)

    @property
    def _on_cuda(self) -> bool:
        return self._weights.mesh.device.type == "cuda"

    def _describe(self, engines: EngineFleet) -> Round:
        """Says who takes part and what is new. Rank 0 only."""
        links: list[Link] = []
        for engine in engines.alive:
            self._slots.setdefault(engine.id, len(self._slots))
            links.append(self._recordings.link(engine, "weights", self._slots[engine.id] % self._weights.num_engines))
        return Round(links, self._recordings.unlearned())

    def _learn(self, now: Round) -> None:
        """Plans new links, and forgets those that rank 0 has dropped. No rank waits for another here."""
        weights, rank = self._weights, self._weights.mesh.rank
        self._recordings.learn(now.recordings)
        for link in now.links:
            key = (link.recording, link.slot)
            if key not in self._plans:
                self._plans[key] = plan_transfer(
                    self._recordings.covers[link.recording], link.slot, weights.num_engines, weights.bucket_bytes
                )
            trainers = self._plans[key].trainers
            if link.name in self._ends:
                self._ends[link.name].link = link
            elif rank in trainers:
                self._ends[link.name] = _TrainerEnd(link, trainers, rank, self._plans[key].sent_by(rank))

    def _receive(self, engine: EngineConnection, now: Round, traffic: Traffic) -> None:
        """Has the engine receive what all ranks send it. Rank 0 only; raises EngineDown when the transfer was cut."""
        link = self._recordings.link_of(engine, now)
        flag = Flag(link)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(engine.ask, "receive", self._requests(engine, link))
            try:
                wait_until(asked.done, engine.deadline, flag, f"{engine} to receive")
                answers = asked.result()
            except PeerLost as exc:
                engine.close()
                raise EngineDown(f"{engine} was lost in the transfer: {exc}") from exc
            except Exception as exc:
                flag.raise_it(str(exc))  # no trainer may wait for an engine that does not come
                raise
        self._recordings.refuse_lost(engine, answers)
        self._joined.add(link.name)
        traffic.staging_bytes = max(traffic.staging_bytes, *(answer["staging_bytes"] for answer in answers))

    def _requests(self, engine: EngineConnection, link: Link) -> list[dict]:
        """Returns what each rank of the engine is asked, with its part of the plan unless it has that already."""
        plan = self._plans[link.recording, link.slot]
        trainers = plan.trainers
        request = {
            "group": link.name,
            "size": len(trainers) + link.num_ranks,
            "num_ranks": link.num_ranks,
            "patience_s": link.patience_s,
            "left_s": link.left_s,
            "join_s": link.join_s,
        }
        requests = []
        for rank in range(link.num_ranks):
            plan_key = ""
            if link.name not in self._joined:
                plan_key = engine.mailbox.new_key("plan")
                engine.mailbox.put(plan_key, described(plan.received_by(rank), trainers))
            requests.append(request | {"rank": len(trainers) + rank, "plan": plan_key})
        return requests

    def _settle(self, engines: EngineFleet, lost: dict[str, str], failure: Exception | None) -> None:
        """Collective. Sets aside engines that some rank could not fill; raises LeaderError for any other failure."""
        everywhere = self._weights.mesh.gather_world(lost)

        def settle() -> list[str]:
            if failure is not None:
                raise failure
            self._recordings.set_aside(engines, everywhere)
            return list(self._recordings.names.values())

        names = self._weights.mesh.from_main(settle, "reshard weights to engines")
        for name in [name for name in self._ends if name not in names]:
            self._ends.pop(name).abort()


class _TrainerEnd:
    """This rank's end of one link."""

    def __init__(self, link: Link, trainers: list[int], rank: int, batches: Batches):
        self.link = link
        self._rank, self._num_trainers = trainers.index(rank), len(trainers)
        self._batches = [  # with peers as ranks of the group, in which the trainers come first
            [replace(message, peer=self._num_trainers + message.peer) for message in batch] for batch in batches
        ]
        self._group: EngineGroup | None = None

    def send(self, weights: TrainerWeights) -> Traffic:
        """Sends all batches, joining the engine first if need be. Raises PeerLost."""
        try:
            return self._send(weights, Deadline(self.link.left_s))
        except PeerLost as exc:
            reason = str(exc)
        # Outside of the handler: the exception holds the frames that hold the group, whose end lets the others go.
        self.abort()
        Flag(self.link).raise_it(reason)
        raise PeerLost(reason)

    def _send(self, weights: TrainerWeights, deadline: Deadline) -> Traffic:
        link, device = self.link, weights.mesh.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own
        if self._group is None:
            self._group = self._join(device, link.join_s)
            self._group.set_timeout(link.left_s)
        return send_batches(self._group, self._batches, weights.parameters(), deadline, link.patience_s)

    def abort(self) -> None:
        """Ends the group, whatever state the others are in."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _join(self, device: torch.device, timeout_s: float) -> EngineGroup:
        link = self.link
        store = open_store(link, timeout_s)
        ready = [f"{link.name}/ready/{rank}" for rank in range(link.num_ranks)]
        wait_until(lambda: store.check(ready), Deadline(timeout_s), Flag(link, store), f"{link.url} to join")
        size = self._num_trainers + link.num_ranks
        return join_group(store, link.name, self._rank, size, device, address_towards(link.url), timeout_s)


class Flag:
    """Says to all ranks of a link, through the store on rank 0, that it is cut and nobody need wait for it."""

    def __init__(self, link: Link, store: TCPStore | None = None):
        self._key, self._store = f"{link.name}/cut", store or open_store(link, _JOIN_S)

    def raise_it(self, reason: str) -> None:
        """Says so, unless it is said already."""
        if not self.reason:
            self._store.set(self._key, reason or "unknown")

    @property
    def reason(self) -> str:
        """Returns why the link is cut, "" while it is not."""
        return self._store.get(self._key).decode() if self._store.check([self._key]) else ""


def open_store(link: Link, timeout_s: float) -> TCPStore:
    address, port = link.store
    return TCPStore(address, port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def wait_until(done: Callable[[], bool], deadline: Deadline, flag: Flag, what: str) -> None:
    while not done():
        if reason := flag.reason:
            raise PeerLost(reason)
        if deadline.over:
            raise PeerLost(f"waited {deadline.seconds:.0f} s for {what}")
        time.sleep(_POLL_S)


def described(batches: Batches, trainers: list[int]) -> list:
    """Returns what an engine rank receives as JSON can carry it, with peers as ranks of the group."""
    ranks = {trainer: rank for rank, trainer in enumerate(trainers)}
    return [
        [
            (ranks[m.peer], m.tag, str(m.dtype).removeprefix("torch."), [astuple(place) for place in m.places])
            for m in batch
        ]
        for batch in batches
    ]
