"""Sums the bytes of a publish on every link from the transports' own plans, and the seconds of the
slowest link.

Ranks are where config/placement.py puts them. Every rank has a link of its own between nodes and
one inside its node, each with the full rate in both directions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

import numpy as np
import torch

from megagrpo.check.hardware import Rates
from megagrpo.config.placement import Nodes, place
from megagrpo.config.schema import ExperimentConfig
from megagrpo.tools.plan.recordings import Recordings
from megagrpo.weights.transports.broadcast import broadcast_plan, sent_unpacked
from megagrpo.weights.transports.gather_plan import Bucket, GatherPlan
from megagrpo.weights.transports.reshard_plan import (
    Cover,
    Nearness,
    make_cover,
    piece_limit,
    plan_transfer,
    trainer_atoms,
)


@dataclass(frozen=True)
class Cluster:
    """The node of every rank: int64 [trainer ranks] and [engines, ranks of an engine].

    carriers: int64, as `engines`: under rollout.colocate, the trainer rank on the same GPU.
    """

    trainers: np.ndarray
    engines: np.ndarray
    carriers: np.ndarray | None = None

    @property
    def num_nodes(self) -> int:
        """Counts the nodes."""
        return int(max(self.trainers.max(), self.engines.max())) + 1


def cluster_of(config: ExperimentConfig, engines: int, gpus_per_node: int | None = None) -> Cluster:
    """Places all ranks beside `engines` >= 1 engines. Raises ValueError for those that have no
    place."""
    update = {"num_engines": engines, "min_healthy_engines": 1}
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update=update)})
    found = place(config, Nodes(gpus_per_node))
    ranks = {gpu: rank for rank, gpu in enumerate(found.trainers)}
    carriers = (
        [[ranks[gpu] for gpu in engine] for engine in found.engines]
        if config.rollout.colocate
        else None
    )
    return Cluster(
        np.array([gpu.node for gpu in found.trainers]),
        np.array([[gpu.node for gpu in engine] for engine in found.engines]),
        None if carriers is None else np.array(carriers),
    )


@dataclass(frozen=True)
class Forecast:
    """Bytes and seconds of a publish to `engines` engines. Busiest: (rank, bytes)."""

    transport: str
    engines: int
    needed_bytes: int  # the lower bound: each element of every engine rank once
    needed_of_dtype: dict[str, int]  # of these by published dtype
    wire_bytes: int  # received by all ranks together
    between_bytes: int  # of these over the links between nodes
    busiest_sender: tuple[str, int]
    busiest_receiver: tuple[str, int]
    messages: int
    calls: int  # HTTP calls that carry data or wait for it
    trainer_staging_bytes: int  # at most, of one rank, besides its parameters
    engine_staging_bytes: int
    seconds: float
    limit: str  # the slowest link or step
    node_bytes: np.ndarray = field(repr=False)  # int64 [nodes, nodes], from row to column


def forecast_publish(
    config: ExperimentConfig, recorded: Recordings, clusters: Sequence[Cluster], rates: Rates
) -> list[list[Forecast]]:
    """Plans a publish to all engines of each cluster as the transports do: by `reshard` and
    `broadcast`, or `ipc`."""
    bucket_bytes = int(config.weights.bucket_mb * 2**20)
    cover = make_cover(
        trainer_atoms(recorded.trainers, recorded.specs),
        recorded.engine,
        recorded.specs,
        piece_limit(bucket_bytes),
    )
    gather = broadcast_plan(recorded.trainers, recorded.specs, bucket_bytes)
    cast = (
        None if config.actor.dtype == config.rollout.dtype else getattr(torch, config.rollout.dtype)
    )
    found = []
    for cluster in clusters:
        reshard = reshard_forecast(cover, cluster, bucket_bytes, rates, cast)
        found.append([reshard])
        if cluster.carriers is None:
            found[-1].append(broadcast_forecast(gather, cluster, reshard, rates, cast))
    return found


@dataclass(frozen=True)
class _Traffic:
    """What a publish moves over all links: int64 [trainer ranks, engines, ranks of an engine]."""

    sent: np.ndarray  # bytes
    messages: np.ndarray
    trainer_staging_bytes: int  # of the fullest rank
    engine_staging_bytes: int


def _reshard_traffic(
    cover: Cover, cluster: Cluster, bucket_bytes: int, cast: torch.dtype | None
) -> _Traffic:
    """Sums the transport's own plans into all engines."""
    world, (engines, tp) = len(cluster.trainers), cluster.engines.shape
    sent = np.zeros((world, engines, tp), dtype=np.int64)
    messages = np.zeros((world, engines, tp), dtype=np.int64)
    trainer_staging = np.zeros(world, dtype=np.int64)
    engine_staging = 0
    is_cast = np.array([dtype == cast for dtype in cover.dtypes], dtype=bool)[cover.dtype_indices]
    packed = is_cast | np.array([not part.contiguous for part in cover.sent], dtype=bool)
    unpacked = np.array([not part.contiguous for part in cover.received], dtype=bool)
    on_nodes, carriers = cluster.trainers.tolist(), cluster.carriers
    for slot in range(engines):
        near = None if carriers is None else Nearness(carriers[slot].tolist(), on_nodes)
        plan = plan_transfer(cover, slot, engines, bucket_bytes, near)
        sent[:, slot], messages[:, slot] = plan.traffic(world, tp)
        several = (np.bincount(plan.messages) > 1)[plan.messages]
        staged = np.where(several | packed, cover.num_bytes, 0)
        trainer_staging += _two_batches(plan.sources, plan.batches, staged, world)
        staged = np.where(several | unpacked, cover.num_bytes, 0)
        received = _two_batches(cover.targets, plan.batches, staged, tp)
        engine_staging = max(engine_staging, int(received.max()))
    if carriers is not None:
        for on_links in (sent, messages):
            np.put_along_axis(on_links, carriers[None], 0, axis=0)
    return _Traffic(sent, messages, int(trainer_staging.max()), engine_staging)


