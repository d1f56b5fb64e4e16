"""Runs `megagrpo plan`: memory and roofline of an experiment, and the layouts with the best bound,
colocated or not."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from json import dumps
from pathlib import Path

from megagrpo.check.engine_memory import assumed_lengths, engine_side, server_of
from megagrpo.check.fitting import load_of, with_model
from megagrpo.check.hardware import hardware_of, usable_bytes
from megagrpo.check.problems import described_architecture
from megagrpo.check.trainer_memory import trainer_stages
from megagrpo.config.actor import ActorConfig, ParallelConfig
from megagrpo.config.layout import layout_problems
from megagrpo.config.placement import Nodes, placement_problems
from megagrpo.config.rollout import RolloutConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.system.progress import Progress
from megagrpo.system.run_folder import write_whole
from megagrpo.tools.plan.report import as_json, report, table_lines
from megagrpo.tools.plan.roofline import (
    Plan,
    Target,
    measured_efficiency,
    plan_step,
    rollout_seconds,
    train_seconds,
)
from megagrpo.tools.plan.turns import assumed_turns, given_lengths, given_turns

_DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # pipeline stages
_ROUNDS = (1, 2, 3, 4, 6)  # virtual stages
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_ATTENTION_DP = 8  # replicas of attention in an engine that are tried besides none
_KEPT, _PROPOSED = (
    2,
    3,
)  # layouts of each side for each split of the nodes; proposals of each way to share GPUs
_FRACTIONS = (0.85, 0.75, 0.65, 0.55, 0.45, 0.35, 0.25)  # of colocated engines


@dataclass(frozen=True)
class Options:
    """The command line of `megagrpo plan`."""

    hardware: str | None = None  # None, as for the GPUs of a node: what section `cluster` says
    gpus_per_node: int | None = None
    lengths: str | None = None  # mean or file
    turns: str | None = None  # figures of agents, see tools/plan/turns.py
    measured: Path | None = None  # run folder
    search: int | None = None  # nodes
    json: Path | None = None


def plan_command(
    config: ExperimentConfig, options: Options, progress: Progress
) -> tuple[str, bool]:
    """Returns the plan as text, and whether the experiment fits; writes all figures to
    `options.json`.

    Raises ValueError for an unknown model, and for layouts that do not suit the model or the nodes.
    """
    config = with_model(config)
    target = target_of(config, options)
    placed = placement_problems(config, Nodes(target.gpus_per_node))
    progress.enter("memory and a bound of the step")
    plan = plan_step(config, target)
    plan = replace(plan, problems=(*placed, *plan.problems))
    progress.enter(f"searches layouts of {options.search} nodes" if options.search else "")
    proposals = [] if options.search is None else best_layouts(config, target, options.search)
    lines = report(plan, options.hardware or config.cluster.gpu)
    if proposals:
        lines += ["", *_proposals(proposals, plan)]
    if options.json is not None:
        data = {"plan": as_json(plan), "proposals": [as_json(other) for other in proposals]}
        write_whole(options.json, dumps(data, indent=1, default=float) + "\n")
    return "\n".join(lines), not plan.problems


def target_of(config: ExperimentConfig, options: Options) -> Target:
    """Returns the target of a plan. Raises ValueError with everything that does not fit
    together."""
    hardware, gpus = hardware_of(options.hardware or config.cluster.gpu), options.gpus_per_node
    gpus = gpus or config.cluster.gpus_per_node
    arch = described_architecture(config)
    lengths, turns = assumed_lengths(config), assumed_turns(config.sampling)
    efficiency: dict[str, float] = {}
    if options.measured is not None:
        efficiency, lengths, turns = measured_efficiency(options.measured, hardware, gpus)
    if options.lengths is not None:
        lengths = given_lengths(options.lengths, config)
    if options.turns is not None:
        turns = given_turns(options.turns, turns)
    return Target(arch, hardware, gpus, lengths, turns, efficiency)


def best_layouts(config: ExperimentConfig, target: Target, nodes: int) -> list[Plan]:
    """Returns the plans with the best bound of a step among those that fit on `nodes` nodes, the
    best first: those with engines on nodes of their own, and those with engines on the trainers'
    GPUs.

    Raises ValueError if nothing fits.
    """
    fitting = [
        plan
        for plans in (_apart(config, target, nodes), _colocated(config, target, nodes))
        for plan in sorted(
            (plan for plan in plans if not plan.problems), key=lambda plan: plan.step
        )[:_PROPOSED]
    ]
    if not fitting:
        raise ValueError(
            f"--search {nodes}: no layout of {nodes} nodes of {target.gpus_per_node} fits the "
            "model; give more nodes, "
            "or GPUs with more memory (--hardware)"
        )
    return sorted(fitting, key=lambda plan: plan.step)


def _apart(config: ExperimentConfig, target: Target, nodes: int) -> Iterator[Plan]:
    stride = 1 if nodes <= 12 else 2 if nodes <= 48 else 4
    rollout = config.rollout.model_copy(update={"colocate": False})
    apart = config.model_copy(
        update={"rollout": rollout, "weights": config.weights.suited(colocate=False)}
    )
    for count in range(stride, nodes, stride):
        engines = _best_engines(apart, target, nodes - count)
        trainers = _best_trainers(apart, target, count) if engines else []
        for actor, found in product(trainers, engines):
            yield plan_step(apart.model_copy(update={"actor": actor, "rollout": found}), target)


def _colocated(config: ExperimentConfig, target: Target, nodes: int) -> Iterator[Plan]:
    """Yields plans with the largest fraction of the memory for engines that trainers leave."""
    weights = config.weights.suited(colocate=True)
    for actor in _best_trainers(config, target, nodes):
        for fraction in _FRACTIONS:
            rollout = config.rollout.model_copy(
                update={"colocate": True, "mem_fraction": fraction, "max_staleness": 0}
            )
            beside = config.model_copy(
                update={"actor": actor, "rollout": rollout, "weights": weights}
            )
            engines = _best_engines(beside, target, nodes)
            plans = [
                plan_step(beside.model_copy(update={"rollout": found}), target) for found in engines
            ]
            if any(not plan.problems for plan in plans):
                yield from plans
                break


def _best_trainers(config: ExperimentConfig, target: Target, nodes: int) -> list[ActorConfig]:
    room = usable_bytes(target.hardware)
    found: list[tuple[float, ActorConfig]] = []
    for actor in _trainer_layouts(config.actor, target, nodes * target.gpus_per_node):
        changed = config.model_copy(update={"actor": actor})
        stages = trainer_stages(target.arch, actor, load_of(changed, target.arch))
        if max(stage.memory("update", 0.0).total for stage in stages) <= room:
            _, update = train_seconds(changed, target, tuple(stage.cost() for stage in stages))
            found.append((sum(update.values()), actor))
    return [actor for _, actor in sorted(found, key=lambda entry: entry[0])[:_KEPT]]


def _trainer_layouts(actor: ActorConfig, target: Target, world: int) -> Iterator[ActorConfig]:
    arch = target.arch
    tps = [tp for tp in _POWERS if tp <= target.gpus_per_node]
    eps = [ep for ep in _POWERS if arch.num_experts % ep == 0] if arch.is_moe else [1]
    # without Transformer Engine, context-parallel attention on a GPU builds whole masks
    cps = (1, 2, 4, 8) if actor.expects_transformer_engine else (1,)
    for tp, pp, cp, ep in product(tps, _DEPTHS, cps, eps):
        if world % (tp * pp * cp) or world % (ep * pp) or pp > arch.num_layers:
            continue
        for parallel, recompute in product(
            _pipelines(arch.num_layers, tp, pp, cp, ep), ("none", "full")
        ):
            layout = actor.model_copy(
                update={"world_size": world, "parallel": parallel, "recompute": recompute}
            )
            if not layout_problems(arch, layout):
                yield layout


def _pipelines(layers: int, tp: int, pp: int, cp: int, ep: int) -> Iterator[ParallelConfig]:
    """Yields ways to cut the layers into stages: equal ones, virtual ones, or a shorter first and
    last one."""
    if layers % pp == 0:
        for vpp in _ROUNDS if pp > 1 else (1,):
            if layers // pp % vpp == 0:
                yield ParallelConfig(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep)
        return
    middle = math.ceil(layers / pp)
    ends = layers - middle * (pp - 2)
    first, last = ends // 2, ends - ends // 2
    if first >= 1 and last <= middle:
        yield ParallelConfig(
            tp=tp, pp=pp, cp=cp, ep=ep, first_stage_layers=first, last_stage_layers=last
        )


def _best_engines(config: ExperimentConfig, target: Target, nodes: int) -> list[RolloutConfig]:
    found: list[tuple[float, RolloutConfig]] = []
    for rollout in _engine_layouts(config.rollout, target, nodes):
        changed = config.model_copy(update={"rollout": rollout})
        longest = load_of(changed, target.arch).longest
        engine = engine_side(
            target.work, server_of(rollout), target.lengths, longest, target.hardware
        )
        if not engine.problems:
            found.append((sum(rollout_seconds(changed, target, engine).values()), rollout))
    return [rollout for _, rollout in sorted(found, key=lambda entry: entry[0])[:_KEPT]]


def _engine_layouts(rollout: RolloutConfig, target: Target, nodes: int) -> Iterator[RolloutConfig]:
    arch, gpus = target.arch, target.gpus_per_node
    total = nodes * gpus
    for tp in (tp for tp in _POWERS if tp <= total and arch.num_heads % tp == 0):
        across = max(1, tp // gpus)
        shared_heads = arch.num_kv_heads % tp and tp % arch.num_kv_heads and arch.mla is None
        if nodes % across == 0 and not shared_heads:
            engines = {
                "tp": tp,
                "ep": math.gcd(tp, arch.num_experts) if arch.is_moe else 1,
                "nodes_per_engine": across,
                "num_engines": total // tp,
                "min_healthy_engines": max(1, min(rollout.min_healthy_engines, total // tp)),
            }
            yield rollout.model_copy(update=engines)
            if arch.is_moe and tp % _ATTENTION_DP == 0 and not rollout.colocate:
                apart = {"enable_dp_attention": True, "dp_size": _ATTENTION_DP}
                yield rollout.model_copy(update=engines | {"sglang": {**rollout.sglang, **apart}})


def _proposals(plans: Sequence[Plan], before: Plan) -> list[str]:
    """Returns the table of a search, and below it the words of `--set` that make each proposal of
    the experiment."""
    columns = (
        "step s",
        "GPU h",
        "rollout",
        "logprobs",
        "update",
        "publish",
        "off-policy s",
        "GPU GB",
        "cache",
    )
    rows = [["", "nodes", *columns]]
    words = []
    for number, plan in enumerate(plans, 1):
        gpus, rollout = plan.target.gpus_per_node, plan.config.rollout
        trainers, engines = plan.config.actor.world_size, rollout.num_engines * rollout.tp
        nodes = (
            f"{trainers // gpus} shared"
            if rollout.colocate
            else f"{trainers // gpus} + {engines // gpus}"
        )
        hours = (trainers + (0 if rollout.colocate else engines)) * plan.step / 3600
        ahead = "-" if rollout.colocate else f"{plan.off_policy:.3g}"
        seconds = [f"{value:.3g}" for value in (plan.synchronous, hours, *plan.seconds.values())]
        most = max(rank.total for rank in plan.phases.values())
        rows.append(
            [
                str(number),
                nodes,
                *seconds,
                ahead,
                f"{most / 1e9:.1f}",
                f"{plan.engine.cache_tokens:,}",
            ]
        )
        set_words = " ".join(
            f"--set {shlex.quote(word)}" for word in changes(before.config, plan.config)
        )
        words.append(f"{number}: {set_words or 'the experiment as it is'}")
    return ["layouts with the best bound of a step:", *table_lines(rows), *words]


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
            yield f"{prefix}{key}={dumps(value) if value is None or isinstance(value, dict) else value}"
