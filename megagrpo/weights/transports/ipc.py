"""Transport `ipc`: an engine rank copies its slices from a buffer filled by the colocated trainer
rank.

The plan is reshard's, without a process group: NCCL refuses two ranks on one GPU. The trainer rank
on an engine rank's GPU (on a CPU: on its node) is its *carrier*: it collects batch after batch of
the engine rank's slices from the trainer ranks that hold it, and hands it over. What the carrier
holds itself does not travel, and what ranks of its node hold stays inside the node. Both sides say
where they run, so any launcher may place them.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.weights.engines.client import EngineConnection
from megagrpo.weights.transports.links import CutFlag, Link, LinkTransport
from megagrpo.weights.transports.protocol import TrainerWeights
from megagrpo.weights.transports.reshard_plan import Cover, Nearness, TransferPlan, plan_transfer
from megagrpo.weights.wire.clock import Deadline
from megagrpo.weights.wire.group import PeerLost
from megagrpo.weights.wire.handover import Handover
from megagrpo.weights.wire.messages import Message
from megagrpo.weights.wire.moving import Traffic, pack, read_message
from megagrpo.weights.wire.shared_buffer import place_of


class _Destination(NamedTuple):
    """One engine rank of a round."""

    link: int  # index in `links`
    rank: int


class _Post(NamedTuple):
    """A message between two trainer ranks. Both post those of a batch in the order of `destination`
    and `tag`."""

    destination: _Destination
    tag: int
    operation: dist.P2POp


# values to be filled, by engine rank, peer and tag
_Inbox = dict[tuple[_Destination, int, int], Tensor]


class IpcTransport(LinkTransport):
    """Hands slices to engine ranks through memory of their own machine."""

    def __init__(self, weights: TrainerWeights):
        super().__init__(weights)
        self._places = weights.mesh.gather_world(place_of(weights.mesh.device))

    def _carriers(self, engine: EngineConnection, slot: int) -> tuple[int, ...]:
        """Returns the trainer rank on each engine rank's GPU, else one of its node. Raises
        ValueError for none."""
        found = []
        for rank, place in enumerate(engine.places):
            there = [
                trainer for trainer, other in enumerate(self._places) if other.node == place.node
            ]
            if not there:
                problem = (
                    f"{engine} rank {rank} runs on node {place.node}, where no trainer rank is"
                )
                raise ValueError(
                    f"weights.transport ipc: {problem}; engines must share the trainers' nodes"
                )
            beside = [trainer for trainer in there if self._places[trainer] == place] or there
            found.append(beside[(slot * engine.tp + rank) % len(beside)])
        return tuple(found)

    def _make_plan(self, cover: Cover, link: Link) -> TransferPlan:
        weights = self._weights
        engines = self._weights.num_engines
        # engine ranks per carrier
        carried = -(-engines * link.num_ranks // weights.mesh.world_size)
        limit = weights.bucket_bytes // (2 * carried)  # half: the shared memory has two halves
        nodes = [place.node for place in self._places]
        return plan_transfer(cover, link.slot, engines, limit, Nearness(link.carriers, nodes))

    def _move(self, links: list[Link], traffic: Traffic) -> dict[str, Exception]:
        """Collects every batch at its carriers and hands it over; those of all links with one
        number go together."""
        rank = self._weights.mesh.rank
        plans = [self._plan(link) for link in links]
        outgoing = [plan.sent_by(rank) for plan in plans]
        num_batches = max((int(plan.batches.max(initial=-1)) + 1 for plan in plans), default=0)
        with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
            # takes memory, beside an engine: one rank may have none
            making = pool.submit(self._handovers, links, stack)
            handovers = self._weights.mesh.result_everywhere(
                making, "take memory to hand weights over"
            )
            for number in range(num_batches):
                self._collect(
                    number,
                    links,
                    [batches.get(number, ()) for batches in outgoing],
                    handovers,
                    traffic,
                )
                for handover in handovers.values():
                    handover.offer(number)
        return {
            links[to.link].name: PeerLost(handover.lost)
            for to, handover in handovers.items()
            if handover.lost
        }

    def _collect(
        self,
        number: int,
        links: list[Link],
        outgoing: Sequence[Sequence[Message]],
        handovers: Mapping[_Destination, Handover],
        traffic: Traffic,
    ) -> None:
        """Fills a batch's shared memory with this rank's slices and those of others. outgoing:
        messages, by link.

        No view of shared memory outlives it: `close` frees that for the engine's cache.
        """
        rank = self._weights.mesh.rank
        inbox = {
            (destination, message.peer, message.tag): values
            for destination, handover in handovers.items()
            for message, values in handover.start(number)
        }
        posts = [
            _Post(destination, tag, dist.P2POp(dist.irecv, values, peer))
            for (destination, peer, tag), values in inbox.items()
            if peer != rank
        ]
        staged = sum(handover.num_bytes for handover in handovers.values())
        for index, (link, messages) in enumerate(zip(links, outgoing, strict=True)):
            for message in messages:
                staged += self._send(
                    _Destination(index, message.peer), link, message, inbox, posts, traffic
                )
        posts.sort(key=lambda post: (post.destination, post.tag))
        for work in dist.batch_isend_irecv([post.operation for post in posts]) if posts else ():
            work.wait()
        traffic.staging_bytes = max(traffic.staging_bytes, staged)

    def _send(
        self,
        to: _Destination,
        link: Link,
        message: Message,
        inbox: _Inbox,
        posts: list[_Post],
        traffic: Traffic,
    ) -> int:
        """Packs a message into this rank's inbox, or posts it to its carrier. Returns the bytes
        staged for it."""
        parameters = self._weights.parameters()
        if (mine := inbox.get((to, self._weights.mesh.rank, message.tag))) is not None:
            pack(message, mine, parameters)
            return 0
        values, copied = read_message(message, parameters)
        posts.append(_Post(to, message.tag, dist.P2POp(dist.isend, values, link.carriers[to.rank])))
        traffic.wire_bytes += values.nbytes
        if self._places[self._weights.mesh.rank].node != self._places[link.carriers[to.rank]].node:
            traffic.between_bytes += values.nbytes
        traffic.messages += 1
        return values.nbytes if copied else 0

    def _handovers(self, links: list[Link], stack: ExitStack) -> dict[_Destination, Handover]:
        """Returns this rank's handovers to the engine ranks that it carries for; they are closed
        with the stack."""
        handovers = {}
        device = self._weights.mesh.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own
        for index, link in enumerate(links):
            for rank, carrier in enumerate(link.carriers):
                if carrier != self._weights.mesh.rank:
                    continue
                store = link.open_store()
                handover = Handover(
                    store,
                    _key(link, rank),
                    self._plan(link).received_by(rank),
                    device,
                    Deadline(link.left_s),
                    link.patience_s,
                    cut=CutFlag(link, store).reason,
                )
                stack.callback(handover.close)
                handovers[_Destination(index, rank)] = handover
        return handovers

    def _request(self, link: Link, rank: int) -> dict[str, object]:
        return {"memory": _key(link, rank)}


def _key(link: Link, rank: int) -> str:
    return f"{link.name}/{link.transfer}/{rank}"