def reshard_forecast(
    cover: Cover, cluster: Cluster, bucket_bytes: int, rates: Rates, cast: torch.dtype | None = None
) -> Forecast:
    """Sums bytes, messages and staging of the transport's own plans into all engines; `ipc` with
    carriers, which hand over what they hold without a link.

    cast: the published dtype of values that the trainers hold in another, each of which is cast and
    staged.
    """
    world, (engines, tp) = len(cluster.trainers), cluster.engines.shape
    traffic = _reshard_traffic(cover, cluster, bucket_bytes, cast)
    flat, receivers = traffic.sent.reshape(world, engines * tp), cluster.engines.reshape(-1)
    nodes = np.zeros((cluster.num_nodes, cluster.num_nodes), dtype=np.int64)
    np.add.at(nodes, (cluster.trainers[:, None], receivers[None]), flat)
    inside = cluster.trainers[:, None] == receivers[None]
    trainers = [f"trainer {r}" for r in range(world)]
    targets = [f"engine {e} rank {r}" for e in range(engines) for r in range(tp)]
    messages = traffic.messages.reshape(flat.shape)
    seconds, limit = _slowest(flat, messages, inside, (trainers, targets), rates)
    needed = {}
    for index, dtype in enumerate(cover.dtypes):
        of_dtype = cover.num_bytes[cover.dtype_indices == index].sum()
        needed[str(dtype).removeprefix("torch.")] = int(of_dtype) * engines
    return Forecast(
        transport="reshard" if cluster.carriers is None else "ipc",
        engines=engines,
        needed_bytes=cover.total_bytes * engines,
        needed_of_dtype=needed,
        wire_bytes=int(flat.sum()),
        between_bytes=int(flat[~inside].sum()),
        busiest_sender=_busiest(flat.sum(1), trainers),
        busiest_receiver=_busiest(flat.sum(0), targets),
        messages=int(messages.sum()),
        calls=engines,
        trainer_staging_bytes=traffic.trainer_staging_bytes,
        engine_staging_bytes=traffic.engine_staging_bytes,
        seconds=seconds + rates.call_ms / 1e3,
        limit=limit,
        node_bytes=nodes,
    )


def broadcast_forecast(
    plan: GatherPlan,
    cluster: Cluster,
    least: Forecast,
    rates: Rates,
    cast: torch.dtype | None = None,
) -> Forecast:
    """Sums the star: slices into rank 0, each whole bucket once to every engine and on from rank to
    rank inside it.

    plan: the transport's own. least: of `reshard`. While the engines load a bucket, the next one is
    gathered and sent.
    """
    engines, tp = cluster.engines.shape
    gathered = np.zeros(len(cluster.trainers), dtype=np.int64)  # bytes, by the rank that sends them
    buckets = [_bucket_bytes(bucket, plan, cast) for bucket in plan.buckets]
    for bucket in buckets:
        for rank, size in bucket.coming.items():
            gathered[rank] += size
    model_bytes = sum(bucket.size for bucket in buckets)
    nodes = _star_nodes(cluster, gathered, model_bytes)
    home = int(cluster.trainers[0])
    far = cluster.trainers != home
    gather = _time(int(gathered[far].sum()), int(gathered[~far].sum()), 0, rates)
    far_engines = int((cluster.engines[:, 0] != home).sum())
    out = _time(model_bytes * far_engines, model_bytes * (engines - far_engines), 0, rates)
    calls = len(buckets) * rates.call_ms / 1e3
    longest = max(gather, out, calls)
    held = [0, *(bucket.held for bucket in buckets)]
    return replace(
        least,
        transport="broadcast",
        wire_bytes=int(gathered.sum()) + model_bytes * engines * tp,
        between_bytes=int(nodes.sum() - np.trace(nodes)),
        busiest_sender=("trainer 0", model_bytes * engines),
        busiest_receiver=_busiest(
            np.array([gathered.sum(), model_bytes]), ("trainer 0", "engine 0 rank 0")
        ),
        messages=sum(len(bucket.coming) + bucket.messages * engines * tp for bucket in buckets),
        calls=len(buckets) * engines,
        trainer_staging_bytes=max(map(sum, pairwise(held)))
        + max(bucket.packed for bucket in buckets),
        engine_staging_bytes=max(bucket.size for bucket in buckets),
        seconds=longest
        + (gather + out + calls) / len(buckets),  # the first one overlaps with nothing
        limit={gather: "gathering into trainer 0", out: "sending from trainer 0"}.get(
            longest, "calls"
        ),
        node_bytes=nodes,
    )


