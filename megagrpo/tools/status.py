"""What a run's folder says of it, and how to stop it: `megagrpo status`, `megagrpo stop`."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megagrpo.checkpoint.folder import latest, step_of
from megagrpo.config.load import load_config
from megagrpo.monitor.record import read_metrics
from megagrpo.rollout.control import ServiceUnreachable, find_service, print_engines
from megagrpo.system.errors import translated
from megagrpo.system.run_folder import RunFolder
from megagrpo.system.stop_request import StopRequest

_RECENT = 10  # steps of which the mean is told


@dataclass(frozen=True)
class Launcher:
    """The process that trains into a run folder, as machine.alone_in records it."""

    host: str
    pid: int
    job: str  # of Slurm; "" outside one

    @property
    def place(self) -> str:
        """Returns where it is, in words."""
        return f"Slurm job {self.job}" if self.job else f"process {self.pid} on {self.host}"


def launcher_of(folder: RunFolder) -> Launcher | None:
    """Returns the launcher that holds the run folder; None if none does."""
    with suppress(OSError, ValueError, TypeError), folder.lock.open() as file:
        launcher = Launcher(**json.loads(file.read()))
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return launcher
    return None


def stop(run_dir: Path, now: bool) -> str:
    """Asks a run to save after its step and to end for good, or ends it at once; returns what
    happens.

    Raises ValueError if no run trains into the folder, or this machine cannot end it.
    """
    folder = RunFolder(run_dir)
    launcher = launcher_of(folder)
    if launcher is None:
        raise ValueError(f"{run_dir}: no run trains into this folder")
    if not now:
        for ranks in ("trainer", "trainer-0"):  # of one node, and of the first of several
            StopRequest(folder.stop_request(ranks)).make(final=True)
        return f"{launcher.place} saves after its step and ends; --now ends it without"
    if launcher.job:
        with translated(f"scancel {launcher.job}", OSError, subprocess.CalledProcessError):
            subprocess.run(["scancel", launcher.job], check=True)
    elif launcher.host == socket.gethostname():
        os.kill(launcher.pid, signal.SIGTERM)
    else:
        raise ValueError(f"it is {launcher.place}: say it there")
    return f"{launcher.place} ends; what is done since its last checkpoint is lost"


def print_status(run_dir: Path, as_json: bool) -> int:
    """Prints how far a run is, from its files, and the state of its engines, if its service
    answers. Returns the exit code: 1 when the service has failed.

    Raises ValueError for a folder without a run.
    """
    folder = RunFolder(run_dir)
    if not folder.config.is_file():
        raise ValueError(f"{run_dir} holds no config.yaml, so it is no run folder")
    if not as_json:
        print("\n".join(_lines(folder)))
    try:
        control = find_service(run_dir)
    except ServiceUnreachable as exc:
        if as_json:
            raise ValueError(f"{run_dir}: {exc}") from exc
        print("engines: no service answers")
        return 0
    return print_engines(control, as_json)


def _lines(folder: RunFolder) -> Iterator[str]:
    launcher = launcher_of(folder)
    config = load_config(folder.config)
    entries = [entry for entry in _entries(folder) if entry.get("time/step_s") is not None]
    recent = entries[-_RECENT:]
    done = entries[-1]["step"] if entries else 0
    steps = config.train.num_steps
    said = f"step {done}{f' of {steps}' if steps else ''}"
    if recent:
        seconds = sum(entry["time/step_s"] for entry in recent) / len(recent)
        said += f", {seconds:.3g} s a step"
        if steps and launcher:
            said += f", {_duration(seconds * (steps - done))} to go"
        reward = recent[-1].get("reward/mean")
        said += "" if reward is None else f", reward {reward:.3g}"
    yield f"{config.name}: {said}"
    yield f"runs as {launcher.place}" if launcher else "no process trains into this folder"
    last = latest(folder.checkpoints)
    if last is not None:
        age = time.time() - (last / "state.json").stat().st_mtime
        yield f"checkpoint after step {step_of(last)}, {_duration(age)} ago"


def _entries(folder: RunFolder) -> list[dict]:
    try:
        return read_metrics(folder)
    except ValueError as exc:  # before the first step
        if folder.metrics.is_file():
            print(exc, file=sys.stderr)
        return []


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
