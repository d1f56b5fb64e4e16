"""Transport `ipc`: an engine rank copies its slices from a buffer filled by the colocated trainer
rank.

The plan is reshard's, but without a process group, because NCCL refuses two ranks on one GPU. The
trainer rank on an engine rank's GPU (on a CPU: on its node) is its *carrier*. It collects batch
after batch of the engine rank's slices from the trainer ranks that hold them, and hands each batch
over. The carrier's own slices do not travel, and slices of ranks on its node stay inside the node.
Both sides report where they run, so any launcher may place them.
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
from megagrpo.weights.wire.engine_group import PeerLost
from megagrpo.weights.wire.handover import Handover
from megagrpo.weights.wire.moving import Traffic, pack, read_message
from megagrpo.weights.wire.shared_buffer import place_of
from megagrpo.weights.wire.transfer_messages import Message


class _Destination(NamedTuple):
    """One engine rank of a round."""

    link: int  # index in `links`
    rank: int


class IpcTransport(LinkTransport):
    """Hands slices to engine ranks through memory of their own machine."""

    def __init__(self, weights: TrainerWeights):
        super().__init__(weights)
        self._places = weights.mesh.gather_world(place_of(weights.mesh.device))

    def _carriers(self, engine: EngineConnection, slot: int) -> tuple[int, ...]:
        """Returns the trainer rank on each engine rank's GPU, else one of its node. Raises
        ValueError if there is none."""
        carriers = []
        for rank, place in enumerate(engine.places):
            near = [
                trainer for trainer, other in enumerate(self._places) if other.node == place.node
            ]
            if not near:
                raise ValueError(
                    f"weights.transport ipc: {engine} rank {rank} runs on node {place.node}, where "
                    "no trainer rank is; engines must share the trainers' nodes"
                )
            near = [trainer for trainer in near if self._places[trainer] == place] or near
            carriers.append(near[(slot * engine.tp + rank) % len(near)])
        return tuple(carriers)

    def _make_plan(self, cover: Cover, link: Link) -> TransferPlan:
        weights = self._weights
        engines = weights.num_engines
        # engine ranks per carrier
        carried = -(-engines * link.num_ranks // weights.mesh.world_size)
        limit = weights.bucket_bytes // (2 * carried)  # for half of the shared memory
        nodes = [place.node for place in self._places]
        return plan_transfer(cover, link.slot, engines, limit, Nearness(link.carriers, nodes))

    def _move(self, links: list[Link], traffic: Traffic) -> dict[str, Exception]:
        """Collects every batch at its carriers and hands it over. Batches of all links with the same
        number go together."""
        rank = self._mesh.rank
        plans = [self._plan(link) for link in links]
        outgoing = [plan.sent_by(rank) for plan in plans]
        live = self._weights.parameters()  # once: it looks at all modules
        num_batches = max((int(plan.batches.max(initial=-1)) + 1 for plan in plans), default=0)
        with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
            # takes memory besides the engine's, so a rank may fail
            making = pool.submit(self._handovers, links, stack)
            handovers = self._mesh.result_everywhere(making, "take memory to hand weights over")
            for number in range(num_batches):
                self._collect(
                    number,
                    links,
                    [batches.get(number, ()) for batches in outgoing],
                    handovers,
                    live,
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
        live: Mapping[str, Tensor],
        traffic: Traffic,
    ) -> None:
        """Fills a batch's shared memory with the slices of this rank and others, and sends other
        carriers theirs. outgoing: messages by link.

        No view of shared memory may outlive this call, because `close` frees it for the engine's
        cache.
        """
        rank = self._mesh.rank
        inbox = {
            (destination, message.peer, message.tag): values
            for destination, handover in handovers.items()
            for message, values in handover.start(number)
        }
        # messages between trainer ranks, which all post in the order of destination and tag
        posts = [
            (destination, tag, dist.P2POp(dist.irecv, values, peer))
            for (destination, peer, tag), values in inbox.items()
            if peer != rank
        ]
        staged = sum(handover.num_bytes for handover in handovers.values())
        for index, (link, messages) in enumerate(zip(links, outgoing, strict=True)):
            for message in messages:
                to = _Destination(index, message.peer)
                carrier = link.carriers[to.rank]
                if carrier == rank:
                    pack(message, inbox[to, rank, message.tag], live)
                    continue
                values, copied = read_message(message, live)
                posts.append((to, message.tag, dist.P2POp(dist.isend, values, carrier)))
                staged += values.nbytes * copied
                traffic.messages += 1
                traffic.wire_bytes += values.nbytes
                if self._places[rank].node != self._places[carrier].node:
                    traffic.between_bytes += values.nbytes
        posts.sort(key=lambda post: post[:2])
        if posts:
            for work in dist.batch_isend_irecv([operation for *_, operation in posts]):
                work.wait()
        traffic.staging_bytes = max(traffic.staging_bytes, staged)

    def _handovers(self, links: list[Link], stack: ExitStack) -> dict[_Destination, Handover]:
        """Returns this rank's handovers to the engine ranks whose carrier it is. The stack closes
        them."""
        handovers = {}
        device = self._mesh.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own
        for index, link in enumerate(links):
            for rank, carrier in enumerate(link.carriers):
                if carrier != self._mesh.rank:
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
