"""Runs `megagrpo plan-weights`: the exact bytes of a publish on every link, and the slowest link's
seconds.

Ranks are where config/placement.py puts them. Every rank has a link of its own between nodes and
one inside its node, each with the full rate in both directions.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import torch

from megagrpo.check.hardware import Rates, gigabytes
from megagrpo.config.placement import Nodes, place
from megagrpo.config.schema import ExperimentConfig
from megagrpo.families.quantization import SCALES
from megagrpo.system.run_folder import write_whole
from megagrpo.tools.plan.recordings import Recordings, record_all
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
from megagrpo.weights.wire.changes import changes_bytes

_MAX_COLUMNS = 8  # of the table of nodes


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


def plan_weights(
    config: ExperimentConfig,
    engines: Sequence[int],
    rates: Rates,
    gpus_per_node: int | None,
    output: Path | None,
    changed: float | None = None,
) -> str:
    """Returns the plan as text, for each number of engines; writes it with all links to `output` as
    JSON.

    changed: the share of elements that a step changes, for weights.delta.
    Raises ValueError for a layout that does not suit the model or the nodes.
    """
    clusters = [cluster_of(config, number, gpus_per_node) for number in engines]
    (recorded,) = record_all([config])
    forecasts = forecast_publish(config, recorded, clusters, rates)
    rows = [forecast for pair in forecasts for forecast in pair]
    if output is not None:
        plans = [{**asdict(row), "node_bytes": row.node_bytes.tolist()} for row in rows]
        found = {
            "name": config.name,
            "recording_s": recorded.seconds,
            "rates": asdict(rates),
            "forecasts": plans,
        }
        write_whole(output, json.dumps(found, indent=1) + "\n")
    cells = [_cells(row) for row in rows]
    lines = [*_head(config, recorded, clusters[0], rates), ""]
    lines += [*table_lines([list(cells[0]), *(list(row.values()) for row in cells)]), ""]
    for cluster, (direct, *_) in zip(clusters, forecasts, strict=True):
        lines += _nodes(cluster, direct)
        if changed is not None and cluster.carriers is None:
            lines.append(_with_changes(direct, changed))
    return "\n".join(lines)


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


def _head(
    config: ExperimentConfig, recorded: Recordings, cluster: Cluster, rates: Rates
) -> list[str]:
    p, rollout = config.actor.parallel, config.rollout
    weights = [shape for name, (shape, _) in recorded.specs.items() if not name.endswith(SCALES)]
    size = sum(prod(shape) * dtype.itemsize for shape, dtype in recorded.specs.values())
    held = sum(
        prod(copy.size) * recorded.specs[copy.hf][1].itemsize
        for copies in recorded.engine
        for copy in copies
    )
    formats = rollout.dtype + (" and FP8 with scales" if rollout.quantization else "")
    nodes = len(set(cluster.trainers.tolist()))
    layout = " ".join(f"{key} {getattr(p, key)}" for key in ("tp", "pp", "vpp", "cp", "ep", "etp"))
    return [
        f"{config.name}: {sum(map(prod, weights)):,} parameters in {len(weights):,} tensors, "
        f"{gigabytes(size)} {formats}",
        f"trainers   {config.actor.world_size} ranks on {nodes} nodes ({layout}); "
        f"{recorded.distinct} hold different slices, {sum(map(len, recorded.trainers)):,} copies "
        "in all",
        f"engine     tp {rollout.tp}, ep {rollout.ep}, {rollout.nodes_per_engine} node(s); "
        f"{sum(map(len, recorded.engine)):,} copies, {gigabytes(held)} over its ranks",
        f"rates      {rates.between_gb_s:g} GB/s a rank between nodes, {rates.inside_gb_s:g} "
        "inside one, "
        f"of which {rates.efficiency:.0%} are reached; {rates.message_us:g} us a message, "
        f"{rates.call_ms:g} ms a call",
        f"bucket     {config.weights.bucket_mb:g} MiB",
        "Seconds are of links and calls only: no digests, no copies inside a GPU, no other traffic.",
    ]


def _cells(forecast: Forecast) -> dict[str, str]:
    """Returns a row of the table, by column."""
    return {
        "engines": str(forecast.engines),
        "transport": forecast.transport,
        "wire": gigabytes(forecast.wire_bytes),
        "lower bound": gigabytes(forecast.needed_bytes),
        "between nodes": gigabytes(forecast.between_bytes),
        "busiest sender": f"{forecast.busiest_sender[0]}: {gigabytes(forecast.busiest_sender[1])}",
        "busiest receiver": f"{forecast.busiest_receiver[0]}: "
        f"{gigabytes(forecast.busiest_receiver[1])}",
        "messages": f"{forecast.messages:,}",
        "calls": f"{forecast.calls:,}",
        "staging: trainer": gigabytes(forecast.trainer_staging_bytes),
        "engine": gigabytes(forecast.engine_staging_bytes),
        "seconds": f"{forecast.seconds:.2f}",
        "limit": forecast.limit,
    }


def _nodes(cluster: Cluster, forecast: Forecast) -> list[str]:
    """Returns the bytes from every trainer node to every engine node; a table if it is not too
    wide."""
    rows, columns = np.unique(cluster.trainers), np.unique(cluster.engines)
    block = forecast.node_bytes[np.ix_(rows, columns)]
    used = block[block > 0]
    title = (
        f"{forecast.transport} to {forecast.engines} engines, from node to node: {used.size} of "
        f"{block.size} pairs, {gigabytes(int(used.min()))} to {gigabytes(int(used.max()))} each"
    )
    if len(columns) > _MAX_COLUMNS:
        return [title]
    table = [["GB", *(f"to {column}" for column in columns)]]
    for row, values in zip(rows, block, strict=True):
        table.append([f"node {row}", *(f"{value / 1e9:.1f}" for value in values)])
    return [title, *table_lines(table)]


def _with_changes(forecast: Forecast, share: float) -> str:
    """Returns what weights.delta sends if a share of the elements has changed, in every message the
    same."""
    sent = 0
    for name, num_bytes in forecast.needed_of_dtype.items():
        dtype: torch.dtype = getattr(torch, name)
        elements = num_bytes // dtype.itemsize
        sent += min(changes_bytes(round(share * elements), elements, dtype), num_bytes)
    held = gigabytes(forecast.busiest_sender[1])
    return (
        f"weights.delta with {share:.2%} of the elements changed: {gigabytes(sent)} on the wire, "
        f"{sent / forecast.wire_bytes:.1%} of all; {held} of host memory at most on a trainer rank"
    )


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows of cells as lines with columns of one width."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def reshard_forecast(
    cover: Cover, cluster: Cluster, bucket_bytes: int, rates: Rates, cast: torch.dtype | None = None
) -> Forecast:
    """Sums bytes, messages and staging of the transport's own plans into all engines; `ipc` with
    carriers, which hand over what they hold without a link.

    cast: the published dtype of values that the trainers hold in another, each of which is cast and
    staged.
    """
    world, (engines, tp) = len(cluster.trainers), cluster.engines.shape
    sent = np.zeros((world, engines, tp), dtype=np.int64)  # bytes
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
        engine_staging = max(
            engine_staging, int(_two_batches(cover.targets, plan.batches, staged, tp).max())
        )
    if cluster.carriers is not None:
        for on_links in (sent, messages):
            np.put_along_axis(on_links, cluster.carriers[None], 0, axis=0)
    flat, receivers = sent.reshape(world, engines * tp), cluster.engines.reshape(-1)
    nodes = np.zeros((cluster.num_nodes, cluster.num_nodes), dtype=np.int64)
    np.add.at(nodes, (cluster.trainers[:, None], receivers[None]), flat)
    inside = cluster.trainers[:, None] == receivers[None]
    names = (
        [f"trainer {r}" for r in range(world)],
        [f"engine {e} rank {r}" for e in range(engines) for r in range(tp)],
    )
    seconds, limit = _slowest(flat, messages.reshape(flat.shape), inside, names, rates)
    return Forecast(
        transport="reshard" if cluster.carriers is None else "ipc",
        engines=engines,
        needed_bytes=cover.total_bytes * engines,
        needed_of_dtype={
            str(dtype).removeprefix("torch."): int(
                cover.num_bytes[cover.dtype_indices == index].sum()
            )
            * engines
            for index, dtype in enumerate(cover.dtypes)
        },
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
        needed_bytes=least.needed_bytes,
        needed_of_dtype=least.needed_of_dtype,
        wire_bytes=int(gathered.sum()) + model_bytes * engines * tp,
        between_bytes=int(nodes.sum() - np.trace(nodes)),
        busiest_sender=("trainer 0", model_bytes * engines),
        busiest_receiver=_busiest(
            np.array([gathered.sum(), model_bytes]), ("trainer 0", "engine 0 rank 0")
        ),
        messages=sum(len(bucket.coming) + bucket.messages * engines * tp for bucket in buckets),
        calls=len(buckets) * engines,
        trainer_staging_bytes=max(a + b for a, b in pairwise(held))
        + max(bucket.packed for bucket in buckets),
        engine_staging_bytes=max(bucket.size for bucket in buckets),
        seconds=max(gather, out, calls)
        + (gather + out + calls) / len(buckets),  # the first one overlaps with nothing
        limit={gather: "gathering into trainer 0", out: "sending from trainer 0"}.get(
            max(gather, out, calls), "calls"
        ),
        node_bytes=nodes,
    )


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
