"""`megagrpo engines`: adds an engine to the service of a run, or drains one."""

import argparse
from pathlib import Path

from megagrpo.rollout.control import ServiceUnreachable, find_service
from megagrpo.system.errors import translated


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    command.add_argument("action", choices=["add", "drain"])
    command.add_argument("run_dir", help="run folder")
    command.add_argument(
        "engine", nargs="?", help="engine to drain, by its name in `megagrpo status`"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    print(change_engines(Path(args.run_dir), args.action, args.engine))
    return 0


def change_engines(run_dir: Path, action: str, engine: str | None) -> str:
    """Adds an engine to the service of a run, or drains `engine`; returns a message about it.

    Raises ValueError if `engine` is set for "add" or missing for "drain", or no service answers.
    """
    if (action == "drain") != bool(engine):
        raise ValueError(
            "drain requires the name of an engine; add makes the next one, which has no name yet"
        )
    with translated(str(run_dir), ServiceUnreachable):
        service = find_service(run_dir)
        if engine is None:
            return f"{service.add_engine()} is starting"
        service.drain_engine(engine)
    return f"{engine} finishes what it has and goes"
