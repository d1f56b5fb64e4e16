"""Records the phases of this rank and its requests to engines, by wall clock.

timeline/rank_3.jsonl has one line a step. Its times are seconds after "start", which is seconds
since the epoch:

    phases     [[name, start, end], ...]             consecutive, without gaps
    engines    [id, ...]                             indexed by the two lists below
    requests   [[engine, start, end, tokens], ...]   of leaders; tokens 0: an attempt without a
    sample
    calls      [[engine, name, start, end], ...]     of the main rank: HTTP calls of a publish
    num_requests, num_calls                          total numbers: the lists are bounded

The ranks' clocks are not synchronised.
"""

import itertools
import threading
import time
from collections.abc import Sequence

from megagrpo.monitor.step_lines import StepLines, drop_absent
from megagrpo.system.run_folder import RunFolder

_MAX_REQUESTS, _MAX_CALLS = 512, 1024  # of a step and rank: about 50 kB
_BETWEEN = "what follows the record"


class Timeline:
    """Collects phases, requests and calls of one step and writes them at its end. Thread-safe.

    A run that resumes after `start_step` finished steps drops later lines, also those of ranks that
    no longer exist. `enabled=False` records nothing.
    """

    def __init__(
        self,
        folder: RunFolder,
        rank: int,
        world_size: int = 1,
        start_step: int = 0,
        enabled: bool = True,
    ) -> None:
        self._lines = StepLines(folder.timeline_file(rank), start_step) if enabled else None
        if enabled and rank == 0:
            drop_absent(folder.timeline_files(), world_size, start_step)
        self._lock = threading.Lock()
        self._clear(time.time())

    def _clear(self, now: float) -> None:
        self._marks: list[tuple[str, float]] = [(_BETWEEN, now)]
        self._requests: list[tuple[str, float, float, int]] = []
        self._calls: list[tuple[str, str, float, float]] = []
        self._last_call: dict[str, int] = {}  # engine -> index in _calls
        self._num_calls = 0

    def mark(self, phase: str) -> None:
        """Ends the current phase of this rank and starts `phase`."""
        with self._lock:
            if self._marks[-1][0] != phase:
                self._marks.append((phase, time.time()))

    def request(self, engine: str, start: float, end: float, num_tokens: int) -> None:
        """Adds a request for a sample, in seconds since the epoch. engine "": unknown."""
        with self._lock:
            self._requests.append((engine, start, end, num_tokens))

    def call(self, engine: str, name: str, start: float, end: float) -> None:
        """Adds a call of a publish, in seconds since the epoch; consecutive equal calls are
        merged."""
        with self._lock:
            last = self._last_call.pop(engine, None)
            if last is not None and self._calls[last][1] == name:
                self._calls[last] = (engine, name, self._calls[last][2], end)
                self._last_call[engine] = last
                return
            self._num_calls += 1
            if len(self._calls) < _MAX_CALLS:
                self._last_call[engine] = len(self._calls)
                self._calls.append((engine, name, start, end))

    def end_step(self, step: int) -> None:
        """Writes the collected data as the line of `step`."""
        with self._lock:
            now = time.time()
            marks = [*self._marks, ("", now)]
            requests = self._requests
            calls = self._calls
            num_calls = self._num_calls
            self._clear(now)
        if self._lines is not None:
            self._lines.append(
                step, lambda: _line(marks, requests, calls) | {"num_calls": num_calls}
            )

    def close(self) -> None:
        """Waits until all lines are written."""
        if self._lines is not None:
            self._lines.close()


def is_between(phase: str) -> bool:
    """Returns whether a recorded phase is the time between two phases."""
    return phase.startswith("what follows ")


def _line(
    marks: Sequence[tuple[str, float]],
    requests: Sequence[tuple[str, float, float, int]],
    calls: Sequence[tuple[str, str, float, float]],
) -> dict:
    start = marks[0][1]

    def after(moment: float) -> float:
        return round(moment - start, 4)

    engines = sorted({engine for engine, *_ in [*requests, *calls]})
    index_of = {engine: index for index, engine in enumerate(engines)}
    every = -(-len(requests) // _MAX_REQUESTS) or 1
    kept = sorted(requests, key=lambda request: request[1])[::every]
    return {
        "start": start,
        "end": after(marks[-1][1]),
        "phases": [
            [name, after(at), after(until)] for (name, at), (_, until) in itertools.pairwise(marks)
        ],
        "engines": engines,
        "requests": [
            [index_of[engine], after(at), after(until), tokens]
            for engine, at, until, tokens in kept
        ],
        "num_requests": len(requests),
        "calls": [
            [index_of[engine], name, after(at), after(until)] for engine, name, at, until in calls
        ],
    }
