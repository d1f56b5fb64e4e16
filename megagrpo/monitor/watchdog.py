"""Monitors the progress of all ranks; shortly before a deadline, writes a page that shows which
rank blocks which.

- run/logs/ranks/rank_3.json: progress (step, phase, start of the phase, last heartbeat), written by
  a thread of that rank
- run/logs/ranks/rank_3.stacks: Python stacks of the rank, if a page requests them or its
  interpreter hangs
- run/logs/deadline_TIME.txt: the page, with the blocking ranks, the waiting ranks and their stacks

The page must precede the deadline, at which NCCL ends the processes without a Python exception.
Ranks communicate by files, because the network may be the cause.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import groupby
from pathlib import Path

import psutil

import megagrpo
from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import Mesh
from megagrpo.system.run_folder import RunFolder, write_whole

_POLL_S = 0.5
_BEAT_S = 5.0  # between two heartbeats
_SILENT_S = 15.0  # a rank with an older heartbeat does not run
_ANSWER_S = 10.0  # to wait for the other ranks' stacks
_EARLY = 0.9  # fraction of a deadline after which the page is written
# a path: a clone's folder may have the package's name
_PACKAGE = Path(megagrpo.__file__).resolve().parent


class Watchdog:
    """Writes this rank's progress, and a page about all ranks if one is stuck. A context manager.

    Construction is collective over the world. `step` returns the number of finished steps. Each of
    `waits` returns a description of this rank's wait outside the trainers, or "".
    """

    def __init__(
        self,
        config: ExperimentConfig,
        mesh: Mesh,
        folder: RunFolder,
        step: Callable[[], int],
    ):
        started = mesh.gather_world(time.strftime("%Y%m%d-%H%M%S"))[0]
        self._mesh = mesh
        self._folder = folder
        self._step = step
        self.waits: list[Callable[[], str]] = []
        self._request = folder.stacks_request(started)  # unique to this start
        self._deadline_s = config.actor.deadline_s
        passes = 1
        if config.algorithm.dynamic_sampling:
            passes = config.algorithm.dynamic_sampling.max_num_gen_batches
        if config.algorithm.needs_greedy_response:
            passes *= 2
        request_s = config.rollout.step_timeout_s
        self._limits = {
            "rollout": passes * request_s,
            "evaluate": request_s,
            "drain": request_s,
            "publish": config.weights.timeout_s,
        }
        self._entered = -1
        self.enter("start")
        self._written = 0.0  # time of the last heartbeat
        self._reported = -1  # number of the phase that a page shows
        self._ended = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._folder.ranks.mkdir(parents=True, exist_ok=True)
        self._hung = self._folder.rank_stacks(self._mesh.rank).open("w")
        self._beat(time.time())
        self._thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._ended.set()
        self._thread.join(_ANSWER_S)
        faulthandler.cancel_dump_traceback_later()
        self._hung.close()

    def enter(self, phase: str) -> None:
        """Records that the main thread starts phase `phase` of the step."""
        self._name = phase
        self._since = self._moved = time.time()
        self._entered += 1

    def alive(self) -> None:
        """Records progress of the main thread, and thus of every rank, inside its phase."""
        self._moved = time.time()

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            # If C code holds the interpreter lock, this thread cannot postpone the timer and C
            # writes the stacks.
            faulthandler.dump_traceback_later(2 * _SILENT_S, file=self._hung)
            with suppress(OSError):  # a disk that is full, a file system that hangs: tried again
                self._look(time.time())

    def _look(self, now: float) -> None:
        entered = self._entered
        limit = self._limits.get(self._name, self._deadline_s)
        beats = now - self._written > _BEAT_S or self._since > self._written
        if beats:
            self._beat(now)
        if self._reported == entered:
            return
        if beats and self._request.exists():  # not at every poll: all ranks ask one file system
            self._write_stacks()
        elif now - self._since > _EARLY * limit or now - self._moved > _EARLY * self._deadline_s:
            self._write_page(now)
        else:
            return
        self._reported = entered

    def _beat(self, now: float) -> None:
        progress = {
            "rank": self._mesh.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": self._step() + 1,
            "phase": self._name,
            "since": self._since,
            "entered": self._entered,
            "beat": now,
            "where": self._where(),
            "waits": list(filter(None, (wait() for wait in self.waits))),
        }
        write_whole(self._folder.rank_progress(self._mesh.rank), json.dumps(progress))
        self._written = now

    def _where(self) -> str:
        """Returns the main thread's innermost call and the line of this package that led to it."""
        frames = traceback.extract_stack(sys._current_frames()[self._main])
        inner = frames[-1]
        ours = next((frame for frame in reversed(frames) if is_ours(frame.filename)), inner)
        path = Path(ours.filename)
        place = f"{path.parent.name}/{path.name}:{ours.lineno} {ours.name}"
        if inner is ours:
            return place
        return f"{inner.name} ({Path(inner.filename).name}), called by {place}"

    def _write_stacks(self) -> None:
        frames = sys._current_frames()
        parts = []
        for thread in threading.enumerate():
            if thread is not self._thread and thread.ident in frames:
                parts += [f"thread {thread.name}:\n", *traceback.format_stack(frames[thread.ident])]
        self._folder.rank_stacks(self._mesh.rank).write_text("".join(parts))

    def _write_page(self, now: float) -> None:
        try:
            self._request.open("x").close()
        except FileExistsError:  # another rank writes the page
            self._write_stacks()
            return
        with ExitStack() as end:
            # also if the page cannot be written: later ones need a request of their own
            end.callback(self._request.unlink)
            self._write_answers(now)

    def _write_answers(self, now: float) -> None:
        files = {rank: self._folder.rank_stacks(rank) for rank in range(self._mesh.world_size)}
        others = [file for rank, file in files.items() if rank != self._mesh.rank]
        requested = self._request.stat().st_mtime
        end = time.monotonic() + _ANSWER_S
        while time.monotonic() < end and not all(
            file.exists() and file.stat().st_size > 0 and file.stat().st_mtime >= requested
            for file in others
        ):
            time.sleep(_POLL_S)
        self._write_stacks()
        self._beat(time.time())
        # an existing file is complete
        progress = {rank: self._folder.rank_progress(rank) for rank in files}
        # Clocks of nodes differ by more than a heartbeat: the file system has one for all of them.
        ranks = [
            json.loads(file.read_text()) | {"beat": file.stat().st_mtime}
            if file.exists()
            else {"rank": rank}
            for rank, file in progress.items()
        ]
        written = progress[self._mesh.rank].stat().st_mtime
        stacks = {
            rank: file.read_text(errors="replace") for rank, file in files.items() if file.exists()
        }
        summary = (
            f"rank {self._mesh.rank} is in {self._name} of step {self._step() + 1} for "
            f"{now - self._since:.0f} s, and nothing has moved for {now - self._moved:.0f} s"
        )
        page = f"{summary}\n{describe(ranks, written)}\n\n{_grouped(stacks)}"
        moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        write_whole(self._folder.deadline_page(moment), page)


