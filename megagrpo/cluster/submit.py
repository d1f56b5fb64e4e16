"""Submits an experiment as a Slurm job: checks that it fits, then calls sbatch with one of slurm/*.sbatch."""

import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import megagrpo
from megagrpo.check.problems import preflight
from megagrpo.config.schema import ExperimentConfig, RolloutConfig
from megagrpo.rollout.service.addresses import LOOPBACK
from megagrpo.system import environment
from megagrpo.system.run_folder import RunFolder

SCRIPTS = {"one-job": "one_job.sbatch", "het": "het_job.sbatch", "one-node": "one_node.sbatch"}


@dataclass(frozen=True)
class Request:
    """The request to Slurm. None: Slurm's default."""

    kind: str  # a key of SCRIPTS
    trainer_nodes: int = 1
    rollout_nodes: int = 1
    gpus_per_node: int | None = None
    time: str | None = None
    partition: str | None = None
    grace_s: int = 300  # before the time limit or pre-emption: for the rest of a step and a checkpoint
    options: tuple[str, ...] = ()  # further options of sbatch, for every node


def submit(config: ExperimentConfig, experiment: list[str], request: Request, dry_run: bool) -> int:
    """Submits `experiment` (file and overrides for the job's command line); returns sbatch's exit status.

    `dry_run` prints the script and the command instead. Raises ValueError with all problems.
    """
    problems = misfits(config, request) + preflight(config)
    script = Path(megagrpo.__file__).parent.parent / "slurm" / SCRIPTS[request.kind]
    if not script.is_file():
        problems.append(f"{script} is missing: submit from a checkout of the repository, not from an installed package")
    if not dry_run and shutil.which("sbatch") is None:
        problems.append("sbatch is not on the PATH: submit from a login node, or use --dry-run")
    if problems:
        raise ValueError("this job cannot run:\n  " + "\n  ".join(problems))
    command = sbatch_command(config, experiment, request, script)
    if dry_run:
        print(f"{script.read_text()}\n# {shlex.join(command)}")
        return 0
    RunFolder(Path(config.output_dir)).logs.mkdir(parents=True, exist_ok=True)  # Slurm does not create it
    return subprocess.run(command, env=environment.child_environment()).returncode


def misfits(config: ExperimentConfig, request: Request) -> list[str]:
    """Returns why this experiment does not fit on these nodes, each reason with a remedy."""
    problems, gpus, ranks = _time_misfits(request), request.gpus_per_node, config.actor.world_size
    if request.kind != "one-node":
        if config.rollout.colocate:
            return ["rollout.colocate works on one node so far; submit with --kind one-node"]
        return problems + _trainer_misfits(ranks, request) + _rollout_misfits(config.rollout, request)
    if (request.trainer_nodes, request.rollout_nodes) != (1, 1):
        problems.append("one-node: omit --trainer-nodes and --rollout-nodes, or choose another --kind")
    engine_ranks = config.rollout.num_engines * config.rollout.tp
    needed = max(ranks, engine_ranks) if config.rollout.colocate else ranks + engine_ranks
    if gpus and needed > gpus:
        both = f"{ranks} trainer ranks and {engine_ranks} engine ranks"
        problems.append(f"one-node: {both} need {needed} GPUs, not {gpus}")
    return problems


def _time_misfits(request: Request) -> list[str]:
    """Rejects a job that must stop as soon as it starts: it would be requeued for ever."""
    if request.time is None or (limit := seconds(request.time)) > request.grace_s:
        return []
    return [f"--time {request.time} is {limit} s, not more than --grace-s {request.grace_s}, at which the job stops"]


def seconds(limit: str) -> int:
    """Returns the seconds of an sbatch time limit: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. Raises ValueError otherwise."""
    days, dash, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in ([*parts, days] if dash else parts)) or len(parts) > 3:
        raise ValueError(f"--time {limit}: should be like 30 (minutes), 4:00:00 or 1-12:00:00")
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86_400 * int(days or 0) + sum(int(part) * unit for part, unit in zip(parts, units, strict=False))


def _trainer_misfits(world_size: int, request: Request) -> list[str]:
    nodes, gpus = request.trainer_nodes, request.gpus_per_node or world_size
    fitting = [n for n in range(1, world_size + 1) if world_size % n == 0 and world_size // n <= gpus]
    if nodes in fitting:
        return []
    divide = nodes > 0 and world_size % nodes == 0
    ranks = f"{world_size // nodes} ranks a node on {gpus} GPUs" if divide else "they do not divide"
    possible = ", ".join(map(str, fitting))
    return [f"--trainer-nodes {nodes}: actor.world_size is {world_size}, {ranks}; it may be {possible}"]


def _rollout_misfits(rollout: RolloutConfig, request: Request) -> list[str]:
    nodes, gpus, ranks = request.rollout_nodes, request.gpus_per_node, rollout.tp // rollout.nodes_per_engine
    parts = rollout.num_engines * rollout.nodes_per_engine
    on_a_node = gpus // ranks if gpus else parts
    problems = []
    if on_a_node == 0:
        problems.append(f"an engine has {ranks} ranks a node, but a node {gpus} GPUs: raise rollout.nodes_per_engine")
    elif not (least := max(rollout.nodes_per_engine, -(-parts // on_a_node))) <= nodes <= parts:
        engines = f"{rollout.num_engines} engine(s) over {rollout.nodes_per_engine} node(s) each"
        problems.append(f"--rollout-nodes {nodes}: {engines}, so it may be {least} to {parts}")
    if rollout.host in LOOPBACK:
        remedy = "name the interface between nodes, as eth0"
        problems.append(f"rollout.host {rollout.host}: trainers on other nodes cannot reach it; {remedy}")
    return problems


def sbatch_command(config: ExperimentConfig, experiment: list[str], request: Request, script: Path) -> list[str]:
    """Returns the command line of sbatch.

    A second job of a run folder waits for the first one's end, then resumes from its checkpoint.
    """
    folder = RunFolder(Path(config.output_dir).absolute())
    name = f"{config.name}@{folder.path}"
    root = f"MEGAGRPO_ROOT={script.parent.parent},MEGAGRPO_VENV={sys.prefix}"
    exported = f"ALL,{root},TRAINER_NODES={request.trainer_nodes}"
    once = ["--parsable", f"--job-name={name}", "--dependency=singleton", f"--signal=B:USR1@{request.grace_s}"]
    once += [f"--output={folder.log('slurm-%j').with_suffix('.out')}", f"--export={exported}"]
    limits = {"time": request.time, "partition": request.partition, "gpus-per-node": request.gpus_per_node}
    every = [*(f"--{option}={value}" for option, value in limits.items() if value), *request.options]
    match request.kind:
        case "one-job":
            nodes = [f"--nodes={request.trainer_nodes + request.rollout_nodes}", *every]
        case "het":
            # another name: the dependency applies to it too, and it would wait for the first component for ever
            second = [f"--job-name={name}/rollout", f"--nodes={request.rollout_nodes}"]
            nodes = [f"--nodes={request.trainer_nodes}", *every, ":", *second, *every]
        case _:
            nodes = every
    return ["sbatch", *once, *nodes, str(script), *experiment]
