"""Lines about the current phase of a process while nothing else is printed."""

import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

CLEAR = "\r\033[K"  # a terminal's line
_START_S, _RUN_S, _TERMINAL_S = 10.0, 60.0, 1.0  # between two lines about one phase


class Progress:
    """A context manager that prints a phase when it starts, and again every few seconds.

    A terminal shows one line that changes, with a bar after `follow`; a file gets line after line.
    enabled=False prints nothing.
    """

    def __init__(self, title: str, enabled: bool = True, stream: TextIO | None = None):
        self._title = title
        self._enabled = enabled
        self._started = time.monotonic()
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._say: Callable[[str], None] = self._print
        self._pause(_START_S)
        self._at_once = True
        self._phase = ""
        self._detail = self._bar = lambda: ""
        self._since = self._printed = self._started
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)

    def __enter__(self) -> "Progress":
        if self._enabled:
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._end_line()

    def enter(self, phase: str, detail: Callable[[], str] = lambda: "") -> None:
        """Starts a phase, "" for none; `detail` is called for each line."""
        with self._lock:
            self._phase = phase
            self._detail = detail
            self._since = self._printed = time.monotonic()
            if phase and self._at_once and self._enabled:
                self._say(phase)
            elif not phase:
                self._end_line()

    def follow(self, say: Callable[[str], None], bar: Callable[[], str]) -> None:
        """Passes all further lines to `say`, which clears a terminal's line first; that line begins
        with `bar` now."""
        with self._lock:
            self._end_line()
            self._say = say
            self._bar = bar
            self._pause(_START_S)

    def calm(self) -> None:
        """Ends the start: from now on only phases that last get a line, every minute."""
        self._at_once = False
        self._pause(_RUN_S)

    def _pause(self, seconds: float) -> None:
        self._every_s = _TERMINAL_S if self._live else seconds

    def _repeat(self) -> None:
        while not self._ended.wait(_TERMINAL_S):
            with self._lock:
                now = time.monotonic()
                if self._phase and now - self._printed >= self._every_s:
                    self._printed = now
                    line = f"{self._phase}, {now - self._since:.0f} s"
                    if detail := self._detail():
                        line += f": {detail}"
                    (self._print if self._live else self._say)(line)

    def _print(self, text: str) -> None:
        seconds = time.monotonic() - self._started
        line = f"{self._title} {seconds:3.0f} s  {self._bar()}{text}"
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(f"{CLEAR}{line[:width]}", end="", file=self._stream, flush=True)
        else:
            print(line, file=self._stream, flush=True)

    def _end_line(self) -> None:
        if self._enabled and self._live:
            end = "\n" if self._say == self._print else CLEAR
            print(end=end, file=self._stream, flush=True)
