"""How long trainers compute: the micro-batches that the program itself would cut, through the stages of a pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megagrpo.batching.balance import balanced_parts, fewest_micro_batches, sample_cost
from megagrpo.config.actor import ActorConfig
from megagrpo.families.architecture import Architecture
from megagrpo.planning.hardware import Hardware, efficiency
from megagrpo.planning.trainer_memory import StageCost
from megagrpo.planning.work import ModelWork

_OPTIMISER_BYTES = 40.0  # moved for each float32 weight of a shard: gradient, two moments and the weight, read, written


@dataclass(frozen=True)
class Schedule:
    """The micro-batches of one update, as data-parallel ranks get them."""

    count: int  # of each rank: the most that any needs
    tokens: float  # in one of them, on average over the ranks' own
    pairs: float  # of queries and keys that they see in one of them, on average: half the sum of n^2
    slowest: float  # cost of the rank with most to do, over the mean

    @property
    def waiting(self) -> float:
        """Returns the share of the time that the mean rank waits for the slowest."""
        return 1 - 1 / self.slowest


def schedule_of(lengths: np.ndarray, arch: Architecture, actor: ActorConfig) -> Schedule:
    """Balances the samples of an update over ranks and cuts micro-batches, as the loop does; lengths in tokens."""
    sizes = [max(1, int(length)) for length in lengths]
    parts = balanced_parts([sample_cost(size, arch.attention_length) for size in sizes], actor.dp)
    loads = [sum(sample_cost(sizes[i], arch.attention_length) for i in part) for part in parts]
    budget = actor.micro_batch_tokens
    counts = [len(fewest_micro_batches([sizes[i] for i in part], budget, actor.packing)) for part in parts]
    count = max(1, *counts)
    return Schedule(
        count=count,
        tokens=sum(sizes) / actor.dp / count,
        pairs=sum(size * size for size in sizes) / 2 / actor.dp / count,
        slowest=max(loads) / (sum(loads) / len(loads)),
    )


@dataclass(frozen=True)
class PassTime:
    """Seconds of one stage in the forward of one micro-batch."""

    compute: float
    sent: Mapping[str, float]  # by "tp", "cp", "ep", "pp"
    overhead: float

    @property
    def forward(self) -> float:
        """Returns the seconds of a forward; nothing is taken to overlap."""
        return self.compute + sum(self.sent.values()) + self.overhead

    def with_backward(self, recomputed: float) -> float:
        """Returns the seconds with the backward: twice the products, all sent again, and what is recomputed."""
        return self.forward * (2 + recomputed) + self.compute


@dataclass(frozen=True)
class TrainTime:
    """Seconds of a step's passes on the trainers."""

    forward: float  # of all samples: log-probabilities of one model
    update: float  # all updates of the step
    parts: Mapping[str, float]  # of `update`
    bubble: float  # share of an update's passes in which the mean stage has nothing to do
    micro_batches: int
    filled: float  # tokens of a micro-batch over the budget
    waiting: float  # share of the passes that the mean data-parallel rank waits for the slowest
    model_flops: float  # of the updates without anything that is recomputed, of all ranks

    @property
    def limit(self) -> str:
        """Names what takes the most of an update."""
        return max(self.parts, key=lambda name: self.parts[name])


