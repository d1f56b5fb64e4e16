"""`megagrpo stop`: asks a run to save and end, or ends it at once."""

import argparse
import subprocess
from pathlib import Path

from megagrpo.cluster.lock import launcher_of
from megagrpo.system.errors import translated
from megagrpo.system.run_folder import RunFolder
from megagrpo.system.stop_request import StopRequest


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    command.add_argument("run_dir", help="run folder")
    command.add_argument("--now", action="store_true", help="end the run at once, without saving")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    print(f"{args.run_dir}: {stop(Path(args.run_dir), args.now)}")
    return 0


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
        return f"{launcher} saves after its step and ends; --now ends it without"
    if launcher.job:
        with translated(f"scancel {launcher.job}", OSError, subprocess.CalledProcessError):
            subprocess.run(["scancel", launcher.job], check=True)
    else:
        launcher.end()
    return f"{launcher} ends; what is done since its last checkpoint is lost"
