"""Writes a timeline in Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import json
import os
import secrets
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from megagrpo.monitor.timeline import is_between

_TRAINERS, _ENGINES = 1, 2  # "processes" of the trace
_MICRO = 1e6


def trace_events(steps: list[dict]) -> list[dict]:
    """Returns the events of what `timeline_steps` returns; times are microseconds since its first step.

    Ranks are threads of a process "trainers", engines of a process "engines". Requests overlap: they are asynchronous
    events, and a counter of those that run.
    """
    zero = min((step["start"] for step in steps), default=0.0)
    ranks = sorted({rank["rank"] for step in steps for rank in step["ranks"]})
    engines = sorted({engine for step in steps for engine in step["engines"]})
    events: list[dict] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        for pid, name in ((_TRAINERS, "trainers"), (_ENGINES, "engines"))
    ]
    events += [_thread(_TRAINERS, rank, f"rank {rank}") for rank in ranks]
    events += [_thread(_ENGINES, number, name) for number, name in enumerate(engines)]
    ids = count()
    for step in steps:
        offset = step["start"] - zero
        threads = [engines.index(name) for name in step["engines"]]
        for rank in step["ranks"]:
            for name, start, end in rank["phases"]:
                if not is_between(name):
                    events.append(_slice(_TRAINERS, rank["rank"], name, offset, start, end, step["label"]))
        for engine, name, start, end in step["calls"]:
            events.append(_slice(_ENGINES, threads[engine], name, offset, start, end, step["label"]))
        for engine, start, end, tokens, weight in step["requests"]:
            common = {"pid": _ENGINES, "tid": threads[engine], "cat": "request", "id": next(ids)}
            name = f"request to {step['engines'][engine]}"
            args = {"tokens": tokens, "stands for": weight, "step": step["label"]}
            events.append({"ph": "b", "name": name, "ts": _us(offset + start), "args": args, **common})
            events.append({"ph": "e", "name": name, "ts": _us(offset + end), **common})
        events += _running(step, offset)
    return events


def _running(step: dict, offset: float) -> Iterator[dict]:
    """Yields counters of the requests that run on each engine."""
    for number, engine in enumerate(step["engines"]):
        own = [request for request in step["requests"] if request[0] == number]
        changes = sorted([(r[1], r[4]) for r in own] + [(r[2], -r[4]) for r in own])
        running = 0.0
        for moment, change in changes:
            running += change
            counted = {"requests": round(max(running, 0.0), 2)}
            name = f"running on {engine}"
            yield {"ph": "C", "pid": _ENGINES, "name": name, "ts": _us(offset + moment), "args": counted}


def _thread(pid: int, tid: int, name: str) -> dict:
    return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _slice(pid: int, tid: int, name: str, offset: float, start: float, end: float, step: str) -> dict:
    times = {"ts": _us(offset + start), "dur": _us(end - start)}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, **times, "args": {"step": step}}


def _us(seconds: float) -> int:
    return round(seconds * _MICRO)


def write_trace(path: Path, steps: list[dict]) -> None:
    """Writes the trace, compressed where the name ends in .gz; the whole file or nothing."""
    text = json.dumps({"traceEvents": trace_events(steps), "displayTimeUnit": "ms"}).encode()
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        draft.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
