"""Writes in a background thread; JSON lines of one process, one line per step."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megagrpo.system.errors import translated

_STEP = re.compile(rb'\{"step": ?(\d+)')  # the start of every line


class BackgroundWriter:
    """Runs one write at a time in a background thread. The next call raises a failure to write."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._last: Future[None] | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Starts `write` when the previous one has finished."""
        self.flush()
        self._last = self._thread.submit(write)

    def flush(self) -> None:
        """Waits until the last write has finished."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Waits until everything is written."""
        self._thread.shutdown(wait=True)
        self.flush()


def drop_later_steps(path: Path, start_step: int) -> None:
    """Truncates the file before an incomplete last line, or before the first line of a step after
    `start_step`.

    A broken line, as a node leaves that loses power, stays: it ends no run whose checkpoint is
    whole, and lines after it are not lost.
    """
    if not path.exists():
        return
    keep = 0
    with path.open("rb") as file:
        for line in file:
            step = _STEP.match(line)
            if not line.endswith(b"\n") or (step is not None and int(step[1]) > start_step):
                break
            keep += len(line)
    with path.open("r+b") as file:
        file.truncate(keep)


def read_step_lines(path: Path) -> Iterator[dict]:
    """Yields the lines of a file, without an incomplete last line.

    Raises ValueError with the number of a broken line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            if _STEP.match(line) is None:
                raise ValueError(f"{path}:{number}: not a line of a step: {line[:80]!r}")
            with translated(f"{path}:{number}: not a JSON line", json.JSONDecodeError):
                entry = json.loads(line)
            yield entry
