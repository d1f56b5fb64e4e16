"""`megagrpo status`: what a run's folder says of it, and its engines."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from megagrpo.checkpoint.folder import latest, step_of
from megagrpo.cluster.lock import launcher_of
from megagrpo.config.load import load_config
from megagrpo.monitor.console import minutes
from megagrpo.monitor.step_log import read_metrics
from megagrpo.rollout.control import ServiceUnreachable, find_service
from megagrpo.system.arguments import positive
from megagrpo.system.run_folder import RunFolder
from megagrpo.types import EngineInfo

_RECENT = 10  # steps of which the mean is told
_WATCH_S = 10
_CLEAR = "\033[H\033[2J"  # of a terminal


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    command.add_argument("run_dir", help="run folder")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the engines as JSON")
    text = f"print again every SECONDS (default {_WATCH_S}), until Ctrl-C"
    form.add_argument(
        "--watch", type=positive, nargs="?", const=_WATCH_S, metavar="SECONDS", help=text
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 1 when the service has failed."""
    while args.watch:
        print(_CLEAR if sys.stdout.isatty() else time.strftime("%H:%M:%S"))
        print_status(Path(args.run_dir), as_json=False)
        sys.stdout.flush()
        time.sleep(args.watch)
    return print_status(Path(args.run_dir), args.json)


def print_status(run_dir: Path, as_json: bool) -> int:
    """Prints how far a run is, from its files, and the state of its engines, if its service
    answers. Returns the exit code: 1 when the service has failed.

    Raises ValueError for a folder without a run.
    """
    folder = RunFolder(run_dir)
    if not (folder.config.is_file() or folder.service.is_file()):
        raise ValueError(f"{run_dir} holds no config.yaml, so it is no run folder")
    if folder.config.is_file() and not as_json:
        print("\n".join(_lines(folder)))
    try:
        status = find_service(run_dir).status()
    except ServiceUnreachable as exc:
        if as_json:
            raise ValueError(f"{run_dir}: {exc}") from exc
        print(f"engines: {exc if folder.service.is_file() else 'no service answers'}")
        return 0
    if as_json:
        print(json.dumps(asdict(status), indent=2))
        return int(bool(status.failed))
    if status.failed:
        print(f"FAILED: {status.failed}")
    for engine in status.engines:
        state = f"{engine.state}, {engine.url or 'no URL'}, weights {_weights(engine)}"
        if engine.load:
            state += f", at most {engine.load['kv_use']:.0%} of its cache in use since"
        print(f"{engine.id}: {state}, {engine.restarts} restart(s)")
    return int(bool(status.failed))


def _weights(engine: EngineInfo) -> str:
    if engine.model:
        return "of its files"
    if engine.weight_version is None:
        return "not verified"
    return f"version {engine.weight_version}"


def _lines(folder: RunFolder) -> Iterator[str]:
    launcher = launcher_of(folder)
    config = load_config(folder.config)
    entries = [entry for entry in _entries(folder) if entry.get("time/step_s") is not None]
    recent = entries[-_RECENT:]
    done = entries[-1]["step"] if entries else 0
    steps = config.train.num_steps
    progress = f"step {done}{f' of {steps}' if steps else ''}"
    if recent:
        seconds = sum(entry["time/step_s"] for entry in recent) / len(recent)
        progress += f", {seconds:.3g} s a step"
        if steps and launcher:
            progress += f", {minutes(seconds * (steps - done))} to go"
        reward = recent[-1].get("reward/mean")
        progress += "" if reward is None else f", reward {reward:.3g}"
    yield f"{config.name}: {progress}"
    yield f"runs as {launcher}" if launcher else "no process trains into this folder"
    last = latest(folder.checkpoints)
    if last is not None:
        age = time.time() - (last / "state.json").stat().st_mtime
        yield f"checkpoint after step {step_of(last)}, {minutes(age)} ago"


def _entries(folder: RunFolder) -> list[dict]:
    try:
        return read_metrics(folder)
    except ValueError as exc:  # before the first step
        if folder.metrics.is_file():
            print(exc, file=sys.stderr)
        return []
