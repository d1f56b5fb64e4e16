"""Transport `reshard`: every engine rank receives exactly its slices from trainer ranks, into live
parameters.

Each engine has a separate process group with the trainer ranks that send to it, so an engine that
dies does not affect the transfer to another. A link is planned once. In each publish, rank 0 sends
one "receive" request to the engine while trainer ranks send slices.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from heapq import merge
from itertools import repeat
from threading import RLock, Semaphore

import torch

from megagrpo.weights.engines.client import EngineConnection
from megagrpo.weights.engines.fleet import EngineFleet
from megagrpo.weights.transports.links import CutFlag, Link, LinkTransport
from megagrpo.weights.transports.protocol import TrainerWeights
from megagrpo.weights.transports.reshard_plan import Cover, TransferPlan, plan_transfer
from megagrpo.weights.wire.changes import LastSent
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.engine_group import (
    EngineGroup,
    PeerLost,
    join_group,
    without_watchdog,
)
from megagrpo.weights.wire.mailbox import address_towards
from megagrpo.weights.wire.moving import Traffic, Turn, send_batches
from megagrpo.weights.wire.transfer_messages import Message

JOIN = -1  # the number of the turn in which a link's group is joined, before all batches


class ReshardTransport(LinkTransport):
    """Sends slices straight from the trainers that hold them to the engine ranks that need them."""

    def __init__(self, weights: TrainerWeights):
        super().__init__(weights)
        self._ends: dict[str, _TrainerEnd] = {}  # of this rank, by the group's name
        # of this rank, by number; peers are ranks of the group, in which trainers come first
        self._batches: dict[TransferPlan, dict[int, list[Message]]] = {}

    def drop(self, engine: EngineConnection) -> None:
        """Aborts rank 0's end of the group. The other ranks drop theirs in the next transfer."""
        end = self._ends.pop(self._names.get(engine.id, ""), None)
        super().drop(engine)
        if end is not None:
            end.abort()

    def _make_plan(self, cover: Cover, link: Link) -> TransferPlan:
        return plan_transfer(
            cover, link.slot, self._weights.num_engines, self._weights.bucket_bytes
        )

    def _learn(self, links: list[Link], engines: EngineFleet) -> None:
        """Also opens this rank's ends of new links, and gives known ones the time limits of this
        round."""
        super()._learn(links, engines)
        for link in links:
            plan = self._plan(link)
            if link.name in self._ends:
                self._ends[link.name].link = link
            elif self._mesh.rank in plan.trainers:
                if plan not in self._batches:
                    first = len(plan.trainers)
                    self._batches[plan] = {
                        number: [replace(each, peer=first + each.peer) for each in batch]
                        for number, batch in plan.sent_by(self._mesh.rank).items()
                    }
                rank = plan.trainers.index(self._mesh.rank)
                size = len(plan.trainers) + link.num_ranks
                delta = self._weights.delta
                self._ends[link.name] = _TrainerEnd(link, rank, size, self._batches[plan], delta)

    def _move(self, links: list[Link], traffic: Traffic) -> dict[str, Exception]:
        ends = [self._ends[link.name] for link in links if link.name in self._ends]
        failed: dict[str, Exception] = {}
        on_cuda = self._mesh.device.type == "cuda"
        order = SendOrder([end.turns(on_cuda) for end in ends])
        # see join_group
        with without_watchdog(), ThreadPoolExecutor(max(1, len(ends))) as pool:
            sending = [
                pool.submit(end.send, self._weights, order, index) for index, end in enumerate(ends)
            ]
            for end, sent in zip(ends, sending, strict=True):
                sent.add_done_callback(end.cut_if_failed)
            for end, sent in zip(ends, sending, strict=True):
                if isinstance(error := sent.exception(), Exception):
                    failed[end.link.name] = error
                else:
                    traffic.add(sent.result())
        return failed

    def _settle(
        self, engines: EngineFleet, failed: Mapping[str, Exception], failure: BaseException | None
    ) -> set[str] | None:
        names = super()._settle(engines, failed, failure)
        if names is not None:
            for name in self._ends.keys() - names:
                self._ends.pop(name).abort()
        return names

    def _request(self, link: Link, rank: int) -> dict[str, object]:
        trainers = len(self._plan(link).trainers)
        return {
            "rank": trainers + rank,
            "size": trainers + link.num_ranks,
            "num_ranks": link.num_ranks,
            "delta": self._weights.delta,
            **link.limits._asdict(),
        }


