"""The layouts of a number of nodes whose bound of a step is best: `megagrpo plan --search`."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from operator import itemgetter
from typing import TypeVar

from megagrpo.check.problems import layout_problems
from megagrpo.check.rules import placement
from megagrpo.check.rules.engine_layout import before_start, server_of
from megagrpo.check.rules.subject import Nodes, Subject, broken, longest_samples
from megagrpo.config.actor import ActorConfig, ParallelConfig
from megagrpo.config.rollout import RolloutConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.tools.plan.engine_memory import engine_side
from megagrpo.tools.plan.fitting import load_of
from megagrpo.tools.plan.hardware import usable_bytes
from megagrpo.tools.plan.roofline import Plan, Target, plan_step, rollout_seconds, train_seconds
from megagrpo.tools.plan.trainer_memory import trainer_stages

T = TypeVar("T")
_DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # pipeline stages
_ROUNDS = (1, 2, 3, 4, 6)  # virtual stages
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_ATTENTION_DP = 8  # replicas of attention in an engine that are tried besides none
_KEPT = 2  # layouts of each side for each split of the nodes
_TIE = 0.05  # a bound is no forecast: layouts as near to the best one are as good
_PROPOSED = 3  # of each way to share GPUs
_FRACTIONS = (0.85, 0.75, 0.65, 0.55, 0.45, 0.35, 0.25)  # of colocated engines


def best_layouts(config: ExperimentConfig, target: Target, nodes: int) -> list[Plan]:
    """Returns the plans with the best bound of a step among those that fit on `nodes` nodes, the
    best first and of nearly equal ones the simplest.

    Those with engines on nodes of their own, and those with engines on the trainers' GPUs.
    Raises ValueError if nothing fits.
    """
    found = [
        *_best(map(_rated, _apart(config, target, nodes)), _PROPOSED),
        *_best(map(_rated, _colocated(config, target, nodes)), _PROPOSED),
    ]
    if not found:
        raise ValueError(
            f"--search {nodes}: no layout of {nodes} nodes of {target.gpus_per_node} fits the "
            "model; give more nodes, or GPUs with more memory (--hardware)"
        )
    return _best(map(_rated, found), len(found))


def _best(found: Iterable[tuple[float, int, T]], count: int) -> list[T]:
    """Returns the values of (seconds, parts, value) with the fewest seconds, and of those within
    _TIE of the fastest the simplest first."""
    ranked = sorted(found, key=itemgetter(0))
    tied = ranked[0][0] * (1 + _TIE) if ranked else 0.0
    ranked.sort(key=lambda each: (each[1], each[0]) if each[0] <= tied else (math.inf, 0.0))
    return [value for *_, value in ranked[:count]]


def _rated(plan: Plan) -> tuple[float, int, Plan]:
    config = plan.config
    parts = _parts_of_trainers(config.actor) + _parts_of_engines(config.rollout)
    return plan.step, parts, plan


def _parts_of_trainers(actor: ActorConfig) -> int:
    """Counts the ways in which a layout cuts the model: a measure of what can go wrong with it."""
    both = {"last_stage_layers"}  # with first_stage_layers one way
    return len(actor.parallel.model_dump(exclude_defaults=True, exclude=both))


def _parts_of_engines(rollout: RolloutConfig) -> int:
    return (rollout.nodes_per_engine > 1) + bool(rollout.sglang.get("enable_dp_attention"))


def _apart(config: ExperimentConfig, target: Target, nodes: int) -> Iterator[Plan]:
    apart = _changed(config, config.actor, config.rollout.model_copy(update={"colocate": False}))
    others = config.engine_ranks - config.rollout.num_engines * config.rollout.tp
    free = nodes - -(-others // target.gpus_per_node)
    # at most 24 ways to share the nodes: each takes seconds
    stride = 1 if nodes <= 12 else 2 << (nodes // 49).bit_length()
    for count in range(stride, free, stride):
        engines = _best_engines(apart, target, free - count)
        trainers = _best_trainers(apart, target, count) if engines else []
        yield from _fitting(apart, target, nodes, trainers, engines)


def _colocated(config: ExperimentConfig, target: Target, nodes: int) -> Iterator[Plan]:
    """Yields plans with the largest fraction of the memory for engines that trainers leave."""
    for actor in _best_trainers(config, target, nodes):
        for fraction in _FRACTIONS:
            shared = {
                "colocate": True,
                "mem_fraction": fraction,
                "max_staleness": 0,
                "prefix_cache": "flush",  # the other is for rollouts ahead
            }
            beside = _changed(config, actor, config.rollout.model_copy(update=shared))
            engines = _best_engines(beside, target, nodes)
            if found := list(_fitting(beside, target, nodes, [actor], engines)):
                yield from found
                break


def _has_place(config: ExperimentConfig, target: Target, nodes: int) -> bool:
    """Returns whether all ranks have a place on the nodes, whatever address they have."""
    trainers = config.actor.world_size // target.gpus_per_node
    rollout = config.rollout.model_copy(update={"host": "0.0.0.0"})
    apart = None if rollout.colocate else nodes - trainers
    reachable = config.model_copy(update={"rollout": rollout})
    subject = Subject(reachable, Nodes(target.gpus_per_node, trainers, apart))
    return not broken(placement.before_start(subject))


def _fitting(
    config: ExperimentConfig,
    target: Target,
    nodes: int,
    actors: Iterable[ActorConfig],
    rollouts: Iterable[RolloutConfig],
) -> Iterator[Plan]:
    for actor, rollout in product(actors, rollouts):
        changed = _changed(config, actor, rollout)
        plan = plan_step(changed, target)
        if not plan.problems and _has_place(changed, target, nodes):
            yield plan


def _changed(
    config: ExperimentConfig, actor: ActorConfig, rollout: RolloutConfig
) -> ExperimentConfig:
    weights = config.weights.suited(colocate=rollout.colocate)
    return config.model_copy(update={"actor": actor, "rollout": rollout, "weights": weights})


def _best_trainers(config: ExperimentConfig, target: Target, nodes: int) -> list[ActorConfig]:
    found: list[tuple[float, int, ActorConfig]] = []
    for actor in _trainer_layouts(config.actor, target, nodes * target.gpus_per_node):
        changed = config.model_copy(update={"actor": actor})
        if layout_problems(target.arch, actor):
            continue
        stages = trainer_stages(target.arch, actor, load_of(changed, target.arch))
        fullest = max(stage.memory("update", 0.0).total for stage in stages)
        if fullest <= usable_bytes(target.hardware):
            _, update = train_seconds(changed, target, stages)
            found.append((sum(update.values()), _parts_of_trainers(actor), actor))
    return _best(found, _KEPT)


def _trainer_layouts(actor: ActorConfig, target: Target, world: int) -> Iterator[ActorConfig]:
    arch = target.arch
    tps = [tp for tp in _POWERS if tp <= target.gpus_per_node]
    eps = [ep for ep in _POWERS if arch.routed.count % ep == 0] if arch.is_moe else [1]
    # without Transformer Engine, context-parallel attention on a GPU builds whole masks
    cps = (1, 2, 4, 8) if actor.expects_transformer_engine else (1,)
    for tp, pp, cp, ep in product(tps, _DEPTHS, cps, eps):
        if world % (tp * pp * cp) or world % (ep * pp) or pp > arch.num_layers:
            continue
        for stages, recompute in product(_pipelines(arch.num_layers, pp), ("none", "full")):
            parallel = ParallelConfig.model_validate(
                {"tp": tp, "pp": pp, "cp": cp, "ep": ep, **stages}
            )
            yield actor.model_copy(
                update={"world_size": world, "parallel": parallel, "recompute": recompute}
            )


def _pipelines(layers: int, pp: int) -> Iterator[dict[str, int]]:
    """Yields ways to cut the layers into stages: equal ones, virtual ones, or a shorter first and
    last one."""
    if layers % pp == 0:
        rounds = _ROUNDS if pp > 1 else (1,)
        yield from ({"vpp": vpp} for vpp in rounds if layers // pp % vpp == 0)
        return
    middle = math.ceil(layers / pp)
    ends = layers - middle * (pp - 2)
    if ends // 2 >= 1 and ends - ends // 2 <= middle:
        yield {"first_stage_layers": ends // 2, "last_stage_layers": ends - ends // 2}


def _best_engines(config: ExperimentConfig, target: Target, nodes: int) -> list[RolloutConfig]:
    found: list[tuple[float, int, RolloutConfig]] = []
    for rollout in _engine_layouts(config.rollout, target, nodes):
        changed = config.model_copy(update={"rollout": rollout})
        if broken(before_start(Subject(changed, arch=target.arch))):
            continue
        longest = max(longest_samples(changed).values())  # of evaluations, too
        engine = engine_side(
            target.work, server_of(rollout), target.lengths, longest, target.hardware
        )
        if not engine.problems:
            seconds = sum(rollout_seconds(changed, target, engine).values())
            found.append((seconds, _parts_of_engines(rollout), rollout))
    return _best(found, _KEPT)


def _engine_layouts(rollout: RolloutConfig, target: Target, nodes: int) -> Iterator[RolloutConfig]:
    arch = target.arch
    total = nodes * target.gpus_per_node
    for tp in (tp for tp in _POWERS if tp <= total):
        across = max(1, tp // target.gpus_per_node)
        if nodes % across:
            continue
        engines = {
            "tp": tp,
            "ep": math.gcd(tp, arch.routed.count) if arch.is_moe else 1,
            "nodes_per_engine": across,
            "num_engines": total // tp,
            "min_healthy_engines": max(1, min(rollout.min_healthy_engines, total // tp)),
        }
        found = [rollout.model_copy(update=engines)]
        if arch.is_moe and tp % _ATTENTION_DP == 0 and not rollout.colocate:
            apart = {**rollout.sglang, "enable_dp_attention": True, "dp_size": _ATTENTION_DP}
            found.append(rollout.model_copy(update={**engines, "sglang": apart}))
        yield from found


def changes(before: ExperimentConfig, after: ExperimentConfig) -> list[str]:
    """Returns the settings of a proposal that differ, as words of `--set`."""
    sections = {"actor", "rollout", "weights"}
    return list(
        _changes("", before.model_dump(include=sections), after.model_dump(include=sections))
    )


def _changes(
    prefix: str, before: Mapping[str, object], after: Mapping[str, object]
) -> Iterator[str]:
    for key, value in after.items():
        old = before[key]
        if isinstance(value, dict) and isinstance(old, dict) and value.keys() == old.keys():
            yield from _changes(f"{prefix}{key}.", old, value)
        elif value != old:
            is_yaml = value is None or isinstance(value, dict)
            yield f"{prefix}{key}={json.dumps(value) if is_yaml else value}"
