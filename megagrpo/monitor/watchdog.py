"""Watches over one rank's progress: who waits for whom, on one page, shortly before a deadline ends the processes.

    run/logs/ranks/rank_3.json     step, phase, since when, last sign of life; written by a thread of that rank
    run/logs/ranks/rank_3.stacks   its Python stacks, when a page asks for them or when its interpreter hangs
    run/logs/deadline_TIME.txt     the page: who holds up whom, and the stacks

The page is written a little before the deadline itself, which ends the processes: NCCL's does so without a Python
exception. It needs no network, which may be what is broken: ranks meet in files.
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
from contextlib import suppress
from pathlib import Path

import psutil

import megagrpo
from megagrpo.config.schema import ExperimentConfig
from megagrpo.mesh import Mesh
from megagrpo.system.run_folder import RunFolder, write_whole

_POLL_S = 0.5
_BEAT_S = 5.0  # a rank's file is written at least this often
_SILENT_S = 15.0  # a rank whose file is older has a problem with its process itself
_ANSWER_S = 10.0  # how long the page waits for the other ranks' stacks
_EARLY = 0.9  # fraction of a deadline after which the page is written
_PACKAGE = Path(megagrpo.__file__).resolve().parent  # not a name to look for: a clone, and all in it, may bear the same


class Watchdog:
    """Reports this rank's progress to the others, and all ranks' when one is stuck. A context manager.

    Construction is collective over the world. `step` returns the number of finished steps. Each of `waits` returns
    what a part of this rank waits for outside the trainers, or "". `on_enter` is told of every phase.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        mesh: Mesh,
        folder: RunFolder,
        step: Callable[[], int],
        on_enter: Callable[[str], None] = lambda phase: None,
    ):
        started = mesh.gather_world(time.strftime("%Y%m%d-%H%M%S"))[0]
        self._mesh, self._folder, self._step, self._on_enter = mesh, folder, step, on_enter
        self.waits: list[Callable[[], str]] = []
        self._request = folder.stacks_request(started)  # made by the rank that writes a page; another start has another
        self._deadline_s = config.actor.deadline_s
        attempts = config.algorithm.dynamic_sampling.max_num_gen_batches if config.algorithm.dynamic_sampling else 1
        passes = attempts * (2 if config.algorithm.needs_greedy_response else 1)
        request_s = config.rollout.step_timeout_s
        self._limits = {"publish": config.weights.timeout_s, "rollout": passes * request_s, "evaluate": request_s}
        self._limits["drain"] = request_s
        self._name, self._since, self._moved, self._entered = "start", time.time(), time.time(), 0
        self._written = 0.0  # when this rank's file was written last
        self._reported = -1  # the number of the phase that is on a page
        self._ended = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._folder.ranks.mkdir(parents=True, exist_ok=True)
        self._hung = self._folder.rank_stacks(self._mesh.rank).open("w")
        self._say(time.time())
        self._thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._ended.set()
        self._thread.join(_ANSWER_S)
        faulthandler.cancel_dump_traceback_later()
        self._hung.close()

    def enter(self, phase: str) -> None:
        """Notes that the main thread begins another part of the step."""
        self._name, self._since = phase, time.time()
        self._moved, self._entered = self._since, self._entered + 1
        self._on_enter(phase)

    def alive(self) -> None:
        """Notes that the main thread, and with it every other rank's, has moved inside its phase."""
        self._moved = time.time()

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            # Where C code holds the interpreter and this thread cannot put it off, a thread of C writes the stacks.
            faulthandler.dump_traceback_later(2 * _SILENT_S, file=self._hung)
            now, limit = time.time(), self._limits.get(self._name, self._deadline_s)
            if now - self._written > _BEAT_S or self._since > self._written:
                self._say(now)
            if self._reported == self._entered:
                continue
            if self._request.exists():
                self._reported = self._entered
                self._say(now)
                self._write_stacks()
            elif now - self._since > _EARLY * limit or now - self._moved > _EARLY * self._deadline_s:
                self._reported = self._entered
                self._write_page(now)

    def _say(self, now: float) -> None:
        place = {
            "rank": self._mesh.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": self._step() + 1,
            "phase": self._name,
            "since": self._since,
            "entered": self._entered,
            "beat": now,
            "where": self._where(),
            "waits": [text for wait in self.waits if (text := wait())],
        }
        write_whole(self._folder.rank_place(self._mesh.rank), json.dumps(place))
        self._written = now

    def _where(self) -> str:
        """The main thread's innermost call, and the line of this package that led to it."""
        frames = traceback.extract_stack(sys._current_frames()[self._main])
        inner = frames[-1]
        ours = next((frame for frame in reversed(frames) if is_ours(frame.filename)), inner)
        by = f"{Path(ours.filename).parent.name}/{Path(ours.filename).name}:{ours.lineno} {ours.name}"
        return by if inner is ours else f"{inner.name} ({Path(inner.filename).name}), called by {by}"

    def _write_stacks(self) -> None:
        self._folder.rank_stacks(self._mesh.rank).write_text(self._stacks())

    def _stacks(self) -> str:
        frames = sys._current_frames()
        parts = []
        for thread in threading.enumerate():
            if thread is not self._thread and thread.ident in frames:
                parts += [f"thread {thread.name}:\n", *traceback.format_stack(frames[thread.ident])]
        return "".join(parts)

    def _write_page(self, now: float) -> None:
        try:
            self._request.open("x").close()
        except FileExistsError:  # another rank writes it
            self._write_stacks()
            return
        others = set(range(self._mesh.world_size)) - {self._mesh.rank}
        asked = self._request.stat().st_mtime
        end = time.monotonic() + _ANSWER_S
        while time.monotonic() < end and any(not _newer(self._folder.rank_stacks(rank), asked) for rank in others):
            time.sleep(_POLL_S)
        self._write_stacks()
        self._say(time.time())
        places = [_read_place(self._folder.rank_place(rank), rank) for rank in range(self._mesh.world_size)]
        files = {rank: self._folder.rank_stacks(rank) for rank in range(len(places))}
        stacks = {rank: file.read_text(errors="replace") for rank, file in files.items() if file.exists()}
        seen = f"rank {self._mesh.rank} is in {self._name} of step {self._step() + 1} for {now - self._since:.0f} s"
        summary = f"{seen}, and nothing has moved for {now - self._moved:.0f} s\n{describe(places, time.time())}"
        moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        write_whole(self._folder.deadline_page(moment), f"{summary}\n\n{_grouped(stacks)}")
        self._request.unlink()


