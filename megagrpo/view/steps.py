"""Merges the timelines of all ranks into steps, for the page and for the trace."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

from megagrpo.monitor.step_lines import read_step_lines
from megagrpo.system.run_folder import RunFolder

T = TypeVar("T")
_MAX_RANKS = 64  # shown of a step
_MAX_REQUESTS = 4000  # shown of a step, over all leaders


def spread(items: Sequence[T], number: int) -> list[T]:
    """Returns at most `number` >= 2 of the items, evenly spread, the first and the last among them."""
    if len(items) <= number:
        return list(items)
    return [items[round(i * (len(items) - 1) / (number - 1))] for i in range(number)]


def timeline_steps(folder: RunFolder, num_steps: int) -> tuple[list[dict], list[str]]:
    """Returns the last `num_steps` steps that the main rank recorded, oldest first, and what was left out.

    A step is {"label", "start": seconds since the epoch, "ranks": [{"rank", "phases": [[name, start, end]]}],
    "engines": [id], "requests": [[engine, start, end, tokens, how many it stands for]], "calls": [[engine, name,
    start, end]]}; times inside are seconds after its start, on whatever clock each rank has. What a start did before
    its first step comes by itself, labelled so.
    """
    files = folder.timeline_files()
    if 0 not in files or num_steps < 1:
        return [], []
    recorded = sorted({line["step"] for line in read_step_lines(files[0])})
    wanted = set(recorded[-num_steps:])
    by_place: dict[tuple[int, int], list[tuple[int, dict]]] = defaultdict(list)
    for rank, path in files.items():
        seen: dict[int, int] = defaultdict(int)
        for line in read_step_lines(path, wanted.__contains__):
            by_place[line["step"], seen[line["step"]]].append((rank, line))
            seen[line["step"]] += 1
    shown = set(spread(list(files), _MAX_RANKS))
    merged = [_merged(*place, by_rank, shown) for place, by_rank in by_place.items()]
    notes = []
    if len(recorded) > len(wanted):
        notes.append(f"timeline: the last {len(wanted)} of {len(recorded)} steps (--timeline-steps)")
    if len(files) > len(shown):
        notes.append(f"timeline: {len(shown)} of {len(files)} ranks, evenly spread")
    return sorted(merged, key=lambda step: step["start"]), notes


def _merged(step: int, start_number: int, by_rank: list[tuple[int, dict]], shown: set[int]) -> dict:
    start = min(line["start"] for _, line in by_rank)
    engines = sorted({engine for _, line in by_rank for engine in line["engines"]})
    place = {engine: index for index, engine in enumerate(engines)}
    ranks, requests, calls = [], [], []
    for rank, line in by_rank:
        shift = line["start"] - start
        names = [place[engine] for engine in line["engines"]]
        if rank in shown:
            phases = [[name, _ms(at + shift), _ms(until + shift)] for name, at, until in line["phases"]]
            ranks.append({"rank": rank, "phases": phases})
        weight = line["num_requests"] / max(len(line["requests"]), 1)
        requests += [
            [names[engine], _ms(at + shift), _ms(until + shift), tokens, weight]
            for engine, at, until, tokens in line["requests"]
        ]
        calls += [
            [names[engine], name, _ms(at + shift), _ms(until + shift)] for engine, name, at, until in line["calls"]
        ]
    every = -(-len(requests) // _MAX_REQUESTS) or 1
    requests = [
        [*request[:4], round(request[4] * every, 3)] for request in sorted(requests, key=lambda r: r[1])[::every]
    ]
    # What a start did before its first step has the number of the step that it continues from.
    begins = step == 0 or start_number > 0
    label = f"start, at step {step}" if begins else str(step)
    return {
        "label": label,
        "start": start,
        "ranks": ranks,
        "engines": [engine or "no engine" for engine in engines],
        "requests": requests,
        "calls": calls,
    }


def _ms(seconds: float) -> float:
    return round(seconds, 4)
