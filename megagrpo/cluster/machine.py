"""A run on one machine: the rollout service and the trainers as child processes, or the ranks of another collective command."""

import fcntl
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megagrpo import environment
from megagrpo.cluster.supervise import (
    Ended,
    Signals,
    end_all,
    first_report,
    ignore_signals,
    start,
    stopped,
    torchrun,
    watch,
)
from megagrpo.config.load import dump_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.run_folder import RunFolder
from megagrpo.stop_request import STOP_FILE, StopRequest

_POLL_S = 0.2
_DEAD_LOCK_S = 150.0  # how long a file server keeps the lock of a node that died, whose job is started again elsewhere
_SERVICE_GRACE_S = 30.0  # engines, Ray and the router end in order


def run(config: ExperimentConfig) -> int:
    """`megagrpo run`: serve + torchrun on this machine. Returns the trainers' exit status; leaves no process behind.

    USR1: save after the present step and return STOPPED. TERM, INT, USR2: end at once.
    Raises ValueError, before anything starts, with every problem that can be known by then.
    """
    from megagrpo.explain import preflight  # transformers: seconds in which nodes.py could not be told to stop

    problems = preflight(config)
    if problems:
        raise ValueError("this experiment cannot run:\n  " + "\n  ".join(problems))
    unmade = [path for path in _inputs(config) if not Path(path).exists()]
    if unmade:  # preflight lets pass what this experiment itself makes
        raise ValueError(
            f"not there yet: {', '.join(unmade)}; first `megagrpo prepare`"
            + (", then `megagrpo sft`" if config.sft else "")
        )
    devices = _devices(config, _visible_gpus())
    with alone_in(Path(config.output_dir)):
        return _serve_and_train(config, *devices)


@contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Inside, no other trains into this run folder. ValueError where one does."""
    run_dir.mkdir(parents=True, exist_ok=True)
    patience_s = _DEAD_LOCK_S if environment.get_int("SLURM_RESTART_COUNT", 0) else 0.0
    with (run_dir / ".lock").open("w") as file:
        try:
            _lock(file, patience_s)
        except BlockingIOError:
            raise ValueError(
                f"output_dir {run_dir}: another run trains into this folder; wait for its end or name another"
            ) from None
        except OSError as exc:  # some cluster file systems are mounted without locks
            print(f"megagrpo: {run_dir} cannot be locked ({exc.strerror}): start no second run there", file=sys.stderr)
        yield


def _lock(file: IO, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


def _serve_and_train(config: ExperimentConfig, of_trainers: dict[str, str], of_engines: dict[str, str]) -> int:
    run_dir = Path(config.output_dir)
    resolved = write_resolved(config, run_dir)
    RunFolder(run_dir).service.unlink(missing_ok=True)  # a killed run's URL would mislead the trainers
    logs = run_dir / "logs"
    stop_file = logs / "trainer.stop_request"
    children: list[subprocess.Popen] = []
    with Signals((signal.SIGTERM, signal.SIGINT, signal.SIGUSR2), (signal.SIGUSR1,), StopRequest(stop_file)) as request:
        try:
            service = start(["serve", str(resolved)], logs / "service.log", children, env=of_engines)
            ranks, env = (
                torchrun(config.actor.world_size, config.actor.max_restarts),
                {STOP_FILE: str(stop_file)} | of_trainers,
            )
            trainers = start(["train", str(resolved)], logs / "trainer.log", children, [*ranks, "--standalone"], env)
            status = watch(trainers, logs / "trainer.log", first_report, service, logs / "service.log")
            return stopped(request) if status == 0 and request.granted() else status
        except Ended as exc:
            print(f"megagrpo run: {exc}; stopping", file=sys.stderr)
            return exc.status
        finally:
            ignore_signals()
            end_all(children, _SERVICE_GRACE_S)


def _visible_gpus() -> list[str]:
    import torch

    named = environment.get("CUDA_VISIBLE_DEVICES")
    return (
        [name for name in named.split(",") if name]
        if named is not None
        else [str(i) for i in range(torch.cuda.device_count())]
    )


def _devices(config: ExperimentConfig, visible: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Environment of the trainers and of the service: GPUs of their own. Empty where there are none.

    Raises ValueError when there are too few; weights over `disk` may share them, NCCL refuses two ranks on one.
    """
    ranks, engine_ranks = config.actor.world_size, config.rollout.num_engines * config.rollout.tp
    if not visible or (len(visible) < ranks + engine_ranks and config.weights.transport == "disk"):
        return {}, {}
    if len(visible) < ranks + engine_ranks:
        raise ValueError(
            f"{len(visible)} GPU(s) are visible, but {ranks} trainer ranks (actor.world_size) and {engine_ranks} engine ranks "
            "(rollout.num_engines x tp) need one each; lower them, or let them share GPUs with weights.transport: disk"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[:ranks])}, {"CUDA_VISIBLE_DEVICES": ",".join(visible[ranks:])}


def train_ranks(config: ExperimentConfig, command: list[str]) -> int:
    """Run a collective subcommand (sft, export) as `actor.world_size` ranks of this machine; returns its exit status.

    ValueError when it has GPUs, but fewer than ranks.
    """
    run_dir, ranks, gpus = Path(config.output_dir), config.actor.world_size, len(_visible_gpus())
    if 0 < gpus < ranks:
        raise ValueError(
            f"`megagrpo {command[0]}` runs on one machine: {gpus} GPU(s) are visible for {ranks} ranks (actor.world_size). Over several "
            f"nodes start `torchrun --nnodes N --nproc-per-node {gpus} ... -m megagrpo.cli {' '.join(command[:1])} ...` on each of them"
        )
    resolved = write_resolved(config, run_dir)
    children: list[subprocess.Popen] = []
    with Signals((signal.SIGTERM, signal.SIGINT)):
        try:
            name, *rest = command
            log = run_dir / "logs" / f"{name}.log"
            ranks = [*torchrun(config.actor.world_size), "--standalone"]
            return watch(start([name, str(resolved), *rest], log, children, ranks), log, first_report)
        except Ended as exc:
            print(f"megagrpo {command[0]}: {exc}; stopping", file=sys.stderr)
            return exc.status
        finally:
            ignore_signals()
            end_all(children)


def _inputs(config: ExperimentConfig) -> list[str]:
    return [config.model.path, config.data.path, *([config.eval.data.path] if config.eval else [])]


def write_resolved(config: ExperimentConfig, run_dir: Path) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "config.yaml"
    dump_config(config, path)
    return path
