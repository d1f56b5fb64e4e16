"""What travels over which link of a cluster in a publish, and how long the fullest link takes.

Trainer ranks fill nodes in order; engines begin on the next one, unless everything fits on one node. Every rank has a
link of its own between nodes and one inside its node, each as fast in both directions at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import numpy as np

from megagrpo.planning.hardware import Rates
from megagrpo.weights.transports.broadcast import sent_unpacked
from megagrpo.weights.transports.gather_plan import Bucket, GatherPlan
from megagrpo.weights.transports.reshard_plan import Cover, plan_transfer


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
    """Places all ranks. Raises ValueError when a node cannot hold its part of an engine, and for sizes below 1."""
    if min(engines, gpus_per_node) < 1:
        raise ValueError(f"--engines {engines} and --gpus-per-node {gpus_per_node} must be at least 1")
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
    cover: Cover, cluster: Cluster, bucket_bytes: int, rates: Rates, same_dtype: bool = True
) -> Forecast:
    """Plans the transfers into all engines as the transport does, and adds up what they move.

    same_dtype: whether the trainers' parameters have the published dtype; else each value is cast, and staged for it.
    """
    world, (engines, tp) = len(cluster.trainers), cluster.engines.shape
    sent = np.zeros((world, engines, tp), dtype=np.int64)  # bytes
    messages = np.zeros((world, engines, tp), dtype=np.int64)
    trainer_staging = np.zeros(world, dtype=np.int64)
    engine_staging = 0
    packed = np.array([not (same_dtype and place.contiguous) for place in cover.sent], dtype=bool)
    unpacked = np.array([not place.contiguous for place in cover.received], dtype=bool)
    for slot in range(engines):
        plan = plan_transfer(cover, slot, engines, bucket_bytes)
        pair = plan.sources * tp + cover.targets
        sent[:, slot] = np.bincount(pair, cover.num_bytes, world * tp).astype(np.int64).reshape(world, tp)
        message = plan.messages
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
    names = [f"trainer {r}" for r in range(world)], [f"engine {e} rank {r}" for e in range(engines) for r in range(tp)]
    seconds, limit = _slowest(flat, messages.reshape(flat.shape), inside, names, rates)
    return Forecast(
        transport="reshard",
        engines=engines,
        needed_bytes=cover.total_bytes * engines,
        wire_bytes=int(flat.sum()),
        between_bytes=int(flat[~inside].sum()),
        busiest_sender=_busiest(flat.sum(1), names[0]),
        busiest_receiver=_busiest(flat.sum(0), names[1]),
        messages=int(messages.sum()),
        calls=engines,
        trainer_staging_bytes=int(trainer_staging.max()),
        engine_staging_bytes=engine_staging,
        seconds=seconds + rates.call_ms / 1e3,
        limit=limit,
        node_bytes=_between_nodes(flat, cluster.trainers, receivers, cluster.num_nodes),
    )


def broadcast_forecast(
    plan: GatherPlan, cluster: Cluster, needed_bytes: int, rates: Rates, same_dtype: bool = True
) -> Forecast:
    """Adds up the star: slices into rank 0, every whole bucket out once per engine and on from rank to rank inside it.

    plan: as the transport makes it. While the engines load a bucket, the next one is gathered and sent.
    """
    engines, tp = cluster.engines.shape
    gathered = np.zeros(len(cluster.trainers), dtype=np.int64)  # bytes, by the rank that sends them
    buckets = [_bucket_bytes(bucket, plan, same_dtype) for bucket in plan.buckets]
    for bucket in buckets:
        for rank, size in bucket.coming.items():
            gathered[rank] += size
    model_bytes = sum(bucket.size for bucket in buckets)
    nodes = np.zeros((cluster.num_nodes, cluster.num_nodes), dtype=np.int64)
    home = int(cluster.trainers[0])
    np.add.at(nodes[:, home], cluster.trainers, gathered)
    for ranks in cluster.engines:  # a ring: each rank gets the bucket from the one before it
        for source, target in pairwise([home, *ranks.tolist()]):
            nodes[source, target] += model_bytes
    far = cluster.trainers != home
    gather = _time(int(gathered[far].sum()), int(gathered[~far].sum()), 0, rates)
    far_engines = int((cluster.engines[:, 0] != home).sum())
    out = _time(model_bytes * far_engines, model_bytes * (engines - far_engines), 0, rates)
    calls = len(buckets) * rates.call_ms / 1e3
    held = [0, *(bucket.held for bucket in buckets)]
    return Forecast(
        transport="broadcast",
        engines=engines,
        needed_bytes=needed_bytes,
        wire_bytes=int(gathered.sum()) + model_bytes * engines * tp,
        between_bytes=int(nodes.sum() - np.trace(nodes)),
        busiest_sender=("trainer 0", model_bytes * engines),
        busiest_receiver=_busiest(np.array([gathered.sum(), model_bytes]), ("trainer 0", "engine 0 rank 0")),
        messages=sum(len(bucket.coming) + bucket.messages * engines * tp for bucket in buckets),
        calls=len(buckets) * engines,
        trainer_staging_bytes=max(a + b for a, b in pairwise(held)) + max(bucket.packed for bucket in buckets),
        engine_staging_bytes=max(bucket.size for bucket in buckets),
        seconds=max(gather, out, calls) + (gather + out + calls) / len(buckets),  # the first one overlaps with nothing
        limit={gather: "gathering into trainer 0", out: "sending from trainer 0"}.get(max(gather, out, calls), "calls"),
        node_bytes=nodes,
    )


@dataclass(frozen=True)
class _BucketBytes:
    size: int
    coming: dict[int, int]  # to rank 0, by the rank that sends them
    held: int  # by rank 0: slices that arrive, and tensors that are assembled
    packed: int  # into one tensor, for the engines; 0 where tensors are sent as they lie
    messages: int  # to each engine rank


def _bucket_bytes(bucket: Bucket, plan: GatherPlan, same_dtype: bool) -> _BucketBytes:
    item = bucket.dtype.itemsize
    sizes = [prod(plan.specs[name][0]) * item for name in bucket.names]
    own = bucket.parts.get(0, ())
    as_they_lie = sum(
        prod(copy.size) * item
        for copy in own
        if same_dtype and copy.size == plan.specs[copy.hf][0] and copy.target.contiguous
    )
    coming = {rank: sum(prod(c.size) for c in copies) * item for rank, copies in bucket.parts.items() if rank}
    unpacked = sent_unpacked(sizes)
    return _BucketBytes(
        size=sum(sizes),
        coming=coming,
        held=sum(coming.values()) + sum(sizes) - as_they_lie,
        packed=0 if unpacked else sum(sizes),
        messages=len(sizes) if unpacked else 1,
    )


def _two_batches(ranks: np.ndarray, batches: np.ndarray, num_bytes: np.ndarray, count: int) -> np.ndarray:
    """Returns by rank the most bytes in two of its batches that follow each other, int64 [count]."""
    most = np.zeros(count, dtype=np.int64)
    key, place = np.unique(ranks * (int(batches.max(initial=0)) + 1) + batches, return_inverse=True)
    size = np.bincount(place.reshape(-1), num_bytes, len(key)).astype(np.int64)
    rank = key // (int(batches.max(initial=0)) + 1)
    before = np.concatenate([[0], np.where(rank[1:] == rank[:-1], size[:-1], 0)]) if len(key) else size
    np.maximum.at(most, rank, size + before)
    return most


def _slowest(
    sent: np.ndarray, messages: np.ndarray, inside: np.ndarray, names: tuple[list[str], list[str]], rates: Rates
) -> tuple[float, str]:
    """Returns the seconds of the rank that takes longest, and what it does.

    Arrays [trainer ranks, engine ranks]: bytes, messages, whether both are on one node. names: of both.
    """
    best = (0.0, "")
    for axis, what, ranks in ((1, "sending from", names[0]), (0, "receiving on", names[1])):
        far, near = np.where(inside, 0, sent).sum(axis), np.where(inside, sent, 0).sum(axis)
        times = [_time(*ends, rates) for ends in zip(far, near, messages.sum(axis), strict=True)]
        slowest = int(np.argmax(times))
        best = max(best, (times[slowest], f"{what} {ranks[slowest]}"))
    return best


def _time(between_bytes: int, inside_bytes: int, messages: int, rates: Rates) -> float:
    """Returns the seconds that one rank needs for one direction; its two links work at the same time."""
    links = max(between_bytes / rates.between_gb_s, inside_bytes / rates.inside_gb_s) / 1e9
    return float(links / rates.efficiency + messages * rates.message_us / 1e6)


def _busiest(num_bytes: np.ndarray, names: Sequence[str]) -> tuple[str, int]:
    most = int(num_bytes.argmax())
    return names[most], int(num_bytes[most])


def _between_nodes(sent: np.ndarray, senders: np.ndarray, receivers: np.ndarray, count: int) -> np.ndarray:
    """Adds bytes [senders, receivers] up by node, int64 [count, count]."""
    out = np.zeros((count, count), dtype=np.int64)
    np.add.at(out, (senders[:, None], receivers[None]), sent)
    return out
