"""Through memory: every engine rank copies its slices out of memory that a trainer rank beside it has filled.

The plan is reshard's, the carrier another: what an engine rank needs is brought together, in batches, by the trainer
rank on its GPU (on a CPU: of its machine), from the trainer ranks that hold it, and handed over without a process
group: NCCL takes no two ranks on one GPU. Whoever stands beside an engine rank gives what it holds itself.
"""

import re
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import torch.distributed as dist

from megagrpo.weights.engines.client import EngineConnection
from megagrpo.weights.engines.fleet import EngineFleet
from megagrpo.weights.transports.protocol import TrainerWeights
from megagrpo.weights.transports.reshard import Flag, KnownRecordings, Link, Round, described, open_store
from megagrpo.weights.transports.reshard_plan import TransferPlan, plan_transfer
from megagrpo.weights.wire.clock import Deadline, PhaseTimer
from megagrpo.weights.wire.handover import Handover
from megagrpo.weights.wire.moving import Traffic, pack, read_message

_STORE_S = 60.0


class IpcTransport:
    """Hands slices to engine ranks through memory of their own machine."""

    past_loader = True

    def __init__(self, weights: TrainerWeights):
        self._weights = weights
        self._recordings = KnownRecordings(weights)
        self._plans: dict[tuple[int, int], TransferPlan] = {}  # by recording and engine number
        self._told: set[str] = set()  # names of links whose engines have their plan; rank 0 only

    def transfer(self, version: int, engines: EngineFleet, timer: PhaseTimer) -> Traffic:
        """Collective. See Transport."""
        mesh = self._weights.mesh
        now = mesh.from_main(lambda: self._describe(engines), "plan the transfer to the engines")
        with timer("plan"):
            self._learn(now)
        traffic = Traffic()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(engines.each, lambda engine: self._ask(engine, now))
            lost = self._move(now, traffic)
            failure = asked.exception()
        everywhere = mesh.gather_world(lost)

        def settle() -> None:
            if failure is not None:
                raise failure
            self._recordings.set_aside(engines, everywhere)

        mesh.from_main(settle, "hand weights to engines")
        return traffic

    def drop(self, engine: EngineConnection) -> None:
        """Forgets the name of the engine's link: its memory was freed at the end of the transfer."""
        self._told.discard(self._recordings.names.pop(engine.id, ""))

    def leave(self, engine: EngineConnection) -> None:
        """Makes the engine forget its plan."""
        self._recordings.leave(engine)

    def _beside(self, link: Link) -> list[int]:
        """Returns, by engine rank, the trainer rank on its GPU where engines are colocated: see cluster/machine.py."""
        first, ranks = link.slot * link.num_ranks, self._weights.mesh.world_size
        return [(first + rank) % ranks for rank in range(link.num_ranks)]

    def _describe(self, engines: EngineFleet) -> Round:
        """Says who takes part and what is new. Rank 0 only."""
        links: list[Link] = []
        for engine in engines.alive:
            # the engine's own number, which says who stands beside its ranks
            links.append(self._recordings.link(engine, "memory", _number(engine.id)))
        return Round(links, self._recordings.unlearned(), uuid.uuid4().hex)

    def _learn(self, now: Round) -> None:
        """Plans transfers to engines that were not met before. No rank waits for another here."""
        weights = self._weights
        self._recordings.learn(now.recordings)
        for link in now.links:
            key = link.recording, link.slot
            if key not in self._plans:
                near, engines = self._beside(link), weights.num_engines
                hands = -(-engines * link.num_ranks // weights.mesh.world_size)  # engine ranks beside a trainer rank
                # Half of it: the other is the shared memory's second half.
                limit = weights.bucket_bytes // (2 * hands)
                self._plans[key] = plan_transfer(
                    self._recordings.covers[link.recording], link.slot % engines, engines, limit, near
                )

    def _plan(self, link: Link) -> TransferPlan:
        return self._plans[link.recording, link.slot]

    def _move(self, now: Round, traffic: Traffic) -> dict[str, str]:
        """Collective. Brings every batch together and hands it over. Returns links that were cut, and why.

        Batches of all links with one number travel together; an engine that is gone holds up nobody.
        """
        rank, weights = self._weights.mesh.rank, self._weights
        with ExitStack() as stack:
            hands = self._hands(now, stack)
            sent = [self._plan(link).numbered_sent_by(rank) for link in now.links]
            parameters = weights.parameters()
            last = max((int(self._plan(link).batches.max(initial=-1)) for link in now.links), default=-1)
            for number in range(last + 1):
                # What one rank sends another is posted in one order on both: by link, engine rank and message.
                inside = {
                    (k, target, message.peer, message.tag): values
                    for (k, target), hand in hands.items()
                    for message, values in hand.begin(number)
                }
                posts = [
                    ((k, target, tag), dist.P2POp(dist.irecv, values, peer))
                    for (k, target, peer, tag), values in inside.items()
                    if peer != rank
                ]
                staged = 0
                for k, link in enumerate(now.links):
                    for message in sent[k].get(number, ()):
                        to = self._beside(link)[message.peer]
                        if to == rank:
                            pack(message, inside[k, message.peer, rank, message.tag], parameters)
                            continue
                        values, copied = read_message(message, parameters)
                        staged += values.nbytes if copied else 0
                        traffic.wire_bytes += values.nbytes
                        traffic.messages += 1
                        posts.append(((k, message.peer, message.tag), dist.P2POp(dist.isend, values, to)))
                posts.sort(key=lambda post: post[0])
                for work in dist.batch_isend_irecv([post for _, post in posts]) if posts else ():
                    work.wait()
                shared = sum(hand.num_bytes for hand in hands.values())
                traffic.staging_bytes = max(traffic.staging_bytes, shared + staged)
                for hand in hands.values():
                    hand.offer(number)
        return {now.links[k].name: hand.lost for (k, _), hand in hands.items() if hand.lost}

    def _hands(self, now: Round, stack: ExitStack) -> dict[tuple[int, int], Handover]:
        """Returns this rank's ends by place of the link and engine rank; they are closed with the stack."""
        hands = {}
        device = self._weights.mesh.device
        for k, link in enumerate(now.links):
            mine = [target for target, rank in enumerate(self._beside(link)) if rank == self._weights.mesh.rank]
            flag = Flag(link, open_store(link, _STORE_S)) if mine else None
            for target in mine:
                batches = self._plan(link).numbered_received_by(target)
                hand = Handover(
                    open_store(link, _STORE_S),
                    _key(link, now, target),
                    batches,
                    device,
                    Deadline(link.left_s),
                    link.patience_s,
                    cut=lambda flag=flag: flag.reason,  # type: ignore[misc]  # of this link, not of the last one
                )
                stack.callback(hand.close)
                hands[k, target] = hand
        return hands

    def _ask(self, engine: EngineConnection, now: Round) -> None:
        """Has the engine copy what is handed to it. Rank 0 only; raises EngineDown when the transfer was cut."""
        link = self._recordings.link_of(engine, now)
        try:
            answers = engine.ask("receive", list(self._requests(engine, link, now)))
        except Exception as exc:
            Flag(link).raise_it(str(exc))  # no trainer may wait for an engine that does not come
            raise
        self._recordings.refuse_lost(engine, answers)
        self._told.add(link.name)

    def _requests(self, engine: EngineConnection, link: Link, now: Round) -> Iterable[dict]:
        """Yields what each rank of the engine is asked, with its part of the plan unless it has that already."""
        for target in range(link.num_ranks):
            plan_key = ""
            if link.name not in self._told:
                plan_key = engine.mailbox.new_key("plan")
                batches = self._plan(link).received_by(target)
                engine.mailbox.put(plan_key, described([[replace(m, peer=0) for m in b] for b in batches], [0]))
            yield {
                "memory": _key(link, now, target),
                "group": link.name,
                "plan": plan_key,
                "patience_s": link.patience_s,
                "left_s": link.left_s,
            }


def _key(link: Link, now: Round, target: int) -> str:
    return f"{link.name}/{now.transfer}/{target}"


def _number(engine: str) -> int:
    """Returns the number in an engine's id, engine-3: engines come up in any order."""
    found = re.search(r"\d+$", engine)
    return int(found.group()) if found else 0
