"""Where each rank of trainers and engines runs: one answer for check, plan, submit and the
launchers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megagrpo.config.schema import ExperimentConfig

LOOPBACK = ("127.0.0.1", "localhost", "lo")


class Gpu(NamedTuple):
    """A GPU of the cluster; on a CPU, the place of one rank."""

    node: int
    number: int


@dataclass(frozen=True)
class Placement:
    """The GPU of every rank. Trainers have the first nodes; engines share them, or have
    `rollout_nodes` more."""

    gpus_per_node: int
    trainer_nodes: int
    rollout_nodes: int
    trainers: tuple[Gpu, ...]  # by rank
    engines: tuple[tuple[Gpu, ...], ...]  # by engine and rank


@dataclass(frozen=True)
class Nodes:
    """The nodes that there are. None: GPUs as `cluster.gpus_per_node` says, and as few nodes as
    will do."""

    gpus: int | None = None  # of every node
    trainers: int | None = None
    rollout: int | None = (
        None  # nodes beside those, for engines; 0: engines run on the trainers' nodes
    )


def place(config: ExperimentConfig, nodes: Nodes | None = None) -> Placement:
    """Places every rank. Raises ValueError with all of `placement_problems`."""
    if problems := placement_problems(config, nodes):
        raise ValueError("\n".join(problems))
    return _Fit(config, nodes or Nodes()).placement()


def placement_problems(config: ExperimentConfig, nodes: Nodes | None = None) -> list[str]:
    """Returns why the ranks have no place on these nodes, each reason with a remedy."""
    return list(_Fit(config, nodes or Nodes()).problems())


def needs_gpus(config: ExperimentConfig) -> bool:
    """Returns whether the experiment is meant for GPUs; a float32 one on any device may run on a
    CPU."""
    device = config.actor.device
    return device == "cuda" or (
        device == "auto" and "bfloat16" in (config.actor.dtype, config.rollout.dtype)
    )


def occupied_gpus(config: ExperimentConfig) -> int:
    """Counts the GPUs that trainers and engines have, shared ones once."""
    rollout = config.rollout
    return config.actor.world_size + (0 if rollout.colocate else rollout.num_engines * rollout.tp)


class _Fit:
    """The sizes that decide where ranks go. On a CPU a node has room for any number of them."""

    def __init__(self, config: ExperimentConfig, nodes: Nodes):
        rollout = config.rollout
        self.world = config.actor.world_size
        self.engine_ranks = rollout.num_engines * rollout.tp
        self.rollout = rollout
        self.nodes = nodes
        self.part = rollout.tp // rollout.nodes_per_engine  # ranks of an engine on one node
        everything = self.world + self.engine_ranks
        self.gpus = nodes.gpus or (
            config.cluster.gpus_per_node if needs_gpus(config) else everything
        )
        apart = not rollout.colocate and (nodes.trainers or 1) == 1
        small = nodes == Nodes(nodes.gpus) and everything <= self.gpus
        self.one_node = apart and (nodes.rollout == 0 or small)
        self.fitting = [
            n
            for n in range(1, self.world + 1)
            if self.world % n == 0 and self.world // n <= self.gpus
        ]
        self.trainer_nodes = (
            1 if self.one_node else self.fitting[0] if nodes.trainers is None else nodes.trainers
        )

    @property
    def engines_on_a_node(self) -> int:
        """Counts the engines that have a part on each of their nodes."""
        colocated = self.rollout.colocate
        room = self.world // self.trainer_nodes if colocated else self.gpus
        return room // self.part

    @property
    def nodes_filled(self) -> int:
        """Counts the nodes that the engines fill."""
        groups = -(-self.rollout.num_engines // self.engines_on_a_node)
        return self.rollout.nodes_per_engine * groups

    def problems(self) -> Iterator[str]:
        """Yields what has no place."""
        trainers = f"{self.world} trainer ranks (actor.world_size)"
        both = f"{trainers} and {self.engine_ranks} engine ranks (rollout.num_engines x tp)"
        if self.rollout.colocate and self.engine_ranks > self.world:
            yield (
                f"rollout.colocate: {both}: each of these needs a trainer rank beside it; lower "
                "rollout.num_engines"
            )
            return
        if self.one_node:
            if (needed := self.world + self.engine_ranks) > self.gpus:
                yield (
                    f"{both} need {needed} GPUs, and the node has {self.gpus}; lower them, or "
                    "take more nodes"
                )
            return
        if self.trainer_nodes not in self.fitting:
            divides = self.trainer_nodes > 0 and self.world % self.trainer_nodes == 0
            a_node = (
                f"{self.world // self.trainer_nodes} ranks a node on {self.gpus} GPUs"
                if divides
                else ""
            )
            possible = ", ".join(map(str, self.fitting))
            problem = (
                f"actor.world_size is {self.world}, {a_node or 'they do not divide'}; it "
                "may "
                f"be {possible}"
            )
            yield f"{self.trainer_nodes} trainer nodes: {problem}"
            return
        if self.rollout.colocate:
            yield from self._problems_beside()
        else:
            yield from self._problems_apart()
        apart = not self.rollout.colocate or self.trainer_nodes > 1
        if apart and self.rollout.host in LOOPBACK:
            remedy = "name the interface between nodes, as eth0"
            yield (
                f"rollout.host {self.rollout.host}: trainers on other nodes cannot reach it; "
                f"{remedy}"
            )

    def _problems_beside(self) -> Iterator[str]:
        per_node = self.engines_on_a_node
        ranks = self.world // self.trainer_nodes
        engines = f"{self.rollout.num_engines} engine(s) over {self.rollout.nodes_per_engine} node(s) each"
        if per_node == 0:
            yield self._too_large(f"{ranks} trainer ranks")
        elif self.nodes_filled > self.trainer_nodes:
            room = f"{per_node} have room on a node of {ranks} trainers"
            yield (
                f"rollout.colocate: {engines}, but {room}, and there are {self.trainer_nodes}: "
                "lower num_engines"
            )
        if nodes := self.nodes.rollout:
            yield (
                f"{nodes} rollout nodes: under rollout.colocate engines have none of their own; "
                "leave them out"
            )

    def _problems_apart(self) -> Iterator[str]:
        number, over = self.rollout.num_engines, self.rollout.nodes_per_engine
        if self.engines_on_a_node == 0:
            yield self._too_large(f"{self.gpus} GPUs")
        elif (nodes := self.nodes.rollout) is not None:
            least = self.nodes_filled
            most = number * over
            if not least <= nodes <= most:
                engines = f"{number} engine(s) over {over} node(s) each"
                yield f"{nodes} rollout nodes: {engines}, so it may be {least} to {most}"

    def _too_large(self, room: str) -> str:
        return (
            f"an engine has {self.part} ranks a node, but a node {room}: raise "
            "rollout.nodes_per_engine"
        )

    def placement(self) -> Placement:
        """Returns the GPUs of all ranks: trainers in order; engine after engine, each on
        nodes_per_engine nodes."""
        ranks = self.world // self.trainer_nodes
        tp = self.rollout.tp

        def gpu(engine: int, rank: int) -> Gpu:
            if self.one_node:
                return Gpu(0, self.world + engine * tp + rank)
            group, position = divmod(engine, self.engines_on_a_node)
            part, number = divmod(rank, self.part)
            first = 0 if self.rollout.colocate else self.trainer_nodes
            return Gpu(
                first + group * self.rollout.nodes_per_engine + part, position * self.part + number
            )

        own_nodes = not self.rollout.colocate and not self.one_node
        return Placement(
            gpus_per_node=self.gpus,
            trainer_nodes=self.trainer_nodes,
            rollout_nodes=(self.nodes.rollout or self.nodes_filled) if own_nodes else 0,
            trainers=tuple(Gpu(rank // ranks, rank % ranks) for rank in range(self.world)),
            engines=tuple(
                tuple(gpu(engine, rank) for rank in range(tp))
                for engine in range(self.rollout.num_engines)
            ),
        )