class TrainSpeed:
    """The roofline of one trainer rank."""

    def __init__(self, work: ModelWork, actor: ActorConfig, hardware: Hardware, gpus_per_node: int):
        self._work, self._actor, self._hardware, self._gpus = work, actor, hardware, gpus_per_node
        experts = "experts" if actor.expects_transformer_engine else "experts one by one"
        dense, expert = (sum(flops) for flops in zip(*map(work.forward_flops, work.layers), strict=True))
        share = expert / (dense + expert)
        # one rate for both kinds of products: the time of each adds up
        self._matmul = 1 / ((1 - share) / efficiency("matmul") + share / efficiency(experts))

    def model_flops(self, schedule: Schedule) -> float:
        """Returns the FLOPs of the whole model in the forward of one micro-batch, were experts equally full."""
        work = self._work
        token = sum(sum(work.forward_flops(layer)) for layer in work.layers) + 2.0 * work.head
        return schedule.tokens * token + schedule.pairs * work.attention_flops * len(work.layers)

    def stage(self, cost: StageCost, schedule: Schedule) -> PassTime:
        """Returns one stage's seconds with one micro-batch of the schedule."""
        scale = schedule.tokens / cost.tokens
        peak = self._hardware.bf16_tflops * 1e12
        attention = cost.pair_flops * schedule.pairs / self._actor.parallel.cp
        compute = cost.flops * scale / (peak * self._matmul) + attention / (peak * efficiency("attention"))
        sent = {name: self._seconds(name, num_bytes * scale) for name, num_bytes in cost.sent.items()}
        return PassTime(compute, sent, cost.layers * efficiency("layer overhead us") / 1e6)

    def _seconds(self, group: str, num_bytes: float) -> float:
        p, rates = self._actor.parallel, self._hardware.rates
        inside = rates.inside_gb_s * 1e9 * efficiency("nvlink")
        between = rates.between_gb_s * 1e9 * efficiency("network")
        if group == "pp":
            return num_bytes / (between if self._actor.world_size > self._gpus else inside)
        if group == "ep":
            inside = rates.inside_gb_s * 1e9 * efficiency("all-to-all inside")
            between = rates.between_gb_s * 1e9 * efficiency("all-to-all between")
            near = min(1.0, max(0.0, self._gpus / p.etp - 1) / max(p.ep - 1, 1))
            return max(num_bytes * near / inside, num_bytes * (1 - near) / between)
        span = {"tp": p.tp, "cp": p.tp * p.cp}[group]  # consecutive ranks that the group lies in
        return num_bytes / (inside if span <= self._gpus else between)

    def synchronise(self, cost: StageCost) -> dict[str, float]:
        """Returns the seconds that one update needs beside its passes: gradients, Adam, and the new weights to all."""
        actor, p = self._actor, self._actor.parallel
        stage = actor.world_size // p.pp
        sizes = {"dp": stage // p.tp, "edp": stage // (p.etp * p.ep)}
        apart = {"dp": p.tp, "edp": p.etp * p.ep}  # ranks between two members of the group
        reduce, optimise, gather = 0.0, 0.0, 0.0
        for group, num_bytes in cost.gradient_bytes.items():
            size = sizes[group]
            rate = "inside" if size * apart[group] <= self._gpus else "between"
            links = self._hardware.rates.inside_gb_s if rate == "inside" else self._hardware.rates.between_gb_s
            speed = links * 1e9 * efficiency("nvlink" if rate == "inside" else "network")
            divided = size if actor.optimizer.distributed else 1
            reduce += num_bytes * (size - 1) / size * (1 if actor.optimizer.distributed else 2) / speed
            gather += num_bytes / 2 * (size - 1) / size / speed if actor.optimizer.distributed else 0.0
            moved = num_bytes / 4 / divided * _OPTIMISER_BYTES
            optimise += moved / (self._hardware.memory_tb_s * 1e12 * efficiency("memory"))
        return {"gradients": reduce, "optimiser": optimise, "weights to all": gather}


def train_time(
    speed: TrainSpeed, costs: Sequence[StageCost], schedule: Schedule, actor: ActorConfig, updates: int, passes: int
) -> TrainTime:
    """Returns the seconds of a step with `updates` updates, each with this schedule.

    costs: of each pipeline stage. passes: times that the updates go over all samples; log-probabilities go over them
    once.
    """
    p = actor.parallel
    stages = [speed.stage(cost, schedule) for cost in costs]
    both = [stage.with_backward(cost.recomputed) for stage, cost in zip(stages, costs, strict=True)]
    slowest = int(np.argmax(both))
    depth = (p.pp - 1) / p.vpp
    rest = max((speed.synchronise(cost) for cost in costs), key=lambda found: sum(found.values()))
    stage, times = stages[slowest], 2 + costs[slowest].recomputed
    busy = schedule.count * updates
    parts = {
        "compute": stage.compute * (times + 1) * busy,
        **{f"{name} communication": seconds * times * busy for name, seconds in stage.sent.items() if seconds},
        "layer overhead": stage.overhead * times * busy,
        "pipeline bubble": depth * updates * both[slowest],
        "waiting for the slowest rank": (schedule.slowest - 1) * both[slowest] * busy,
        **{name: seconds * updates for name, seconds in rest.items()},
    }
    rounds = schedule.count * schedule.slowest + depth
    return TrainTime(
        forward=rounds * max(stage.forward for stage in stages) * updates / passes,
        update=sum(parts.values()),
        parts=parts,
        bubble=1 - schedule.count * sum(both) / len(both) / ((schedule.count + depth) * both[slowest]),
        micro_batches=schedule.count,
        filled=schedule.tokens / actor.micro_batch_tokens,
        waiting=schedule.waiting,
        model_flops=3 * speed.model_flops(schedule) * schedule.count * actor.dp * updates,
    )
