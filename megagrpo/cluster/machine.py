"""Runs an experiment on one machine: the rollout service and the trainers, or the ranks of another
command."""

import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from megagrpo.check.rules.placement import engine_ranks, occupied_gpus, place
from megagrpo.check.rules.subject import Nodes
from megagrpo.cluster.supervise import ALONE, Child, Launch, torchrun
from megagrpo.config.load import dump_config
from megagrpo.config.schema import OF_TRAINING, ExperimentConfig
from megagrpo.rollout.service.addresses import interface_of, own_address
from megagrpo.rollout.service.engine_command import on_gpus
from megagrpo.system import environment
from megagrpo.system.errors import translated
from megagrpo.system.run_folder import RunFolder

ENDING = (signal.SIGTERM, signal.SIGINT)
_POLL_S = 0.2
# a file server may hold the lock of a dead node; Slurm restarts its job elsewhere
_DEAD_LOCK_S = 150.0
_SERVICE_GRACE_S = 30.0  # for engines and Ray to end in order


@dataclass(frozen=True)
class Launcher:
    """The process that trains into a run folder, as the lock of the folder records it."""

    host: str
    pid: int
    job: str  # of Slurm; "" outside one


def run(config: ExperimentConfig) -> int:
    """Serves and trains on this machine: `megagrpo run`. Returns the trainers' exit status; no
    process remains.

    USR1, or the first INT: save after the current step and return STOPPED. TERM, USR2, a second
    INT: end at once. Raises ValueError before anything starts, with all known problems.
    """
    if is_finished(config):
        return 0
    launch = Launch(
        config.run_folder,
        "run",
        end=(signal.SIGTERM, signal.SIGUSR2),
        ask=(signal.SIGUSR1, signal.SIGINT),
        grace_s=_SERVICE_GRACE_S,
    )
    command = ["train", str(config.run_folder.config)]
    return _beside_service(launch, config, command, config.actor.max_restarts)


def refuse_what_cannot_run(config: ExperimentConfig, nodes: Nodes) -> None:
    """Raises ValueError with everything that is known to fail on these nodes."""
    # its import takes seconds, during which signals would be missed
    from megagrpo.check.problems import (
        preflight,
    )

    if problems := preflight(config, nodes):
        raise ValueError("this experiment cannot run:\n  " + "\n  ".join(problems))
    # preflight accepts a model that this experiment itself makes
    if not Path(config.model.path).exists():
        raise ValueError(f"missing: {config.model.path}; run `megagrpo sft` first")


def is_finished(config: ExperimentConfig) -> bool:
    """Returns whether nothing is left to do, and then says so."""
    from megagrpo.check.problems import finished

    if said := finished(config):
        print(f"{config.name}: {said}")
    return bool(said)


@contextmanager
def alone_in(folder: RunFolder) -> Iterator[None]:
    """Locks the run folder inside the block, and says there where the launcher runs. Raises
    ValueError if another run trains into it."""
    with translated(f"output_dir {folder.path} cannot be written", OSError):
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = folder.lock.open("a")
    patience_s = _DEAD_LOCK_S if environment.get_int("SLURM_RESTART_COUNT", 0) else 0.0
    deadline = time.monotonic() + patience_s
    with lock as file:
        while not _locked(file):
            if time.monotonic() > deadline:
                remedy = "wait for its end or name another"
                raise ValueError(
                    f"output_dir {folder.path}: another run trains into this folder; {remedy}"
                )
            time.sleep(_POLL_S)
        file.truncate(0)
        own = Launcher(socket.gethostname(), os.getpid(), environment.get("SLURM_JOB_ID", ""))
        file.write(json.dumps(asdict(own)))
        file.flush()
        yield


