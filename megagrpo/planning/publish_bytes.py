"""Runs `megagrpo plan-weights`: what a publish will move on the experiment's cluster, and how long it will take."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path

import numpy as np
import torch

from megagrpo.config.schema import ExperimentConfig
from megagrpo.planning.hardware import Rates
from megagrpo.planning.links import Cluster, Forecast, broadcast_forecast, place_ranks, reshard_forecast
from megagrpo.planning.recordings import Recordings, record_both_sides
from megagrpo.system.run_folder import write_whole
from megagrpo.weights.transports.broadcast import broadcast_plan
from megagrpo.weights.transports.reshard_plan import make_cover, piece_limit, trainer_atoms

_MAX_COLUMNS = 8  # of the table of nodes
_COLUMNS = (
    "engines",
    "transport",
    "wire",
    "lower bound",
    "between nodes",
    "busiest sender",
    "busiest receiver",
    "messages",
    "calls",
    "staging: trainer",
    "engine",
    "seconds",
    "limit",
)


def plan_weights(
    config: ExperimentConfig, engines: Sequence[int], rates: Rates, gpus_per_node: int, output: Path | None
) -> str:
    """Returns the plan as text, for each number of engines; writes it with all links to `output` as JSON.

    Raises ValueError for a layout that model or nodes cannot hold.
    """
    rollout = config.rollout
    clusters = [
        place_ranks(config.actor.world_size, number, rollout.tp, rollout.nodes_per_engine, gpus_per_node)
        for number in engines
    ]
    recorded = record_both_sides(config)
    forecasts = forecast_publish(config, recorded, clusters, rates)
    rows = [forecast for pair in forecasts for forecast in pair]
    if output is not None:
        write_whole(output, json.dumps(_as_json(config, recorded, rates, rows), indent=1) + "\n")
    links = [_nodes(cluster, reshard) for cluster, (reshard, _) in zip(clusters, forecasts, strict=True)]
    return "\n".join(
        [
            *_head(config, recorded, clusters[0], rates),
            "",
            *table_lines([_COLUMNS, *map(_row, rows)]),
            "",
            *(line for lines in links for line in lines),
        ]
    )


def forecast_publish(
    config: ExperimentConfig, recorded: Recordings, clusters: Sequence[Cluster], rates: Rates
) -> list[tuple[Forecast, Forecast]]:
    """Plans a publish to all engines of each cluster by `reshard` and by `broadcast`, as the transports do."""
    bucket_bytes = int(config.weights.bucket_mb * 2**20)
    cover = make_cover(
        trainer_atoms(recorded.trainers, recorded.specs), recorded.engine, recorded.specs, piece_limit(bucket_bytes)
    )
    gather = broadcast_plan(recorded.trainers, recorded.specs, bucket_bytes)
    same_dtype = config.actor.dtype == config.rollout.dtype
    found = []
    for cluster in clusters:
        reshard = reshard_forecast(cover, cluster, bucket_bytes, rates, same_dtype)
        found.append((reshard, broadcast_forecast(gather, cluster, reshard.needed_bytes, rates, same_dtype)))
    return found


def _head(config: ExperimentConfig, recorded: Recordings, cluster: Cluster, rates: Rates) -> list[str]:
    p, rollout = config.actor.parallel, config.rollout
    numbers = sum(prod(shape) for shape, _ in recorded.specs.values())
    size = numbers * getattr(torch, rollout.dtype).itemsize
    held = sum(prod(copy.size) for copies in recorded.engine for copy in copies)
    nodes = len(set(cluster.trainers.tolist()))
    layout = " ".join(f"{key} {getattr(p, key)}" for key in ("tp", "pp", "vpp", "cp", "ep", "etp"))
    return [
        f"{config.name}: {numbers:,} parameters in {len(recorded.specs):,} tensors, {_bytes(size)} in {rollout.dtype}",
        f"trainers   {config.actor.world_size} ranks on {nodes} nodes ({layout}); "
        f"{recorded.distinct} hold different slices, {sum(map(len, recorded.trainers)):,} copies in all",
        f"engine     tp {rollout.tp}, ep {rollout.ep}, {rollout.nodes_per_engine} node(s); "
        f"{sum(map(len, recorded.engine)):,} copies, {_bytes(held * size // numbers)} over its ranks",
        f"rates      {rates.between_gb_s:g} GB/s a rank between nodes, {rates.inside_gb_s:g} inside one, "
        f"of which {rates.efficiency:.0%} are reached; {rates.message_us:g} us a message, {rates.call_ms:g} ms a call",
        f"bucket     {config.weights.bucket_mb:g} MiB",
        "Seconds are of the links and calls alone: no digests, no copies inside a GPU, no other traffic.",
    ]


def _row(forecast: Forecast) -> tuple[str, ...]:
    return (
        str(forecast.engines),
        forecast.transport,
        _bytes(forecast.wire_bytes),
        _bytes(forecast.needed_bytes),
        _bytes(forecast.between_bytes),
        f"{forecast.busiest_sender[0]}: {_bytes(forecast.busiest_sender[1])}",
        f"{forecast.busiest_receiver[0]}: {_bytes(forecast.busiest_receiver[1])}",
        f"{forecast.messages:,}",
        f"{forecast.calls:,}",
        _bytes(forecast.trainer_staging_bytes),
        _bytes(forecast.engine_staging_bytes),
        f"{forecast.seconds:.2f}",
        forecast.limit,
    )


def _nodes(cluster: Cluster, forecast: Forecast) -> list[str]:
    """Returns what every trainer node sends to every engine node, as a table where it is not too wide."""
    rows, columns = np.unique(cluster.trainers), np.unique(cluster.engines)
    block = forecast.node_bytes[np.ix_(rows, columns)]
    used = block[block > 0]
    title = (
        f"{forecast.transport} to {forecast.engines} engines, from node to node: {used.size} of "
        f"{block.size} pairs, {_bytes(int(used.min()))} to {_bytes(int(used.max()))} each"
    )
    if len(columns) > _MAX_COLUMNS:
        return [title]
    header = ["GB", *(f"to {column}" for column in columns)]
    lines = [
        [f"node {row}", *(f"{value / 1e9:.1f}" for value in values)] for row, values in zip(rows, block, strict=True)
    ]
    return [title, *table_lines([header, *lines])]


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows of cells as lines with columns of one width."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _bytes(number: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"


def _as_json(config: ExperimentConfig, recorded: Recordings, rates: Rates, forecasts: Sequence[Forecast]) -> dict:
    return {
        "name": config.name,
        "recording_s": recorded.seconds,
        "rates": asdict(rates),
        "forecasts": [{**asdict(forecast), "node_bytes": forecast.node_bytes.tolist()} for forecast in forecasts],
    }
