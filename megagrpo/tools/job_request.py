"""A request to Slurm for the nodes of an experiment, completed or refused."""

from dataclasses import dataclass, replace

from megagrpo.check.rules.placement import place
from megagrpo.check.rules.subject import Nodes
from megagrpo.config.schema import ExperimentConfig

SCRIPTS = {  # by kind
    "one-job": "one_job.sbatch",
    "het": "het_job.sbatch",
    "one-node": "one_node.sbatch",
    "colocated": "colocated.sbatch",
}
_NO_LIMIT = ("0", "UNLIMITED", "INFINITE")


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
    if (kind in ("one-job", "het") and not rollout) or (kind == "one-node" and trainers > 1):
        raise ValueError(
            f"--kind {kind} does not go with {trainers} nodes of trainers and {rollout} of engines: "
            "omit it, or name other --trainer-nodes and --rollout-nodes"
        )
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
    time = request.time
    if time is not None and time.upper() not in _NO_LIMIT and seconds(time) <= request.grace_s:
        problems.append(
            f"--time {time} is {seconds(time)} s, not more than "
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
