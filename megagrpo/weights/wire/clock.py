"""Deadlines of a publish, and the seconds of its phases."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Deadline:
    """Ends `seconds` after its construction."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Returns the remaining seconds, at least a few ms for results at the last moment."""
        return max(self._end - time.monotonic(), 0.01)

    def part(self, seconds: float) -> "Deadline":
        """Returns the deadline of a part of the work: `seconds` from now, or this one if earlier."""
        return Deadline(min(seconds, self.left))

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end


class PhaseTimer:
    """Measures seconds per phase, summed over repetitions. The time of an inner phase does not count
    in the outer one."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Counts the time inside the `with` block as `phase`. A block that raises is not
        counted."""
        start = time.monotonic()
        counted = sum(self._seconds.values())
        yield
        inside = sum(self._seconds.values()) - counted
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - start - inside

    def waiting(self, items: Iterator[T], phase: str) -> Iterator[T]:
        """Yields the same items and counts the time until each arrives as `phase`."""
        while True:
            with self(phase):
                item = next(items, None)
            if item is None:
                return
            yield item

    def seconds(self, *phases: str) -> dict[str, float]:
        """Returns seconds per phase, 0 for those of `phases` that never ran, and "total" since
        construction."""
        return (
            dict.fromkeys(phases, 0.0) | self._seconds | {"total": time.monotonic() - self._start}
        )
