"""What travels over which link of a cluster in a publish, and how long the fullest link takes.

Trainer ranks fill nodes in order; engines begin on the next one, unless everything fits on one node. Every rank has a
link of its own between nodes and one inside its node, each as fast in both directions at once.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from megagrpo.planning.recordings import Recordings
from megagrpo.weights.plan import GatherPlan, make_gather_plan
from megagrpo.weights.reshard_plan import Atom, Cover, TransferPlan, make_cover, piece_limit, plan_transfer


@dataclass(frozen=True)
class Rates:
    """A bandwidth table: what links carry at best, and what share of it transfers reach."""

    between_gb_s: float  # of one rank, to and from other nodes
    inside_gb_s: float  # of one rank, to and from the ranks of its node
    efficiency: float = 0.8
    message_us: float = 20.0  # that a rank needs for each message
    call_ms: float = 5.0  # of one HTTP call to an engine


# One direction, per GPU: NVLink as NVIDIA's data sheets give it, and one 400 Gb/s network card for each GPU.
HARDWARE = {
    "H100": Rates(between_gb_s=50, inside_gb_s=450),
    "H200": Rates(between_gb_s=50, inside_gb_s=450),
    "H20": Rates(between_gb_s=50, inside_gb_s=450),
    "B200": Rates(between_gb_s=50, inside_gb_s=900),
}


@dataclass(frozen=True)
class Cluster:
    """Which node every rank is on: arrays of node numbers, int64 [trainer ranks] and [engines, ranks of an engine]."""

    trainers: np.ndarray
    engines: np.ndarray

    @property
    def num_nodes(self) -> int:
        """Counts the nodes."""
        return int(max(self.trainers.max(), self.engines.max())) + 1


def place_ranks(world_size: int, engines: int, tp: int, nodes_per_engine: int, gpus_per_node: int) -> Cluster:
    """Places all ranks. Raises ValueError when a node cannot hold its part of an engine."""
    each = tp // nodes_per_engine
    if each > gpus_per_node:
        raise ValueError(
            f"an engine has rollout.tp / rollout.nodes_per_engine = {each} ranks on a node, "
            f"but --gpus-per-node is {gpus_per_node}"
        )
    trainers = np.arange(world_size) // gpus_per_node
    first = 0 if world_size + engines * tp <= gpus_per_node else int(trainers[-1]) + 1
    parts = np.arange(engines * nodes_per_engine) // (gpus_per_node // each)  # each engine's share of a node
    return Cluster(trainers, first + np.repeat(parts, each).reshape(engines, tp))


@dataclass(frozen=True)
class Forecast:
    """What a publish to `engines` engines moves, in bytes, and how long it takes. Busiest: (who, bytes)."""

    transport: str
    engines: int
    needed_bytes: int  # the lower bound: each element of every engine rank once
    wire_bytes: int  # received by all ranks together
    between_bytes: int  # of these over the links between nodes
    busiest_sender: tuple[str, int]
    busiest_receiver: tuple[str, int]
    messages: int
    calls: int  # HTTP calls that carry data or wait for it
    trainer_staging_bytes: int  # at most, of one rank, beside its parameters
    engine_staging_bytes: int
    seconds: float
    limit: str  # what takes those seconds
    node_bytes: np.ndarray = field(repr=False)  # int64 [nodes, nodes], from row to column


def reshard_forecast(
    recorded: Recordings, atoms: dict[str, list[Atom]], cover: Cover, cluster: Cluster, bucket_bytes: int, rates: Rates
) -> Forecast:
    """Plans the transfers into all engines as the transport does, and adds up what they move."""
    engines, tp = cluster.engines.shape
    world = len(recorded.trainers)
    sent = np.zeros((world, engines, tp), dtype=np.int64)  # bytes
    messages = np.zeros((world, engines, tp), dtype=np.int64)
    trainer_staging = np.zeros(world, dtype=np.int64)
    engine_staging = 0
    packed = np.array([not place.contiguous for place in cover.sent], dtype=bool)
    unpacked = np.array([not place.contiguous for place in cover.received], dtype=bool)
    for slot in range(engines):
        plan = plan_transfer(cover, slot, engines, bucket_bytes)
        pair = plan.sources * tp + cover.targets
        sent[:, slot] = np.bincount(pair, cover.num_bytes, world * tp).astype(np.int64).reshape(world, tp)
        message = message_numbers(plan)
        count = int(message.max(initial=-1)) + 1
        first = np.zeros(count, dtype=np.int64)
        first[message[::-1]] = np.arange(len(message))[::-1]  # of each message its first piece
        messages[:, slot] = np.bincount(pair[first], minlength=world * tp).reshape(world, tp)
        several = np.bincount(message, minlength=count) > 1
        staged = np.where(several[message] | packed, cover.num_bytes, 0)
        trainer_staging += _two_batches(plan.sources, plan.batches, staged, world)
        staged = np.where(several[message] | unpacked, cover.num_bytes, 0)
        engine_staging = max(engine_staging, int(_two_batches(cover.targets, plan.batches, staged, tp).max()))
    flat, receivers = sent.reshape(world, engines * tp), cluster.engines.reshape(-1)
    inside = cluster.trainers[:, None] == receivers[None]
    seconds, limit = _slowest(flat, messages.reshape(flat.shape), inside, rates)
    return Forecast(
        transport="reshard",
        engines=engines,
        needed_bytes=cover.total_bytes * engines,
        wire_bytes=int(flat.sum()),
        between_bytes=int(flat[~inside].sum()),
        busiest_sender=_busiest(flat.sum(1), lambda rank: f"trainer {rank}"),
        busiest_receiver=_busiest(flat.sum(0), lambda place: f"engine {place // tp} rank {place % tp}"),
        messages=int(messages.sum()),
        calls=engines,
        trainer_staging_bytes=int(trainer_staging.max()),
        engine_staging_bytes=engine_staging,
        seconds=seconds + rates.call_ms / 1e3,
        limit=limit,
        node_bytes=_between_nodes(flat, cluster.trainers, receivers, cluster.num_nodes),
    )