def _star_nodes(cluster: Cluster, gathered: np.ndarray, model_bytes: int) -> np.ndarray:
    """Returns the bytes from node to node, int64 [nodes, nodes]. gathered: by trainer rank."""
    nodes = np.zeros((cluster.num_nodes, cluster.num_nodes), dtype=np.int64)
    home = int(cluster.trainers[0])
    np.add.at(nodes[:, home], cluster.trainers, gathered)
    for ranks in cluster.engines:  # a ring: each rank gets the bucket from the one before it
        for source, target in pairwise([home, *ranks.tolist()]):
            nodes[source, target] += model_bytes
    return nodes


@dataclass(frozen=True)
class _BucketBytes:
    size: int
    coming: dict[int, int]  # to rank 0, by the rank that sends them
    held: int  # by rank 0: slices that arrive, and tensors that are assembled
    packed: int  # into one tensor, for the engines; 0 if tensors are sent from their own memory
    messages: int  # to each engine rank


def _bucket_bytes(bucket: Bucket, plan: GatherPlan, cast: torch.dtype | None) -> _BucketBytes:
    item = bucket.dtype.itemsize
    sizes = [prod(plan.specs[name][0]) * item for name in bucket.names]
    own = [
        c for c in bucket.parts.get(0, ()) if c.size == plan.specs[c.hf][0] and c.target.contiguous
    ]
    in_place = sum(prod(copy.size) for copy in own) * item if bucket.dtype != cast else 0
    coming = {
        rank: sum(prod(c.size) for c in copies) * item
        for rank, copies in bucket.parts.items()
        if rank
    }
    held = sum(coming.values()) + sum(sizes) - in_place
    if sent_unpacked(sizes, bucket.dtype):
        return _BucketBytes(sum(sizes), coming, held, packed=0, messages=len(sizes))
    return _BucketBytes(sum(sizes), coming, held, packed=sum(sizes), messages=1)


def _two_batches(
    ranks: np.ndarray, batches: np.ndarray, num_bytes: np.ndarray, count: int
) -> np.ndarray:
    """Returns by rank the most bytes in two of its consecutive batches, int64 [count]."""
    most = np.zeros(count, dtype=np.int64)
    stride = int(batches.max(initial=0)) + 1
    key, index = np.unique(ranks * stride + batches, return_inverse=True)
    size = np.bincount(index.reshape(-1), num_bytes, len(key)).astype(np.int64)
    rank = key // stride
    before = (
        np.concatenate([[0], np.where(rank[1:] == rank[:-1], size[:-1], 0)]) if len(key) else size
    )
    np.maximum.at(most, rank, size + before)
    return most


def _slowest(
    sent: np.ndarray,
    messages: np.ndarray,
    inside: np.ndarray,
    names: tuple[list[str], list[str]],
    rates: Rates,
) -> tuple[float, str]:
    """Returns the seconds of the slowest rank, and its name and direction.

    Arrays [trainer ranks, engine ranks]: bytes, messages, whether both are on one node. names: of
    both sides.
    """
    best = (0.0, "")
    for axis, what, ranks in ((1, "sending from", names[0]), (0, "receiving on", names[1])):
        far, near = np.where(inside, 0, sent).sum(axis), np.where(inside, sent, 0).sum(axis)
        times = [_time(*ends, rates) for ends in zip(far, near, messages.sum(axis), strict=True)]
        slowest = int(np.argmax(times))
        best = max(best, (times[slowest], f"{what} {ranks[slowest]}"))
    return best


def _time(between_bytes: int, inside_bytes: int, messages: int, rates: Rates) -> float:
    """Returns the seconds that one rank needs for one direction; its two links work at the same
    time."""
    links = max(between_bytes / rates.between_gb_s, inside_bytes / rates.inside_gb_s) / 1e9
    return float(links / rates.efficiency + messages * rates.message_us / 1e6)


def _busiest(num_bytes: np.ndarray, names: Sequence[str]) -> tuple[str, int]:
    most = int(num_bytes.argmax())
    return names[most], int(num_bytes[most])