def is_ours(file: str) -> bool:
    """Returns whether a source file belongs to this package."""
    return Path(file).resolve().is_relative_to(_PACKAGE)


def describe(ranks: list[dict], now: float) -> str:
    """Returns lines that name the blocking ranks, and the waiting ranks with their states.

    `ranks`: the progress of each rank, {"rank": n} if it has no file. `now`: seconds since the
    epoch.
    """
    blocking = _behind(ranks, now)
    lines = []
    for rank in blocking:
        process = f" ({rank['host']}, pid {rank['pid']})" if "pid" in rank else ""
        lines.append(f"HELD UP BY rank {rank['rank']}{process}: {_state(rank, now)}")
    waiting: dict[str, list[int]] = {}
    for rank in ranks:
        if rank not in blocking:
            waiting.setdefault(_state(rank, now), []).append(rank["rank"])
    for state, numbers in waiting.items():
        head = f"{'WAITING' if blocking else 'ALL ALIKE'}: rank{'s' * (len(numbers) > 1)}"
        lines.append(f"{head} {_ranges(numbers)}: {state}")
    return "\n".join(lines)


def _behind(ranks: list[dict], now: float) -> list[dict]:
    """Returns the ranks that the others wait for; none if all are in the same state.

    They are the ranks without a heartbeat, else those that wait for something outside the trainers,
    else those in an earlier phase, else those outside a collective while the others are in one.
    """
    first = min((rank["entered"] for rank in ranks if "entered" in rank), default=0)
    for late in (
        lambda rank: "beat" not in rank or now - rank["beat"] > _SILENT_S,
        lambda rank: rank["waits"],
        lambda rank: rank["entered"] == first,
        lambda rank: "distributed_c10d" not in rank["where"],
    ):
        behind = [rank for rank in ranks if late(rank)]
        if behind and (len(behind) < len(ranks) or len(ranks) == 1):
            return behind
    return []


def _state(rank: dict, now: float) -> str:
    if "beat" not in rank:
        return "it never wrote a heartbeat"
    text = f"{rank['phase']} of step {rank['step']} since {_clock(rank['since'])}"
    if now - rank["beat"] > _SILENT_S:
        beat = _clock(rank["beat"])
        return f"no heartbeat since {beat}, when it was in {text}{_process_status(rank)}"
    waits = "".join(f"; waits for {wait}" for wait in rank["waits"])
    return f"in {text}{waits}; at {rank['where']}"


def _process_status(rank: dict) -> str:
    if rank["host"] != socket.gethostname():
        return ""
    with suppress(psutil.NoSuchProcess):
        return f"; its process is {psutil.Process(rank['pid']).status()}"
    return "; its process is gone"


def _grouped(stacks: dict[int, str]) -> str:
    """Returns each distinct text once, with its ranks."""
    by_text: dict[str, list[int]] = {}
    for rank, text in stacks.items():
        by_text.setdefault(text or "(no stacks: the process does not run)\n", []).append(rank)
    return "\n".join(
        f"== stacks of rank{'s' * (len(ranks) > 1)} {_ranges(ranks)}\n{text}"
        for text, ranks in by_text.items()
    )


def _ranges(ranks: list[int]) -> str:
    """Returns [0, 1, 2, 5] as "0-2, 5"."""
    # the difference of rank and index is the same within a run of consecutive ranks
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
