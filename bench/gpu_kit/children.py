"""Runs one section in a process of its own: its crash, hang or lack of memory ends it alone, and is
what it reports.

On a GPU every section starts a fresh interpreter, because CUDA does not survive a fork. On a CPU it
is forked from a process that has imported the libraries, which would otherwise be most of the work.
"""

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from bench.gpu_kit.figures import Figure, Figures, Setting, Unavailable, read_figures
from megagrpo.system.environment import temporarily
from megagrpo.system.processes import process_tree, stop_tree

LAST_LINES = 30  # of a failed section's output that the report keeps
_UNAVAILABLE = 3  # a child's exit status
_GONE_S = 10.0
_SPARE_S = 20  # after which a child whose parent is gone ends itself


@dataclass(frozen=True)
class Section:
    """A part of the kit: `run` is package.module:function, called as function(figures, setting)."""

    run: str
    limit_s: float
    hides_gpu: bool = False  # computes on the CPU, what others are compared with


@dataclass(frozen=True)
class Outcome:
    """How a section ended: "done" | "failed" | "timed out" | "unavailable" | "not run"."""

    section: str
    status: str
    seconds: float = 0.0
    reason: str = ""  # one line
    last_lines: list[str] = field(default_factory=list)  # of its output, where it failed
    figures: list[Figure] = field(default_factory=list)


def run_section(
    name: str, section: Section, setting: Setting, limit_s: float | None = None
) -> Outcome:
    """Runs a section to its end, or to its time limit, and returns what it found and how it
    ended."""
    limit_s = section.limit_s if limit_s is None else min(limit_s, section.limit_s)
    setting.folder.mkdir(parents=True, exist_ok=True)
    file, log = setting.folder / f"{name}.jsonl", setting.folder / f"{name}.log"
    file.unlink(missing_ok=True)
    context = multiprocessing.get_context("fork" if setting.device == "cpu" else "spawn")
    start = time.monotonic()
    child = context.Process(target=_child, args=(section.run, setting, file, log, limit_s))
    if section.hides_gpu:
        with temporarily("CUDA_VISIBLE_DEVICES", ""):
            child.start()
    else:
        child.start()
    assert child.pid is not None, "it was started"
    try:
        child.join(limit_s)
        in_time = not child.is_alive()
    finally:
        if process_tree(child.pid):
            stop_tree(child.pid, grace_s=0.5)
        child.join(_GONE_S)  # one that waits for the driver cannot be killed
    seconds, figures = time.monotonic() - start, read_figures(file)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    if not in_time:
        reason = f"no end after {limit_s:.0f} s"
        return Outcome(name, "timed out", seconds, reason, _telling(lines), figures)
    if child.exitcode == 0:
        return Outcome(name, "done", seconds, figures=figures)
    reason = next((line for line in reversed(lines) if line.strip()), "no output")
    if child.exitcode == _UNAVAILABLE:
        return Outcome(name, "unavailable", seconds, reason, figures=figures)
    if child.exitcode is not None and child.exitcode < 0:
        frame = next((line.strip() for line in lines if line.startswith('  File "')), reason)
        reason = f"ended by {signal.Signals(-child.exitcode).name}; {frame}"
    return Outcome(name, "failed", seconds, reason, _telling(lines), figures)


def _telling(lines: list[str]) -> list[str]:
    """Returns where it was when it hung or crashed, as faulthandler says, innermost first; else its
    last lines."""
    places = [
        n for n, line in enumerate(lines) if line.startswith(("Timeout (", "Fatal Python error"))
    ]
    start = max(places[0] - 2, 0) if places else max(len(lines) - LAST_LINES, 0)
    return lines[start : start + LAST_LINES]


def _child(run: str, setting: Setting, file: Path, log: Path, limit_s: float) -> None:
    os.setsid()  # what it starts is ended with it
    signal.alarm(int(limit_s) + _SPARE_S)
    output = log.open("w", buffering=1, encoding="utf-8")
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = output
    faulthandler.enable(output)
    faulthandler.dump_traceback_later(0.9 * limit_s, file=output)  # where it hangs
    warnings.simplefilter("ignore")
    status = 0
    try:
        if setting.device == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            import torch

            torch.cuda.init()  # or a section without a GPU would compute for hours on the CPU
        module, _, function = run.partition(":")
        getattr(import_module(module), function)(Figures(file), setting)
    except Unavailable as exc:
        print(exc)
        status = _UNAVAILABLE
    except BaseException as exc:  # whatever it was: it is this section's result
        traceback.print_exc()
        print(
            f"{type(exc).__name__}: {' '.join(str(exc).split())[:400]}"
        )  # the last line: the reason
        status = 1
    output.flush()
    os._exit(status)  # Python's own way out would wait for threads of NCCL
