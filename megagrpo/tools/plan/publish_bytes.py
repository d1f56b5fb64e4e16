"""Runs `megagrpo plan-weights`: the exact bytes of a publish on every link, as text."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path

import numpy as np
import torch

from megagrpo.check.hardware import Rates, gigabytes
from megagrpo.config.schema import ExperimentConfig
from megagrpo.families.quantization import SCALES
from megagrpo.system.run_folder import write_whole
from megagrpo.tools.plan.forecast import Cluster, Forecast, cluster_of, forecast_publish
from megagrpo.tools.plan.recordings import Recordings, record_all
from megagrpo.tools.plan.report import table_lines
from megagrpo.weights.wire.changes import changes_bytes

_MAX_COLUMNS = 8  # of the table of nodes


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
