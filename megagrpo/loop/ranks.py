"""Entry point of the ranks that torchrun starts.

Each command that runs as ranks starts in `guarded`, which prepares the host before Megatron-Core is
imported and turns a failure into one message.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

from megagrpo.config.schema import ExperimentConfig
from megagrpo.system import environment
from megagrpo.system.errors import collected, explained
from megagrpo.system.processes import end_with_parent, lasting_imports
from megagrpo.system.progress import Progress
from megagrpo.system.run_folder import write_whole

if TYPE_CHECKING:  # the command line imports this file; most commands need no torch
    import torch


def train_main(config: ExperimentConfig, service_url: str | None) -> int:
    """Runs one trainer rank of a run: `megagrpo train`."""
    with start_progress(config.name) as progress:

        def body(device: torch.device) -> None:
            from megagrpo.check.problems import model_to_train
            from megagrpo.loop.run import start_run
            from megagrpo.loop.train import train

            model_to_train(config)  # refuses one that the layout cannot cut
            with start_run(config, service_url, device, progress) as run:
                gc.collect()
                gc.freeze()  # libraries and the run: a scan of them holds up requests for 0.2 s
                train(run)
                is_main = run.mesh.is_main
            if is_main:
                _write_report(config.output_dir)

        return guarded(config, "trainer", body, trains=True)


def _write_report(output_dir: str) -> None:
    report = import_module("megagrpo.tools.report")  # beside the core, which knows its name
    problems = list[str]()  # no reasons to train the finished run again
    with collected(problems), explained("the report"):
        print(report.write_report(output_dir), flush=True)
    with suppress(OSError):  # of `| tee`, which a Ctrl-C ends
        for problem in problems:
            print(f"no summary: {problem}; `megagrpo report {output_dir}` writes it")


def start_progress(title: str) -> Progress:
    """Returns the progress of this rank's start; only the first rank prints it."""
    progress = Progress(title, enabled=environment.get_int("RANK", 0) == 0)
    progress.enter("imports torch and Megatron-Core")
    return progress


def guarded(
    config: ExperimentConfig, name: str, body: Callable[[torch.device], None], trains: bool = False
) -> int:
    """Runs `body` on this rank's device; returns 0, or 1 if it failed. `trains`: it may need a GPU.

    The reason is written to logs/error_<name>_rank<N>.txt (under the launcher's name, if it has one),
    the traceback to standard error. The
    report is final if a restart would fail again: torchrun restarts ranks whatever their status, so
    the launcher, which sees the file, must end it.
    """
    if environment.under_torchrun():  # which starts it in a session of its own
        end_with_parent()
    with lasting_imports():
        from megagrpo.actor.host import (
            prepare_host,
            refuse_training_without_gpu,
            uses_transformer_engine,
        )
        from megagrpo.mesh import RunStopped

    folder = config.run_folder
    name = environment.get(environment.REPORTS, name)
    rank = environment.get_int("RANK", 0)
    status = 0
    # A final one stays until the launcher, which looks every two seconds, has seen it: torchrun restarts
    # ranks sooner.
    folder.error_report(name, rank, final=False).unlink(missing_ok=True)
    try:
        with lasting_imports():
            device = prepare_host(
                config.actor.device,
                uses_transformer_engine(config.actor),
                config.rollout.deterministic,
            )
        if trains:
            refuse_training_without_gpu(config.actor, device)
        body(device)
    except Exception as exc:
        traceback.print_exc()
        final = isinstance(exc, ValueError | AssertionError | RunStopped)
        # then the launcher may end it
        write_whole(folder.error_report(name, rank, final), _reason(exc))
        status = 1
    # The rank's work is on disk. Python's normal exit destroys process groups whose threads still
    # run, which sometimes aborts ("terminate called without an active exception"); torchrun would
    # then report a finished run as failed. It also waits for threads, such as those of a tracker that
    # does not answer. torchrun waits until a forked rank has returned, which then ends as the others.
    if environment.under_torchrun():
        sys.stdout.flush()
        sys.stderr.flush()
        if status or parent_process() is None:
            os._exit(status)
        Finalize(None, os._exit, [status], exitpriority=sys.maxsize)
    return status


def _reason(exc: Exception) -> str:
    """Returns the message for the user: our own errors are complete, others get their type and
    location."""
    if isinstance(exc, (ValueError, RuntimeError)) and str(exc):
        return str(exc)
    frame = traceback.extract_tb(exc.__traceback__)[-1]
    return f"{type(exc).__name__}: {exc} ({frame.filename}:{frame.lineno} in {frame.name})"
