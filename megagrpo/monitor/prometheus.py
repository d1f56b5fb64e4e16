"""A run in Prometheus' text format (version 0.0.4), for GET /metrics of the rollout service."""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from megagrpo.types import EngineInfo

_LAST_BYTES = 2**20  # of metrics.jsonl, more than a step: each of a thousand sources has metrics


def exposition(run: str, metrics: Path, engines: Sequence[EngineInfo]) -> bytes:
    """Returns the last entry of metrics.jsonl, as megagrpo_metric with its names as labels, and the
    state of the engines. Before the first entry only the engines are there."""
    registry = CollectorRegistry()

    def gauge(name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"megagrpo_{name}", text, ["run", *labels], registry=registry)

    entry = gauge("metric", "The last entry of metrics.jsonl.", "name")
    for name, value in last_entry(metrics).items():
        entry.labels(run, name).set(value)
    states = Counter((engine.model, engine.state) for engine in engines)
    count = gauge("engines", "Engines by model and state.", "model", "state")
    for (model, state), number in states.items():
        count.labels(run, model, state).set(number)
    restarts = gauge("engine_restarts", "Restarts of an engine.", "engine")
    version = gauge(
        "engine_weight_version", "Version of an engine's last verified weights.", "engine"
    )
    for engine in engines:
        restarts.labels(run, engine.id).set(engine.restarts)
        if engine.weight_version is not None:
            version.labels(run, engine.id).set(engine.weight_version)
    return generate_latest(registry)


def last_entry(path: Path) -> dict[str, float]:
    """Returns the numbers of the last step in metrics.jsonl; {} if no line is whole. A resumed run
    evaluates a step again, in a line of its own."""
    last: dict[str, float | None] = {}
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _LAST_BYTES))
        for line in reversed(file.read().splitlines(keepends=True)):
            with suppress(ValueError):
                if line.endswith(b"\n"):
                    entry = json.loads(line)
                    if last and entry["step"] != last["step"]:
                        break
                    last = entry | last
    return {name: value for name, value in last.items() if value is not None}
