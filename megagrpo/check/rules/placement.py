"""Where each rank of trainers and engines runs, and why it has no place: one answer for check,
plan, submit and the launchers."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

from megagrpo.check.rules.subject import Nodes, Subject, broken
from megagrpo.config.fields import Rule
from megagrpo.config.schema import ExperimentConfig
from megagrpo.rollout.service.addresses import LOOPBACK


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
    engines: tuple[tuple[Gpu, ...], ...]  # by engine and rank, served models' after the run's own
    names: tuple[str, ...] = ()  # of these: "0", or a served model's, "teacher-math 0"


def place(config: ExperimentConfig, nodes: Nodes | None = None) -> Placement:
    """Places every rank. Raises ValueError with what has no place."""
    fit = _Fit(Subject(config, nodes or Nodes()))
    if problems := broken(fit.rules()):
        raise ValueError("\n".join(problems))
    return fit.placement()


def before_start(subject: Subject) -> Iterator[Rule]:
    """Yields the rules between the ranks and the nodes."""
    return _Fit(subject).rules()


def needs_gpus(config: ExperimentConfig) -> bool:
    """Returns whether the experiment is meant for GPUs; a float32 one on any device may run on a
    CPU."""
    device = config.actor.device
    return device == "cuda" or (
        device == "auto" and "bfloat16" in (config.actor.dtype, config.rollout.dtype)
    )


class _Fit:
    """The sizes that decide where ranks go. On a CPU a node has room for any number of them."""

    def __init__(self, subject: Subject):
        config, nodes = subject.experiment, subject.nodes
        rollout = config.rollout
        self.world = config.actor.world_size
        self.engine_ranks = config.engine_ranks
        self.sizes = config.engine_sizes
        self.rollout = rollout
        self.cannot_share = config.weights.needs_colocation and not rollout.colocate
        self.on_gpus = needs_gpus(config)
        self.nodes = nodes
        everything = self.world + self.engine_ranks
        self.gpus = nodes.gpus or (config.cluster.gpus_per_node if self.on_gpus else everything)
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
    def room(self) -> int:
        """Counts the GPUs of a node that engines may have."""
        return self.world // self.trainer_nodes if self.rollout.colocate else self.gpus

    def engines(self) -> Iterator[tuple[str, list[Gpu]]]:
        """Yields the name of each engine and the GPUs of its ranks, on the engines' nodes from 0:
        on the first ones that have room."""
        taken: list[int] = []  # GPUs, of each node
        for model, size in self.sizes.items():
            part = size.tp // size.nodes_per_engine
            for number in range(size.num_engines):
                free = (node for node, used in enumerate(taken) if used + part <= self.room)
                nodes = list(islice(free, size.nodes_per_engine))
                new = range(len(taken), len(taken) + size.nodes_per_engine - len(nodes))
                taken += [0] * len(new)
                nodes += new
                gpus = [Gpu(node, taken[node] + i) for node in nodes for i in range(part)]
                yield f"{model} {number}".strip(), gpus
                for node in nodes:
                    taken[node] += part

    @property
    def nodes_filled(self) -> int:
        """Counts the nodes that the engines fill."""
        return 1 + max(gpus[-1].node for _, gpus in self.engines())

    def rules(self) -> Iterator[Rule]:
        """Yields the rules, up to the first one that leaves the ranks without a place."""
        for rule in self._counts():
            yield rule
            if rule.when:
                return
        yield Rule(
            self.cannot_share and (self.on_gpus or not self.one_node),
            "weights.transport ipc: engines beside the trainers' GPUs and nodes share no memory with them",
            "set weights.transport: reshard, or rollout.colocate: true",
        )
        if self.one_node:
            return
        colocate = self.rollout.colocate
        yield from self._beside() if colocate else self._apart()
        yield Rule(
            (not colocate or self.trainer_nodes > 1) and self.rollout.host in LOOPBACK,
            f"rollout.host {self.rollout.host}: trainers on other nodes cannot reach it",
            "name the interface between nodes, as eth0",
        )

    def _counts(self) -> Iterator[Rule]:
        others = ", with those of teachers and judges" if len(self.sizes) > 1 else ""
        ranks = f"{self.engine_ranks} engine ranks (rollout.num_engines x tp{others})"
        both = f"{self.world} trainer ranks (actor.world_size) and {ranks}"
        yield Rule(
            self.rollout.colocate and self.engine_ranks > self.world,
            f"rollout.colocate: {both}: each of these needs a trainer rank beside it",
            "lower rollout.num_engines",
        )
        needed = self.world + self.engine_ranks
        yield Rule(
            self.one_node and needed > self.gpus,
            f"{both} need {needed} GPUs, and the node has {self.gpus}",
            "lower them, or take more nodes",
        )
        nodes = self.trainer_nodes
        per_node = "they do not divide"
        if nodes > 0 and self.world % nodes == 0:
            per_node = f"{self.world // nodes} ranks a node on {self.gpus} GPUs"
        yield Rule(
            not self.one_node and nodes not in self.fitting,
            f"{nodes} trainer nodes: actor.world_size is {self.world}, {per_node}",
            f"it may be {', '.join(map(str, self.fitting))}",
        )

    def _beside(self) -> Iterator[Rule]:
        ranks = self.room
        rollout = self.rollout
        part = rollout.tp // rollout.nodes_per_engine
        engines = f"{rollout.num_engines} engine(s) over {rollout.nodes_per_engine} node(s) each"
        yield self._too_large(part, f"{ranks} trainer ranks")
        yield Rule(
            part <= ranks and self.nodes_filled > self.trainer_nodes,
            f"rollout.colocate: {engines}, but {ranks // part} have room on a node of {ranks} "
            f"trainers, and there are {self.trainer_nodes}: lower num_engines",
        )
        yield Rule(
            self.nodes.rollout,
            f"{self.nodes.rollout} rollout nodes: under rollout.colocate engines have none of their own",
            "leave them out",
        )

    def _apart(self) -> Iterator[Rule]:
        sizes = self.sizes.values()
        part = max(size.tp // size.nodes_per_engine for size in sizes)
        yield self._too_large(part, f"{self.gpus} GPUs")
        if part > self.room:
            return
        least = self.nodes_filled
        most = sum(size.num_engines * size.nodes_per_engine for size in sizes)
        engines = " and ".join(
            f"{size.num_engines} engine(s) over {size.nodes_per_engine} node(s) each"
            for size in sizes
        )
        nodes = self.nodes.rollout
        yield Rule(
            nodes is not None and not least <= nodes <= most,
            f"{nodes} rollout nodes: {engines}, so it may be {least} to {most}",
        )

    def _too_large(self, part: int, room: str) -> Rule:
        key = "its " if len(self.sizes) > 1 else "rollout."
        return Rule(
            part > self.room,
            f"an engine has {part} ranks a node, but a node {room}: raise {key}nodes_per_engine",
        )

    def placement(self) -> Placement:
        """Returns the GPUs of all ranks: trainers in order; engine after engine, each on
        nodes_per_engine nodes."""
        ranks = self.world // self.trainer_nodes
        first = 0 if self.rollout.colocate else self.trainer_nodes
        beside = count(self.world)  # numbers of GPUs on the one node

        def placed(gpu: Gpu) -> Gpu:
            return Gpu(0, next(beside)) if self.one_node else Gpu(first + gpu.node, gpu.number)

        engines = {name: tuple(map(placed, gpus)) for name, gpus in self.engines()}
        own_nodes = not self.rollout.colocate and not self.one_node
        return Placement(
            gpus_per_node=self.gpus,
            trainer_nodes=self.trainer_nodes,
            rollout_nodes=(self.nodes.rollout or self.nodes_filled) if own_nodes else 0,
            trainers=tuple(Gpu(rank // ranks, rank % ranks) for rank in range(self.world)),
            engines=tuple(engines.values()),
            names=tuple(engines),
        )
