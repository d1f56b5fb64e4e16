"""Shows the progress of a run: a live progress bar on a terminal, or a plain line per step."""

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

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
    """Shows the progress of a loop of `num_steps` steps, the first `start_step` of them finished. A
    context manager.

    Only for the main rank. `enabled=False` shows nothing. `stream` defaults to stdout.
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
        self._latest: dict[str, float] = {}
        self._started = time.monotonic()
        self._bar: Progress | None = None
        if enabled and self._stream.isatty():
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[values]}"),
                TimeElapsedColumn(),
                TextColumn("eta"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
            )
            self._task = self._bar.add_task(title, total=num_steps, completed=start_step, values="")

    def __enter__(self) -> "StepConsole":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, values: dict[str, float]) -> None:
        """Shows `step` finished steps and their metrics; ignores unknown names."""
        self._latest.update(values)
        latest = [
            (label, form, self._latest[name])
            for name, label, form in _SHOWN
            if name in self._latest
        ]
        shown = "  ".join(f"{label} {form.format(value)}" for label, form, value in latest)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, values=shown)
        else:
            if step == self._first:  # the start does not count
                self._started = time.monotonic()
            done = step - self._first
            seconds = time.monotonic() - self._started
            eta = minutes(seconds / done * (self._num_steps - step)) if done > 0 else "-"
            self.note(f"{step}/{self._num_steps}  {shown}  eta {eta}")

    def status(self, text: str) -> None:
        """Shows what the present step does, until its metrics come."""
        if self._bar is not None:
            self._bar.update(self._task, values=text)
        else:
            self.note(text)

    def note(self, text: str) -> None:
        """Prints a permanent line above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._enabled:
            print(f"{self._title} {text}", file=self._stream, flush=True)


def minutes(seconds: float) -> str:
    """Formats seconds as 1:02 or 3:04:05."""
    total = round(seconds)
    hours, rest = divmod(total, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
