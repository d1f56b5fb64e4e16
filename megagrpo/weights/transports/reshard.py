"""Transport `reshard`: every engine rank receives exactly its slices from trainer ranks, into live parameters.

Each engine has its own process group with the trainer ranks that serve it, so the death of one affects no other's
transfer. A link is planned once; each publish is then one "receive" request to the engine while trainer ranks send.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import torch

from megagrpo.system import environment
from megagrpo.weights.engines.client import EngineConnection, EngineDown
from megagrpo.weights.engines.fleet import EngineFleet
from megagrpo.weights.transports.links import CutFlag, Link, LinkRegistry, Round, wait_until
from megagrpo.weights.transports.protocol import TrainerWeights
from megagrpo.weights.transports.reshard_plan import TransferPlan, plan_transfer
from megagrpo.weights.wire.clock import Deadline, PhaseTimer
from megagrpo.weights.wire.group import EngineGroup, PeerLost, join_group
from megagrpo.weights.wire.mailbox import address_towards
from megagrpo.weights.wire.messages import ReceiveRequest
from megagrpo.weights.wire.moving import Traffic, send_batches


class ReshardTransport:
    """Sends slices straight from the trainers that hold them to the engine ranks that need them."""

    past_loader = True

    def __init__(self, weights: TrainerWeights):
        self._weights = weights
        engines, bucket_bytes = weights.num_engines, weights.bucket_bytes
        self._links = LinkRegistry(weights, lambda cover, link: plan_transfer(cover, link.slot, engines, bucket_bytes))
        self._ends: dict[str, _TrainerEnd] = {}  # this rank's, by the group's name
        self._slots: dict[str, int] = {}  # engine id -> number, kept while it restarts; rank 0 only

    def transfer(self, version: int, engines: EngineFleet, timer: PhaseTimer) -> Traffic:
        """Collective. See Transport."""
        mesh = self._weights.mesh
        now = mesh.from_main(lambda: self._links.describe(engines, self._slot), "plan the transfer to the engines")
        with timer("plan"):
            self._links.learn(now)
            self._update_ends(now)
        ends = [self._ends[link.name] for link in now.links if link.name in self._ends]
        lost: dict[str, str] = {}  # name of the group -> reason
        traffic = Traffic()
        # Read when a group is made: NCCL's watchdog would end this trainer when an engine dies in a transfer.
        on_cuda = mesh.device.type == "cuda"
        guard = environment.temporarily("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0") if on_cuda else nullcontext()
        with guard, ThreadPoolExecutor(len(ends) + 1) as pool:
            receiving = pool.submit(engines.each, lambda engine: self._receive(engine, now, traffic))
            sending = {end.link.name: pool.submit(end.send, self._weights) for end in ends}
            failure = receiving.exception()  # raised below: the other ranks are still sending
            for name, sent in sending.items():
                error = sent.exception()
                if isinstance(error, PeerLost):
                    lost[name] = str(error)
                else:
                    traffic.add(sent.result())
        names = self._links.settle(engines, lost, failure)
        for name in self._ends.keys() - names:
            self._ends.pop(name).abort()
        return traffic

    def drop(self, engine: EngineConnection) -> None:
        """Aborts rank 0's end of the group; the other ranks drop theirs in the next transfer."""
        if end := self._ends.pop(self._links.drop(engine), None):
            end.abort()

    def leave(self, engine: EngineConnection) -> None:
        """Makes the engine forget the group."""
        self._links.leave(engine)

    def _slot(self, engine: EngineConnection) -> int:
        return self._slots.setdefault(engine.id, len(self._slots)) % self._weights.num_engines

    def _update_ends(self, now: Round) -> None:
        """Opens this rank's ends of new links and gives known ones this round's time limits."""
        for link in now.links:
            plan = self._links.plan(link)
            if link.name in self._ends:
                self._ends[link.name].link = link
            elif self._weights.mesh.rank in plan.trainers:
                self._ends[link.name] = _TrainerEnd(link, plan, self._weights.mesh.rank)

    def _receive(self, engine: EngineConnection, now: Round, traffic: Traffic) -> None:
        """Makes the engine receive what all ranks send to it. Rank 0 only. Raises EngineDown if the link was cut."""
        link = self._links.link_of(engine, now)
        with CutFlag(link) as flag, ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(engine.ask, "receive", self._requests(engine, link))
            try:
                wait_until(receiving.done, engine.deadline, flag, f"{engine} to receive")
            except PeerLost as exc:
                engine.close()
                raise EngineDown(f"{engine} was lost in the transfer: {exc}") from exc
            answers = receiving.result()
        self._links.accept(engine, link, answers)
        traffic.staging_bytes = max(traffic.staging_bytes, *(answer["staging_bytes"] for answer in answers))

    def _requests(self, engine: EngineConnection, link: Link) -> list[ReceiveRequest]:
        """Returns the request to each rank of the engine."""
        plan = self._links.plan(link)
        trainers = {trainer: rank for rank, trainer in enumerate(plan.trainers)}
        return [
            {
                "group": link.name,
                "plan": self._links.put_batches(engine, link, plan.received_by(rank), trainers),
                "patience_s": link.patience_s,
                "left_s": link.left_s,
                "rank": len(trainers) + rank,
                "size": len(trainers) + link.num_ranks,
                "num_ranks": link.num_ranks,
                "join_s": link.join_s,
            }
            for rank in range(link.num_ranks)
        ]


class _TrainerEnd:
    """This rank's end of one link."""

    def __init__(self, link: Link, plan: TransferPlan, rank: int):
        self.link = link
        trainers = plan.trainers
        self._rank, self._num_trainers = trainers.index(rank), len(trainers)
        self._batches = [  # with peers as ranks of the group, in which trainers come first
            [replace(message, peer=len(trainers) + message.peer) for message in batch] for batch in plan.sent_by(rank)
        ]
        self._group: EngineGroup | None = None

    def send(self, weights: TrainerWeights) -> Traffic:
        """Sends all batches, joining the engine first if need be. Raises PeerLost."""
        try:
            return self._send(weights, Deadline(self.link.left_s))
        except PeerLost as exc:
            reason = str(exc)
        # Outside the handler: the exception keeps frames alive that keep the group alive, and peers wait for its end.
        self.abort()
        CutFlag(self.link).cut(reason)
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
        store = link.open_store(timeout_s)
        ready = [f"{link.name}/ready/{rank}" for rank in range(link.num_ranks)]
        wait_until(lambda: store.check(ready), Deadline(timeout_s), CutFlag(link, store), f"{link.url} to join")
        size = self._num_trainers + link.num_ranks
        return join_group(store, link.name, self._rank, size, device, address_towards(link.url), timeout_s)