def is_ours(file: str) -> bool:
    """Whether a source file belongs to this package."""
    return Path(file).resolve().is_relative_to(_PACKAGE)


def describe(places: list[dict], now: float) -> str:
    """Says who holds up the others, and where these wait.

    `places`: what each rank's file says, {"rank": n} when it has none. `now`: seconds since the epoch.
    """
    held_by = _behind(places, now)
    lines = []
    for place in held_by:
        lines.append(f"HELD UP BY rank {place['rank']}{_person(place)}: {_state(place, now)}")
    waiting: dict[str, list[int]] = {}
    for place in places:
        if place not in held_by:
            waiting.setdefault(_state(place, now), []).append(place["rank"])
    for state, ranks in waiting.items():
        lines.append(f"{'WAITING' if held_by else 'ALL ALIKE'}: rank{'s' * (len(ranks) > 1)} {_ranges(ranks)}: {state}")
    return "\n".join(lines)


def _behind(places: list[dict], now: float) -> list[dict]:
    """Returns the ranks that the others wait for; none when all are alike.

    They are those that give no sign of life, else those that wait for somebody outside, else those in an earlier
    phase, else those outside a collective while the others are in one.
    """
    first = min((place["entered"] for place in places if "entered" in place), default=0)
    for late in (
        lambda place: "beat" not in place or now - place["beat"] > _SILENT_S,
        lambda place: place["waits"],
        lambda place: place["entered"] == first,
        lambda place: "distributed_c10d" not in place["where"],
    ):
        found = [place for place in places if late(place)]
        if found and (len(found) < len(places) or (late(places[0]) and len(places) == 1)):
            return found
    return []


def _state(place: dict, now: float) -> str:
    if "beat" not in place:
        return "it never said where it is"
    text = f"{place['phase']} of step {place['step']} since {_clock(place['since'])}"
    if now - place["beat"] > _SILENT_S:
        return f"no sign of life since {_clock(place['beat'])}, when it was in {text}{_process(place)}"
    waits = "".join(f"; waits for {wait}" for wait in place["waits"])
    return f"in {text}{waits}; at {place['where']}"


def _person(place: dict) -> str:
    return f" ({place['host']}, pid {place['pid']})" if "pid" in place else ""


def _process(place: dict) -> str:
    if place["host"] != socket.gethostname():
        return ""
    try:
        return f"; its process is {psutil.Process(place['pid']).status()}"
    except psutil.NoSuchProcess:
        return "; its process is gone"


def _grouped(stacks: dict[int, str]) -> str:
    """Shows every distinct text once, with its ranks."""
    by_text: dict[str, list[int]] = {}
    for rank, text in stacks.items():
        by_text.setdefault(text or "(no stacks: the process does not run)\n", []).append(rank)
    return "\n".join(
        f"== stacks of rank{'s' * (len(ranks) > 1)} {_ranges(ranks)}\n{text}" for text, ranks in by_text.items()
    )


def _ranges(ranks: list[int]) -> str:
    """Abbreviates [0, 1, 2, 5] as 0-2, 5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _read_place(file: Path, rank: int) -> dict:
    with suppress(OSError):  # a rank that never wrote it; what is there is whole
        return json.loads(file.read_text())
    return {"rank": rank}


def _newer(file: Path, than: float) -> bool:
    return file.exists() and file.stat().st_size > 0 and file.stat().st_mtime >= than


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
