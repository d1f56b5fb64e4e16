"""Merges the timelines of all ranks into a trace that Perfetto (ui.perfetto.dev) and
chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TypeVar

from megagrpo.monitor.step_lines import read_step_lines
from megagrpo.monitor.timeline import is_between
from megagrpo.system.run_folder import RunFolder

T = TypeVar("T")
_MAX_RANKS = 64  # with phases in the trace
_MAX_REQUESTS = 4000  # of a step, over all ranks
_TRAINERS, _ENGINES = 1, 2  # "processes" of the trace


_RankStep = tuple[
    int, str, dict
]  # rank, label, and the line of the rank's timeline file: see monitor/timeline.py


def spread(items: Sequence[T], number: int) -> list[T]:
    """Returns at most `number` >= 2 of the items, evenly spread, including the first and the
    last."""
    if len(items) <= number:
        return list(items)
    return [items[round(i * (len(items) - 1) / (number - 1))] for i in range(number)]


def read_trace(folder: RunFolder, num_steps: int) -> tuple[list[dict], list[str]]:
    """Returns the events of the last `num_steps` steps that rank 0 recorded, and notes on
    omissions; [] without any.

    Ranks are threads of a process "trainers", engines of a process "engines". Requests overlap:
    they are asynchronous events and a counter of those in flight. Times are microseconds since the
    first event, by each rank's own clock.
    """
    files = folder.timeline_files()
    recorded = sorted({line["step"] for line in read_step_lines(files[0])}) if 0 in files else []
    steps = recorded[-num_steps:] if num_steps > 0 else []
    if not steps:
        return [], []
    shown = spread(list(files), _MAX_RANKS)
    notes = []
    if len(steps) < len(recorded):
        notes.append(f"timeline: the last {len(steps)} of {len(recorded)} steps (--timeline-steps)")
    if len(shown) < len(files):
        notes.append(f"timeline: {len(shown)} of {len(files)} ranks, evenly spread")
    lines = [part for rank, path in files.items() for part in _rank_steps(rank, path, set(steps))]
    return list(_events(lines, set(shown), _MAX_REQUESTS * len(steps))), notes


def _rank_steps(rank: int, path: Path, steps: set[int]) -> Iterator[_RankStep]:
    seen: set[int] = set()
    for line in read_step_lines(path, steps.__contains__):
        # the time before a process's first step is recorded under the step that it continues from
        starts = line["step"] == 0 or line["step"] in seen
        seen.add(line["step"])
        yield rank, f"start, at step {line['step']}" if starts else str(line["step"]), line


def _events(lines: list[_RankStep], shown: set[int], max_requests: int) -> Iterator[dict]:
    zero = min(line["start"] for *_, line in lines)
    names = sorted({name for *_, line in lines for name in line["engines"]})
    yield from _titles(shown, names)
    every = -(-sum(len(line["requests"]) for *_, line in lines) // max_requests) or 1
    changes: dict[str, list[tuple[int, float]]] = defaultdict(
        list
    )  # by engine: time, requests that start there
    ids = count()
    for rank, label, line in lines:
        shift = line["start"] - zero
        for name, start, end in line["phases"] if rank in shown else []:
            if not is_between(name):
                yield _slice(_TRAINERS, rank, name, _us(shift + start), _us(shift + end), label)
        for engine, name, start, end in line["calls"]:
            tid = names.index(line["engines"][engine])
            yield _slice(_ENGINES, tid, name, _us(shift + start), _us(shift + end), label)
        weight = every * line["num_requests"] / max(len(line["requests"]), 1)
        for engine, start, end, tokens in line["requests"][::every]:
            name, begin, finish = line["engines"][engine], _us(shift + start), _us(shift + end)
            request = {"pid": _ENGINES, "tid": names.index(name), "cat": "request", "id": next(ids)}
            request["name"] = f"request to {name or 'no engine'}"
            args = {"tokens": tokens, "stands for": round(weight, 3), "step": label}
            yield {"ph": "b", "ts": begin, "args": args, **request}
            yield {"ph": "e", "ts": finish, **request}
            changes[name] += [(begin, weight), (finish, -weight)]
    yield from _counters(changes)


def _titles(shown: set[int], names: list[str]) -> Iterator[dict]:
    """Yields the names of ranks and engines."""
    yield {"ph": "M", "pid": _TRAINERS, "name": "process_name", "args": {"name": "trainers"}}
    yield {"ph": "M", "pid": _ENGINES, "name": "process_name", "args": {"name": "engines"}}
    threads = [(_TRAINERS, rank, f"rank {rank}") for rank in sorted(shown)]
    threads += [(_ENGINES, number, name or "no engine") for number, name in enumerate(names)]
    for pid, tid, name in threads:
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _counters(changes: dict[str, list[tuple[int, float]]]) -> Iterator[dict]:
    """Yields how many requests run on each engine. changes: by engine, at a time, the requests that
    start there."""
    for name, moments in changes.items():
        running = 0.0
        for moment, change in sorted(moments):
            running = max(running + change, 0.0)
            args = {"requests": round(running, 2)}
            yield {
                "ph": "C",
                "pid": _ENGINES,
                "name": f"running on {name or 'no engine'}",
                "ts": moment,
                "args": args,
            }


def _slice(pid: int, tid: int, name: str, start: int, end: int, label: str) -> dict:
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, **times, "args": {"step": label}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def write_trace(path: Path, events: list[dict]) -> None:
    """Writes the trace, compressed if its name ends in .gz."""
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
