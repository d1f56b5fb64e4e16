"""Keeps one process's JSON lines of a run, one a step, written in a thread of its own while the loop goes on."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_STEP = re.compile(rb'\{"step": (\d+)')  # how every line begins


class StepLines:
    """Appends to `path`, which no other process writes. A failure to write is raised by the next append, or by close.

    A run that starts at `start_step` finished steps (0: from the beginning) drops the lines of later steps, which it
    makes again.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_later_steps(path, start_step)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=path.stem)
        self._last: Future[None] | None = None

    def append(self, step: int, make: Callable[[], dict]) -> None:
        """Appends what `make` returns as the line of `step`; it is called in the other thread."""
        self._raise_failure()
        self._last = self._thread.submit(self._write, step, make)

    def close(self) -> None:
        """Waits for the last line."""
        self._thread.shutdown(wait=True)
        self._raise_failure()

    def _write(self, step: int, make: Callable[[], dict]) -> None:
        line = json.dumps({"step": step, **make()}, ensure_ascii=False, separators=(", ", ": "), allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _raise_failure(self) -> None:
        if self._last is not None:
            self._last.result()


def drop_later_steps(path: Path, start_step: int) -> None:
    """Cuts the file before the first line of a step after `start_step`, or cut short by a crash; 0 keeps nothing."""
    if not path.exists():
        return
    keep = 0
    if start_step > 0:
        with path.open("rb") as file:
            for line in file:
                step = _STEP.match(line)
                if step is None or not line.endswith(b"\n") or int(step[1]) > start_step:
                    break
                keep += len(line)
    with path.open("r+b") as file:
        file.truncate(keep)


def drop_absent(files: dict[int, Path], present: int, start_step: int) -> None:
    """Drops later steps from the files of writers that an earlier start had and this one, with `present`, has not."""
    for number, path in files.items():
        if number >= present:
            drop_later_steps(path, start_step)


def read_step_lines(path: Path, steps: Callable[[int], bool] = lambda step: True) -> Iterator[dict]:
    """Yields the lines of the steps that `steps` wants. One that is being written is left out.

    Raises ValueError naming a broken line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            step = _STEP.match(line)
            if step is None:
                raise ValueError(f"{path}:{number}: not a line of a step: {line[:80]!r}")
            if steps(int(step[1])):
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}:{number}: not a JSON line: {error}") from None
