"""Submits an experiment as a Slurm job: checks it, then calls sbatch with a slurm/*.sbatch."""

import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import megagrpo
from megagrpo.check.problems import preflight
from megagrpo.check.rules.placement import needs_gpus, place
from megagrpo.check.rules.subject import Nodes
from megagrpo.config.schema import ExperimentConfig
from megagrpo.system import environment
from megagrpo.system.run_folder import RunFolder

SCRIPTS = {  # by kind
    "one-job": "one_job.sbatch",
    "het": "het_job.sbatch",
    "one-node": "one_node.sbatch",
    "colocated": "colocated.sbatch",
}


@dataclass(frozen=True)
class Request:
    """A request to Slurm. None: Slurm's default."""

    kind: str | None = None  # a key of SCRIPTS; None: as the experiment needs, also for the nodes
    trainer_nodes: int | None = None
    rollout_nodes: int | None = None
    # None: cluster.gpus_per_node, if the experiment needs GPUs; 0: none requested
    gpus_per_node: int | None = None
    time: str | None = None
    partition: str | None = None
    # seconds before the time limit or pre-emption, for the rest of a step and a checkpoint
    grace_s: int = 300
    options: tuple[str, ...] = ()  # further options of sbatch, for every node
    srun_options: tuple[str, ...] = ()  # further options of srun, such as --container-image=...


def submit(config: ExperimentConfig, experiment: list[str], request: Request, dry_run: bool) -> int:
    """Submits `experiment` (file and overrides for the job's command line); returns sbatch's exit
    status.

    `dry_run` prints the script and the command instead. Raises ValueError with all problems.
    """
    problems = misfits(config, request) + preflight(config, nodes_of(request))
    fitting = import_module("megagrpo.tools.plan.fitting")  # beside the core, which knows its name
    problems += fitting.fit_problems(config, request.gpus_per_node)
    scripts = Path(megagrpo.__file__).parent.parent / "slurm"
    if not scripts.is_dir():
        problems.append(
            f"{scripts} is missing: submit from a checkout of the repository, not an installed package"
        )
    if not dry_run and shutil.which("sbatch") is None:
        problems.append("sbatch is not on the PATH: submit from a login node, or use --dry-run")
    if not dry_run and needs_gpus(config) and find_spec("sgl_kernel") is None:
        problems.append(
            f"{sys.prefix} is an installation for CPUs: MEGAGRPO_KIND=gpu bash launch/install.sh"
        )
    if problems:
        raise ValueError("this job cannot run:\n  " + "\n  ".join(problems))
    request = completed(config, request)
    assert request.kind is not None, "completed"
    script = scripts / SCRIPTS[request.kind]
    command = sbatch_command(config, experiment, request, script)
    variables = job_variables(request, script)
    if dry_run:
        words = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        print(f"{script.read_text()}\n# {words} {shlex.join(command)}")
        return 0
    config.run_folder.logs.mkdir(parents=True, exist_ok=True)  # Slurm does not create it
    return subprocess.run(command, env=environment.child_environment(variables)).returncode


def nodes_of(request: Request) -> Nodes:
    """Returns the nodes that a request names."""
    if request.kind == "one-node":
        return Nodes(request.gpus_per_node, request.trainer_nodes or 1, request.rollout_nodes or 0)
    return Nodes(request.gpus_per_node, request.trainer_nodes, request.rollout_nodes)


def completed(config: ExperimentConfig, request: Request) -> Request:
    """Returns the request with its kind and numbers of nodes. Raises ValueError if the ranks do not
    fit."""
    placement = place(config, nodes_of(request))
    trainers, rollout = placement.trainer_nodes, placement.rollout_nodes
    kind = request.kind
    if kind is None:
        kind = "one-node"
        if config.rollout.colocate and trainers > 1:
            kind = "colocated"
        elif rollout:
            kind = "one-job"
    return replace(request, kind=kind, trainer_nodes=trainers, rollout_nodes=rollout)


def misfits(config: ExperimentConfig, request: Request) -> list[str]:
    """Returns the contradictions in a request, and a time limit at which the job stops as soon as it
    starts."""
    together = {
        "one-node": "trainers and engines share one node",
        "colocated": "engines share the trainers' nodes",
    }
    problems = []
    if request.kind in together and request.rollout_nodes:
        problems.append(f"--kind {request.kind}: {together[request.kind]}; omit --rollout-nodes")
    if config.rollout.colocate and request.kind in ("one-job", "het"):
        problems.append(
            f"--kind {request.kind} is for engines on nodes of their own; "
            "rollout.colocate wants colocated"
        )
    if request.kind == "colocated" and not config.rollout.colocate:
        problems.append("--kind colocated wants rollout.colocate: true")
    if request.time is not None and seconds(request.time) <= request.grace_s:
        problems.append(
            f"--time {request.time} is {seconds(request.time)} s, not more than "
            f"--grace-s {request.grace_s}, at which the job stops"
        )
    return problems


def seconds(limit: str) -> int:
    """Returns the seconds of an sbatch time limit: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. Raises
    ValueError otherwise."""
    days, dash, clock = limit.rpartition("-")
    parts = clock.split(":")
    if (dash and not days.isdecimal()) or not all(map(str.isdecimal, parts)) or len(parts) > 3:
        raise ValueError(f"--time {limit}: should be like 30 (minutes), 4:00:00 or 1-12:00:00")
    units = [3600, 60, 1]
    if not dash and len(parts) < 3:
        units.remove(3600)
    return 86_400 * int(days or 0) + sum(
        int(part) * unit for part, unit in zip(parts, units, strict=False)
    )


def job_variables(request: Request, script: Path) -> dict[str, str]:
    """Returns the variables that the job's script reads from sbatch's environment.

    Names in --export would make Slurm load the login environment instead, and hold the job if it
    cannot.
    """
    variables = {
        "MEGAGRPO_ROOT": str(script.parent.parent),
        "MEGAGRPO_VENV": sys.prefix,
        "TRAINER_NODES": str(request.trainer_nodes),
    }
    if request.srun_options:
        variables["MEGAGRPO_SRUN"] = shlex.join(request.srun_options)
    return variables


def sbatch_command(
    config: ExperimentConfig, experiment: list[str], request: Request, script: Path
) -> list[str]:
    """Returns the command line of sbatch.

    A second job of a run folder waits until the first one ends, then resumes from its checkpoint.
    """
    folder = RunFolder(config.run_folder.path.absolute())
    name = f"{config.name}@{folder.path}"
    once = [
        "--parsable",
        f"--job-name={name}",
        "--dependency=singleton",
        f"--signal=B:USR1@{request.grace_s}",
        f"--output={folder.log('slurm-%j').with_suffix('.out')}",
        "--export=ALL",
    ]
    gpus = request.gpus_per_node
    # steps get what the job names, although its nodes are exclusive
    if gpus is None and needs_gpus(config):
        gpus = config.cluster.gpus_per_node
    limits = {"time": request.time, "partition": request.partition, "gpus-per-node": gpus}
    every = [
        *(f"--{option}={value}" for option, value in limits.items() if value),
        *request.options,
    ]
    match request.kind:
        case "one-job" | "colocated":
            nodes = [
                f"--nodes={(request.trainer_nodes or 0) + (request.rollout_nodes or 0)}",
                *every,
            ]
        case "het":
            # under the first component's name it would wait for that component for ever
            second = [f"--job-name={name}/rollout", f"--nodes={request.rollout_nodes}"]
            nodes = [f"--nodes={request.trainer_nodes}", *every, ":", *second, *every]
        case _:
            nodes = every
    return ["sbatch", *once, *nodes, str(script), *experiment]
