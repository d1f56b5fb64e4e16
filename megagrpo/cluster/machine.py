"""Runs an experiment on one machine: rollout service and trainers, or another command's ranks."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from megagrpo.check.rules.placement import place
from megagrpo.check.rules.subject import Nodes
from megagrpo.cluster.lock import alone_in
from megagrpo.cluster.supervise import ALONE, Child, Launch, torchrun
from megagrpo.config.fields import refuse
from megagrpo.config.load import dump_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.service.addresses import interface_of, own_address
from megagrpo.rollout.service.engine_command import on_gpus
from megagrpo.system import environment
from megagrpo.system.environment import visible_gpus

ENDING = (signal.SIGTERM, signal.SIGINT)
_SERVICE_GRACE_S = 30.0  # for engines to shut down in order


def run(config: ExperimentConfig) -> int:
    """Serves and trains on this machine: `megagrpo run`. Returns the trainers' exit status; no
    process remains.

    USR1, or the first INT: saves after the current step and returns STOPPED. TERM, USR2, a second
    INT, or an INT before the first step: ends at once. In a Slurm job the first TERM asks, too,
    because Slurm pre-empts by it. Raises ValueError before anything starts, with all known
    problems.
    """
    if is_finished(config):
        return 0
    end, ask = [signal.SIGUSR2], [signal.SIGUSR1, signal.SIGINT]
    in_job = environment.get("SLURM_JOB_ID") is not None
    (ask if in_job else end).append(signal.SIGTERM)
    launch = Launch(config.run_folder, "run", end=end, ask=ask, grace_s=_SERVICE_GRACE_S)
    return _beside_service(
        launch, config, ["train", str(config.run_folder.config)], config.actor.max_restarts
    )


def refuse_what_cannot_run(config: ExperimentConfig, nodes: Nodes) -> None:
    """Raises ValueError with everything that is known to fail on these nodes."""
    # the import takes seconds, during which signals would be missed
    from megagrpo.check.problems import preflight

    refuse("this experiment cannot run", preflight(config, nodes))
    # preflight accepts a model that `megagrpo sft` makes in this experiment
    if not Path(config.model.path).exists():
        raise ValueError(f"missing: {config.model.path}; run `megagrpo sft` first")


def is_finished(config: ExperimentConfig) -> bool:
    """Returns whether nothing is left to do, and prints why."""
    from megagrpo.check.problems import finished

    if reason := finished(config):
        print(f"{config.name}: {reason}")
    return bool(reason)


def ranks_beside_service(config: ExperimentConfig, words: list[str]) -> int:
    """Runs `bisect` as `actor.world_size` ranks with its own engines, all on this machine.

    words: the command's options. Returns the exit status; no process remains. Raises ValueError
    before anything starts, with all known problems.
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
        options = [*torchrun(config.actor.world_size, max_restarts, forks=not visible), *ALONE]
        sharing = config.num_gpus if trainer_env else 0
        variables = trainer_variables(config, sharing, interface_of_engines(config))
        ranks = launch.start_ranks(command, options, variables | trainer_env)
        print(
            f"{config.name}: the rollout service and {config.actor.world_size} trainer ranks start; "
            f"{service.log} and {ranks.log}",
            flush=True,
        )
        launch.status = launch.watch(ranks, service)
    return launch.status


def write_experiment(config: ExperimentConfig) -> None:
    """Writes the experiment into the run folder, and removes the address of a killed run's service,
    which the trainers would use."""
    folder = config.run_folder
    dump_config(config, folder.config)
    folder.service.unlink(missing_ok=True)
    folder.service_progress.unlink(missing_ok=True)


def own_copy(config: ExperimentConfig, name: str) -> str:
    """Writes the experiment for the children of one command, and returns the path.

    They read it again when they restart. Until then a user may edit the file that the launcher read,
    or a run in the same folder may write another config.yaml.
    """
    path = config.run_folder.logs / f"{name}.yaml"
    dump_config(config, path)
    return str(path)


def start_service(launch: Launch, config: ExperimentConfig, env: dict[str, str]) -> Child:
    """Writes the experiment into the run folder and starts its service."""
    folder = config.run_folder
    write_experiment(config)
    return launch.start(["serve", str(folder.config)], "service", env)


def trainer_gpus(config: ExperimentConfig) -> list[str]:
    """Returns visible_gpus, [] for trainers on a CPU."""
    if config.actor.device == "cpu":
        return []
    return visible_gpus()


def _devices(config: ExperimentConfig, visible: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the environments of the trainers and of the service: disjoint GPUs, or the same with
    `rollout.colocate`.

    On a CPU the service sees none. Both are empty if transport `disk` lets them share too few GPUs.
    (NCCL rejects two ranks on one.) Raises ValueError if there are too few.
    """

    def only(gpus: list[str]) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}

    nodes = _this_node(config, visible)
    if not visible:
        return {}, only([])
    if nodes.gpus != len(visible):
        return {}, {}
    placement = place(config, nodes)
    engines = [visible[gpu.number] for engine in placement.engines for gpu in engine]
    return only([visible[gpu.number] for gpu in placement.trainers]), only(engines)


def _this_node(config: ExperimentConfig, visible: list[str]) -> Nodes:
    """Returns this machine as the only node. Raises ValueError for engines that need GPUs if there
    are none."""
    weights, gpus = config.weights, len(visible)
    ranks = config.actor.world_size + config.engine_ranks
    if not on_gpus(config, gpus):
        gpus = ranks
    elif not (weights.uses_groups or weights.needs_colocation):  # they may share GPUs
        gpus = max(gpus, ranks)
    return Nodes(gpus, 1, 0)


def trainer_variables(
    config: ExperimentConfig, sharing: int, interface: str | None = None
) -> dict[str, str]:
    """Returns the variables of this actor's ranks, besides those of every process (Launch) and the
    user's.

    sharing: processes with a GPU each that share this machine's cores; 0 for ranks on a CPU.
    interface: towards other ranks and engines. docs/evidence/gpu.md lists the environment of every
    process.
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
    if sharing:  # statistics and advantages are computed on the host
        threads = len(os.sched_getaffinity(0)) // sharing or 1
        variables |= environment.unless_set(OMP_NUM_THREADS=str(threads))
    if interface:
        variables |= environment.nccl_interface(interface)
    return variables


def interface_of_engines(config: ExperimentConfig) -> str | None:
    """Returns this machine's interface for engines; None if rollout.host is another machine's
    address."""
    with suppress(ValueError):
        return interface_of(own_address(config.rollout.host))
    return None