def _locked(file: IO) -> bool:
    """Locks a file, on a file system that can; returns whether no other process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:  # some cluster file systems have no locks
        folder = Path(file.name).parent
        print(
            f"megagrpo: {folder} cannot be locked ({exc.strerror}): start no second run there",
            file=sys.stderr,
        )
    return True


def ranks_beside_service(config: ExperimentConfig, words: list[str]) -> int:
    """Runs `bisect` as `actor.world_size` ranks with its own engines, all on this machine.
    words: its options.

    Returns its exit status; no process remains. Raises ValueError before anything starts, with all
    known problems.
    """
    launch = Launch(
        config.run_folder, "bisect", end=ENDING, ranks="bisect", grace_s=_SERVICE_GRACE_S
    )
    return _beside_service(launch, config, ["bisect", str(config.run_folder.config), *words], 0)


def _beside_service(
    launch: Launch, config: ExperimentConfig, command: list[str], max_restarts: int
) -> int:
    """Starts the service and the ranks of a subcommand, and waits for the ranks."""
    visible = visible_gpus()
    refuse_what_cannot_run(config, _this_node(config, visible))
    trainer_env, service_env = _devices(config, visible)
    folder = config.run_folder
    with alone_in(folder), launch:
        service = start_service(launch, config, service_env)
        options = [*torchrun(config.actor.world_size, max_restarts), *ALONE]
        on_gpus = occupied_gpus(config) if trainer_env else 0
        env = trainer_variables(config, on_gpus, interface_of_engines(config)) | trainer_env
        ranks = launch.start_ranks(command, options, env)
        said = f"the rollout service and {config.actor.world_size} trainer ranks start"
        print(f"{config.name}: {said}; {service.log} and {ranks.log}", flush=True)
        launch.status = launch.watch(ranks, service)
    return launch.status


def write_experiment(config: ExperimentConfig) -> None:
    """Writes the experiment into its run folder, and removes the address of a killed run's
    service: the trainers would use it."""
    folder = config.run_folder
    dump_config(config, folder.config)
    folder.service.unlink(missing_ok=True)
    folder.service_progress.unlink(missing_ok=True)


def start_service(launch: Launch, config: ExperimentConfig, env: dict[str, str]) -> Child:
    """Writes the experiment into the run folder and starts its service."""
    folder = config.run_folder
    write_experiment(config)
    return launch.start(["serve", str(folder.config)], "service", env)


def with_one_engine(
    config: ExperimentConfig, folder: RunFolder, changes: dict[str, object]
) -> ExperimentConfig:
    """Returns the experiment with one engine of its own in a run folder of its own. changes: of
    section `rollout`."""
    alone: dict[str, object] = {
        "num_engines": 1,
        "min_healthy_engines": 1,
        "colocate": False,
    }
    rollout = config.rollout.model_copy(update=alone | changes)
    return config.model_copy(
        update={
            "output_dir": str(folder.path),
            "rollout": rollout,
            "weights": config.weights.suited(colocate=False),
            "checkpoint": config.checkpoint.model_copy(update={"dir": None}),  # the run's own
            "teachers": {},
            "algorithm": config.algorithm.model_copy(update={"distillation": None, "streams": []}),
            "data": config.data.model_copy(update=dict.fromkeys(OF_TRAINING)),
        }
    )


def visible_gpus() -> list[str]:
    """Returns the numbers or names of the GPUs that this process may use."""
    import torch  # takes seconds

    named = environment.get("CUDA_VISIBLE_DEVICES")
    return (
        list(map(str, range(torch.cuda.device_count())))
        if named is None
        else list(filter(None, named.split(",")))
    )


def _devices(config: ExperimentConfig, visible: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the environments of the trainers and of the service: disjoint GPUs, or the same with
    `rollout.colocate`.

    Both are empty on a CPU, and where transport `disk` lets them share too few GPUs: NCCL rejects
    two ranks on one. Raises ValueError if there are too few.
    """
    nodes = _this_node(config, visible)
    if nodes.gpus != len(visible):
        return {}, {}
    found = place(config, nodes)
    engines = [visible[gpu.number] for engine in found.engines for gpu in engine]
    trainers = [visible[gpu.number] for gpu in found.trainers]

    def only(gpus: list[str]) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}

    return only(trainers), only(engines)


def _this_node(config: ExperimentConfig, visible: list[str]) -> Nodes:
    """Returns this machine as the only node. Raises ValueError for engines that need GPUs if there
    are none."""
    weights = config.weights
    ranks = config.actor.world_size + engine_ranks(config)
    if not on_gpus(config, len(visible)):
        return Nodes(ranks, 1, 0)
    may_share = not (weights.uses_groups or weights.needs_colocation)
    return Nodes(max(len(visible), ranks) if may_share else len(visible), 1, 0)


def train_ranks(config: ExperimentConfig, name: str, words: list[str]) -> int:
    """Runs a collective subcommand (sft, export) as `actor.world_size` ranks on this machine;
    returns its exit status. words: its arguments, with the experiment.

    It does not write config.yaml, from which a run in the same folder restarts its ranks. Raises
    ValueError if the machine has GPUs, but fewer than ranks.
    """
    ranks = config.actor.world_size
    gpus = 0 if config.actor.device == "cpu" else len(visible_gpus())
    if 0 < gpus < ranks:
        lacking = f"{gpus} GPU(s) are visible for {ranks} ranks (actor.world_size)"
        remedy = f"`torchrun --nnodes N --nproc-per-node {gpus} ... -m megagrpo.cli {name} ...`"
        raise ValueError(
            f"`megagrpo {name}` runs on one machine: {lacking}. Over several nodes start {remedy} on each"
        )
    folder = config.run_folder
    with Launch(folder, name, end=ENDING, ranks=name) as launch:
        env = trainer_variables(config, ranks if gpus else 0)
        started = launch.start_ranks([name, *words], [*torchrun(ranks), *ALONE], env)
        launch.status = launch.watch(started)
    return launch.status


def trainer_variables(
    config: ExperimentConfig, on_gpus: int, interface: str | None = None
) -> dict[str, str]:
    """Returns the variables of this actor's ranks, in addition to those of every process (Launch)
    and of the user.

    on_gpus: processes with a GPU each among which this machine's cores are divided; 0 for ranks on
    a CPU.
    interface: the one towards other ranks and engines. docs/evidence/gpu.md lists the environment
    of every process.
    """
    if config.actor.device == "cpu":
        return {}
    parallel = config.actor.parallel
    variables = environment.nccl_variables(
        config.weights.connect_timeout_s
    ) | environment.trainer_rank_variables(
        cut=parallel.tp > 1 or parallel.cp > 1,
        beside_engines=config.rollout.colocate,
        deterministic=config.rollout.deterministic,
    )
    if on_gpus:  # statistics and advantages are computed on the host
        threads = max(1, len(os.sched_getaffinity(0)) // on_gpus)
        variables["OMP_NUM_THREADS"] = environment.get("OMP_NUM_THREADS", str(threads))
    chosen = environment.get("NCCL_SOCKET_IFNAME") or interface
    return variables | ({"NCCL_SOCKET_IFNAME": chosen} if chosen else {})


def interface_of_engines(config: ExperimentConfig) -> str | None:
    """Returns the interface for engines on this machine; None if rollout.host is not an address of
    it."""
    with suppress(ValueError):  # an address of the rollout's machines
        return interface_of(own_address(config.rollout.host))
    return None