class SendOrder:
    """Lets a rank's threads, one per link, join groups and start batches in the same order on all
    ranks: by number, then link.

    A GPU with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron needs) runs the
    kernels of all links in the order of their launch. So two ranks with opposite orders would wait
    for each other. They also would if they made an NCCL group, which is collective, in its first
    batch, since that batch has another number on every rank. All JOIN turns come first, by link.
    """

    def __init__(self, numbers: Sequence[Sequence[int]]):
        """numbers: the turns of this rank, ascending, by link: JOIN, batches. All ranks have the
        same order of links."""
        self._turns = merge(*(zip(turns, repeat(link)) for link, turns in enumerate(numbers)))
        # by link: a turn wakes only its thread, because there are as many threads as links
        self._has_turn = [Semaphore(0) for _ in numbers]
        self._ended: set[int] = set()
        self._lock = RLock()
        self._first = -1  # the link that has the turn
        self._go_on()

    @contextmanager
    def turn(self, link: int, deadline: Deadline) -> Iterator[None]:
        """The link's next batch starts inside the block. Raises PeerLost if other links have the turn
        until the deadline."""
        if not self._has_turn[link].acquire(timeout=deadline.left):
            raise PeerLost(
                f"the link before this one did not start its batch in {deadline.seconds:.0f} s"
            )
        yield
        self._go_on()

    def leave(self, link: int) -> None:
        """The link starts no more batches, because it has sent all or is lost."""
        with self._lock:
            self._ended.add(link)
            if self._first == link:
                self._go_on()

    def _go_on(self) -> None:
        with self._lock:
            for _, link in self._turns:
                if link not in self._ended:
                    self._first = link
                    self._has_turn[link].release()
                    break


class _TrainerEnd:
    """This rank's end of one link."""

    def __init__(
        self, link: Link, rank: int, size: int, batches: dict[int, list[Message]], delta: bool
    ):
        """rank, size: of the link's group. batches: that this rank sends, by number."""
        self.link = link
        self._rank = rank
        self._size = size
        self._numbers = list(batches)
        self._batches = list(batches.values())
        self._group: EngineGroup | None = None
        self._last = LastSent() if delta else None

    def turns(self, join_in_turn: bool) -> list[int]:
        """Returns the turns of a `send`: JOIN if it has to join the group, then its batches."""
        return [JOIN] * (join_in_turn and self._group is None) + self._numbers

    def send(self, weights: TrainerWeights, order: SendOrder, index: int) -> Traffic:
        """Sends all batches as link `index` of the order, after joining the engine if the link is
        new. Raises PeerLost."""
        deadline = Deadline(self.link.left_s)
        try:
            return self._send(weights, deadline, lambda: order.turn(index, deadline))
        finally:
            order.leave(index)

    def cut_if_failed(self, sent: Future[Traffic]) -> None:
        """Cuts the link of a `send` that has failed for any reason, because the engine must not wait
        for this rank."""
        if (error := sent.exception()) is not None:
            # These hold frames that hold the group, and peers wait for the group's end.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            self.abort()
            reason = str(error)
            if not isinstance(error, PeerLost):
                reason = f"{type(error).__name__}: {error}"
            CutFlag(self.link).cut(reason)

    def _send(self, weights: TrainerWeights, deadline: Deadline, turn: Turn) -> Traffic:
        link = self.link
        device = weights.mesh.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own
        group = self._group  # if it is aborted meanwhile, its next call raises PeerLost
        if group is None:
            store = link.open_store(link.limits.join_s)
            ready = [f"{link.name}/ready/{rank}" for rank in range(link.num_ranks)]
            flag = CutFlag(link, store)
            here = address_towards(link.url)
            flag.wait_until(
                lambda: store.has(*ready), Deadline(link.limits.join_s), f"{link.url} to join"
            )
            with turn() if device.type == "cuda" else nullcontext():
                group = join_group(
                    store.plain, link.name, self._rank, self._size, device, here, link.limits
                )
                self._group = group
                group.connect()
            group.set_timeout(link.left_s)
        live = weights.parameters()
        return send_batches(group, self._batches, live, deadline, link.patience_s, turn, self._last)

    def abort(self) -> None:
        """Ends the group, whatever the other ranks do."""
        if self._group is not None:
            self._group.abort()
            self._group = None
