"""Proposes layouts of both sides for a number of nodes: closed forms over all that fit, the best ones planned again."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from megagrpo.check.problems import longest_samples
from megagrpo.config.actor import ActorConfig, ParallelConfig
from megagrpo.config.layout import layout_problems
from megagrpo.config.rollout import RolloutConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.planning.optimizer_bytes import optimizer_bytes
from megagrpo.planning.rollout_time import RolloutTime
from megagrpo.planning.step_time import (
    Plan,
    Target,
    engines_of,
    load_of,
    plan_step,
    publish_seconds,
    sampling_of,
    usable_bytes,
)
from megagrpo.planning.train_time import Schedule, TrainSpeed, schedule_of, train_time
from megagrpo.planning.trainer_memory import Held, stage_sides

_DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # pipeline stages
_ROUNDS = (1, 2, 3, 4, 6)  # virtual stages
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_KEPT = 4  # of each side, for each split of the nodes
_PLANNED = 12  # exactly
_PROPOSED = 5
_REQUESTS = (1, 2, 4)  # times rollout.max_running_requests


@dataclass(frozen=True)
class _Trained:
    seconds: float
    config: ExperimentConfig


@dataclass(frozen=True)
class _Sampled:
    rollout: RolloutTime
    config: ExperimentConfig


def best_layouts(config: ExperimentConfig, target: Target, nodes: int) -> list[Plan]:
    """Returns the plans with the shortest steps among those that fit on `nodes` nodes, the best first.

    Raises ValueError where nothing fits.
    """
    if nodes < 2:
        raise ValueError(f"--search {nodes}: trainers and engines have nodes of their own, so 2 at least")
    found: list[tuple[float, ExperimentConfig, RolloutTime]] = []
    trainers = _TrainerSearch(config, target)
    for count in _splits(nodes):
        for trained, sampled in product(trainers.best(count), _best_engines(config, target, nodes - count)):
            both = trained.config.model_copy(update={"rollout": sampled.config.rollout})
            publish, _ = publish_seconds(both, target, engines_of(both, target))
            found.append((trained.seconds + sampled.rollout.seconds + publish, both, sampled.rollout))
    found.sort(key=lambda entry: entry[0])
    plans = [
        plan_step(both, target, schedule=trainers.schedule(both.actor), rollout=rollout)
        for _, both, rollout in found[:_PLANNED]
    ]
    fitting = sorted((plan for plan in plans if not plan.problems), key=lambda plan: plan.step)
    if not fitting:
        raise ValueError(
            f"--search {nodes}: no layout of {nodes} nodes of {target.gpus_per_node} fits the model; give more nodes, "
            "or GPUs with more memory (--hardware)"
        )
    return fitting[:_PROPOSED]


def _splits(nodes: int) -> list[int]:
    """Returns the numbers of trainer nodes that are tried: all of a few nodes, every second or fourth of many."""
    stride = 1 if nodes <= 12 else 2 if nodes <= 48 else 4
    return list(range(stride, nodes, stride))


class _TrainerSearch:
    """Layouts of the trainers, with what many of them have in common computed once."""

    def __init__(self, config: ExperimentConfig, target: Target):
        self._config, self._target = config, target
        self._longest = longest_samples(config)["data"]
        train = config.train
        samples = max(1, train.num_prompts_per_step * train.group_size // train.num_updates_per_step)
        self._samples = target.lengths.spread(samples) + target.lengths.prompt
        self._schedules: dict[tuple[int, int], Schedule] = {}
        self._room = usable_bytes(target)

    def best(self, nodes: int) -> list[_Trained]:
        """Returns the fastest layouts of so many nodes that fit by their closed forms."""
        world = nodes * self._target.gpus_per_node
        sides = [side for actor in self._layouts(world) if (side := self._side(actor)) is not None]
        best: dict[str, _Trained] = {}
        for side in sorted(sides, key=lambda side: side.seconds):
            best.setdefault(side.config.actor.parallel.model_dump_json(), side)
        return list(best.values())[:_KEPT]

    def _layouts(self, world: int) -> Iterator[ActorConfig]:
        arch, actor = self._target.arch, self._config.actor
        gpus = self._target.gpus_per_node
        tps = [tp for tp in _POWERS if tp <= gpus]
        eps = [ep for ep in _POWERS if arch.num_experts % ep == 0] if arch.is_moe else [1]
        # without Transformer Engine, context-parallel attention on a GPU builds whole masks
        cps = (1, 2, 4, 8) if actor.expects_transformer_engine else (1,)
        for tp, pp, cp, ep in product(tps, _DEPTHS, cps, eps):
            if world % (tp * pp * cp) or world % (ep * pp) or pp > arch.num_layers:
                continue
            if world // (tp * pp * cp) > len(self._samples) or not self._static_fits(world, tp, pp, ep):
                continue
            for parallel in _pipelines(arch.num_layers, tp, pp, cp, ep):
                layout = actor.model_copy(update={"world_size": world, "parallel": parallel})
                if not layout_problems(arch, layout):
                    yield from self._variants(layout)

    def _variants(self, layout: ActorConfig) -> Iterator[ActorConfig]:
        budgets = sorted({self._config.actor.micro_batch_tokens, self._longest, 2 * self._longest})
        for recompute, budget in product(("full", "none"), budgets):
            yield layout.model_copy(update={"recompute": recompute, "micro_batch_tokens": budget})

    def _static_fits(self, world: int, tp: int, pp: int, ep: int) -> bool:
        """Tells whether weights, gradients and optimiser of an average stage leave any room at all."""
        work, actor = self._target.work, self._config.actor
        dense = sum(layer.dense for layer in work.layers) / (tp * pp)
        expert = sum(layer.expert for layer in work.layers) / (ep * pp)
        if actor.lora is not None:
            return 2 * (dense + expert) < self._room
        copies = (world // (tp * pp), world // (ep * pp)) if actor.optimizer.distributed else (1, 1)
        each = optimizer_bytes(actor)
        shards = dense / copies[0] + expert / copies[1]
        return (2 + each.gradient) * (dense + expert) + each.state * shards < self._room

    def _side(self, actor: ActorConfig) -> _Trained | None:
        target, config = self._target, self._config
        held = _held(target, actor)
        load = load_of(config.model_copy(update={"actor": actor}), target)
        stages = stage_sides(target.arch, actor, load, held)
        if max(memory.total for memory, _ in stages) > self._room:
            return None
        speed = TrainSpeed(target.work, actor, target.hardware, target.gpus_per_node)
        train, algorithm = config.train, config.algorithm
        time = train_time(
            speed, [cost for _, cost in stages], self.schedule(actor), actor,
            train.updates_of_step, train.num_epochs_per_step,
        )  # fmt: skip
        passes = int(train.updates_of_step > 1 or algorithm.needs_old_logprobs) + int(algorithm.uses_reference)
        return _Trained(time.update + passes * time.forward, config.model_copy(update={"actor": actor}))

    def schedule(self, actor: ActorConfig) -> Schedule:
        """Returns the micro-batches of one update, which many layouts share."""
        key = actor.dp, actor.micro_batch_tokens
        if key not in self._schedules:
            self._schedules[key] = schedule_of(self._samples, self._target.arch, actor)
        return self._schedules[key]


def _pipelines(layers: int, tp: int, pp: int, cp: int, ep: int) -> Iterator[ParallelConfig]:
    """Yields ways to cut the layers into stages: equal ones, virtual ones, or a shorter first and last one."""
    if layers % pp == 0:
        for vpp in _ROUNDS if pp > 1 else (1,):
            if layers // pp % vpp == 0:
                yield ParallelConfig(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep)
        return
    middle = math.ceil(layers / pp)
    ends = layers - middle * (pp - 2)
    first = ends // 2
    if first >= 1 and ends - first <= middle:
        yield ParallelConfig(
            tp=tp, pp=pp, cp=cp, ep=ep, first_stage_layers=first, last_stage_layers=ends - first
        )  # fmt: skip


def _held(target: Target, actor: ActorConfig) -> list[Held]:
    """Counts what a rank of each stage holds, from the sums of each layer; adapters are taken as nothing."""
    work, p = target.work, actor.parallel
    stages, layer = [], 0
    counts = p.stage_layers(len(work.layers))
    for number, count in enumerate(counts):
        layers = work.layers[layer : layer + count]  # virtual stages hold as many, of a kind
        layer += count
        dense = sum(work.whole + (one.dense - work.whole) / p.tp for one in layers)
        dense += work.embedding / p.tp if number == 0 else 0.0
        dense += work.head / p.tp if number == len(counts) - 1 and not (work.tied and p.pp == 1) else 0.0
        expert = sum(one.expert for one in layers) / (p.ep * p.etp)
        trained = (0.0, 0.0) if actor.lora is not None else (dense, expert)
        stages.append(Held(dense, expert, *trained))
    return stages


def _best_engines(config: ExperimentConfig, target: Target, nodes: int) -> list[_Sampled]:
    """Returns the fastest engines on so many nodes, one of each size."""
    best: dict[int, _Sampled] = {}
    for rollout in _engines(config.rollout, target, nodes):
        changed = config.model_copy(update={"rollout": rollout})
        engine = engines_of(changed, target)
        before = best.get(rollout.tp)
        if engine.problems or (before is not None and before.rollout.most_at_once < rollout.max_running_requests // 2):
            continue  # more requests at once would not come
        found = _Sampled(sampling_of(changed, target, engine), changed)
        if before is None or found.rollout.seconds < before.rollout.seconds * 0.999:
            best[rollout.tp] = found
    return sorted(best.values(), key=lambda side: side.rollout.seconds)[:_KEPT]


def _engines(rollout: RolloutConfig, target: Target, nodes: int) -> Iterator[RolloutConfig]:
    arch, gpus = target.arch, target.gpus_per_node
    total = nodes * gpus
    for tp in _POWERS:
        across = max(1, tp // gpus)
        if tp > total or nodes % across or arch.num_heads % tp:
            continue
        if arch.num_kv_heads % tp and tp % arch.num_kv_heads and not target.work.latent:
            continue
        ep = math.gcd(tp, arch.num_experts) if arch.is_moe else 1
        for times in _REQUESTS:
            yield rollout.model_copy(
                update={
                    "tp": tp,
                    "ep": ep,
                    "nodes_per_engine": across,
                    "num_engines": total // tp,
                    "max_running_requests": times * rollout.max_running_requests,
                    "min_healthy_engines": max(1, min(rollout.min_healthy_engines, total // tp)),
                }
            )


def changes(before: ExperimentConfig, after: ExperimentConfig) -> list[str]:
    """Returns what a proposal sets differently, as words of `--set`."""
    found: list[str] = []
    for section in ("actor", "rollout"):
        found += _changes(section, getattr(before, section).model_dump(), getattr(after, section).model_dump())
    return found


def _changes(where: str, before: dict, after: dict) -> list[str]:
    out: list[str] = []
    for key, value in after.items():
        if isinstance(value, dict) and isinstance(before[key], dict):
            out += _changes(f"{where}.{key}", before[key], value)
        elif value != before[key]:
            out.append(f"{where}.{key}={'null' if value is None else value}")
    return out
