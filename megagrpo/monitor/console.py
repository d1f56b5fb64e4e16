"""Prints the progress of a run: a line per step, and notes."""

import math
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import TextIO

from megagrpo.system.progress import CLEAR

_BAR = 24  # characters
# Metric, label and format, in order. A value stays on the line until the next one: evaluations are
# rare.
_SHOWN = (
    ("reward/mean", "reward", "{:.3f}"),
    ("eval/accuracy", "eval", "{:.3f}"),
    ("loss/total", "loss", "{:.4f}"),
    ("policy/kl_reference", "kl", "{:.1e}"),
    ("optim/grad_norm", "grad", "{:.2f}"),
    ("mismatch/logprob_abs_mean", "mismatch", "{:.1e}"),
    ("perf/tokens_per_s", "tok/s", "{:,.0f}"),
)


class StepConsole:
    """Prints the progress of a loop of `num_steps` steps, the first `start_step` of them finished.

    Only for the main rank. `enabled=False` prints nothing. `stream` defaults to stdout.
    """

    def __init__(
        self,
        title: str,
        num_steps: int,
        start_step: int = 0,
        enabled: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self._title = title
        self._num_steps = num_steps
        self._first = start_step
        self._enabled = enabled
        self._stream = stream or sys.stdout
        self._begin = CLEAR * self._stream.isatty()  # whose last line may be a bar
        self._step = start_step
        self._end = math.inf  # by time.monotonic
        self._latest: dict[str, float] = {}
        self._started = time.monotonic()

    def update(self, step: int, values: dict[str, float]) -> None:
        """Prints `step` finished steps and their metrics; ignores unknown names."""
        self._latest.update(values)
        shown = [
            f"{label} {form.format(self._latest[name])}"
            for name, label, form in _SHOWN
            if name in self._latest
        ]
        if step == self._first:  # the start does not count
            self._started = time.monotonic()
        done = step - self._first
        seconds = time.monotonic() - self._started
        eta = "-"
        self._step = step
        if done > 0:
            left = seconds / done * (self._num_steps - step)
            self._end = time.monotonic() + left
            eta = minutes(left)
        self.note("  ".join([f"{step}/{self._num_steps}", *shown, f"eta {eta}"]))

    def bar(self) -> str:
        """Returns how far the loop is, and the time that is left once a step is finished."""
        filled = "#" * (_BAR * self._step // max(self._num_steps, 1))
        left = self._end - time.monotonic()
        time_left = f", {minutes(left)} left" if math.isfinite(left) else ""
        return f"[{filled:.<{_BAR}}] {self._step}/{self._num_steps}{time_left}  "

    def note(self, text: str) -> None:
        """Prints a line."""
        if not self._enabled:
            return
        with suppress(OSError):  # a full disk, or `| tee`, which Ctrl-C ends, costs no run
            print(f"{self._begin}{self._title} {text}", file=self._stream, flush=True)


def minutes(seconds: float) -> str:
    """Formats seconds as 0:01:02; a negative number, which clocks of two machines make, as 0."""
    return str(timedelta(seconds=max(round(seconds), 0)))
