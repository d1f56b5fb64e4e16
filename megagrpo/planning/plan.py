"""Runs `megagrpo plan`: what an experiment needs and how long its steps take, before there is a GPU."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from json import dumps
from pathlib import Path

import megagrpo
from megagrpo.check.problems import longest_samples, model_description
from megagrpo.config.layout import layout_problems
from megagrpo.config.schema import ExperimentConfig, ModelConfig
from megagrpo.families.table import architecture_of
from megagrpo.planning.engine_memory import Server, server_of
from megagrpo.planning.hardware import hardware_of
from megagrpo.planning.lengths import Lengths, assumed_lengths, given_lengths, lengths_of_run
from megagrpo.planning.links import place_ranks
from megagrpo.planning.plan_report import as_json, proposal_words, proposals, report
from megagrpo.planning.publish_bytes import forecast_publish
from megagrpo.planning.recordings import describe_model, record_all, representative_ranks, resolve_all
from megagrpo.planning.search import best_layouts
from megagrpo.planning.step_time import (
    Plan,
    Target,
    engines_of,
    load_of,
    make_target,
    plan_step,
    trainer_problems,
    trainers_of,
)
from megagrpo.planning.trainer_measured import measured
from megagrpo.system.run_folder import write_whole

_MAX_RECORDED = 64  # different trainer ranks: about a second each
_SHIPPED_MODELS = Path(megagrpo.__file__).parents[1] / "configs" / "models"


@dataclass(frozen=True)
class Options:
    """What the command line of `megagrpo plan` says."""

    hardware: str = "H100"
    gpus_per_node: int = 8
    lengths: str | None = None
    lengths_from: Path | None = None
    search: int | None = None  # nodes to search layouts for
    quick: bool = False  # closed forms alone: SGLang is not asked, and no rank is recorded
    json: Path | None = None  # where all figures go


def plan_command(config: ExperimentConfig, options: Options) -> tuple[str, bool]:
    """Returns the plan as text, and whether the experiment fits; writes all figures to `options.json` as JSON.

    Raises ValueError for a model that is not known or that layouts or nodes cannot hold.
    """
    config = with_model(config)
    target = target_of(config, options)
    plan = plan_step(config, target) if options.quick else exact_plan(config, target, options)
    remedy: list[str] = []
    if plan.problems:
        remedy = next(_fitting_changes(config, target), [])
    lines = report(plan, remedy, options.hardware)
    found: list[Plan] = []
    if options.search is not None:
        found = best_layouts(config, target, options.search)
        lines += ["", *proposals(found, options.search), *proposal_words(found, plan)]
    if options.json is not None:
        data = {"plan": as_json(plan), "proposals": [as_json(other) for other in found]}
        write_whole(options.json, dumps(data, indent=1, default=float) + "\n")
    return "\n".join(lines), not plan.problems


def with_model(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the experiment with a folder that has the model's config.json: its own, or the one that is shipped."""
    shipped = _SHIPPED_MODELS / Path(config.model.path).name
    if model_description(config) is None and (shipped / "config.json").is_file():
        return config.model_copy(update={"model": ModelConfig(path=str(shipped))})
    return config


def target_of(config: ExperimentConfig, options: Options) -> Target:
    """Returns what the experiment is planned on. Raises ValueError with everything that does not fit together."""
    arch = architecture_of(describe_model(config))
    hardware = hardware_of(options.hardware)
    rollout = config.rollout
    place_ranks(
        config.actor.world_size, rollout.num_engines, rollout.tp, rollout.nodes_per_engine, options.gpus_per_node
    )
    return make_target(arch, hardware, options.gpus_per_node, _lengths(config, options))


def _lengths(config: ExperimentConfig, options: Options) -> Lengths:
    if options.lengths is not None and options.lengths_from is not None:
        raise ValueError("--lengths and --lengths-from both say how long responses are; give one of them")
    if options.lengths is not None:
        return given_lengths(options.lengths, config)
    if options.lengths_from is not None:
        return lengths_of_run(options.lengths_from, config)
    return assumed_lengths(config)


def exact_plan(config: ExperimentConfig, target: Target, options: Options) -> Plan:
    """Plans with SGLang's own arguments, Megatron's own memory, and the transfer as the transports would make it.

    Not the transfer from so many different ranks that recording them takes minutes: `megagrpo plan-weights` does that.
    """
    actor = config.actor.model_copy(update={"transformer_engine": False})  # which needs CUDA, and keeps as much
    with ThreadPoolExecutor(1) as beside:
        trainers = beside.submit(
            measured, trainers_of(config, target), describe_model(config), actor, load_of(config, target)
        )
        server, publish = _engines_and_publish(config, target, options)
        return plan_step(config, target, server, publish, trainers=trainers.result())


def _engines_and_publish(
    config: ExperimentConfig, target: Target, options: Options
) -> tuple[Server, tuple[float, str] | None]:
    gpu, rollout = (target.hardware, options.gpus_per_node), config.rollout
    if len(set(representative_ranks(config.actor))) > _MAX_RECORDED or config.weights.transport in ("disk", "ipc"):
        return server_of(rollout, resolve_all([config], gpu)[0]), None
    (recorded,) = record_all([config], gpu)
    cluster = place_ranks(
        config.actor.world_size, rollout.num_engines, rollout.tp, rollout.nodes_per_engine, options.gpus_per_node
    )
    ((reshard, broadcast),) = forecast_publish(config, recorded, [cluster], target.hardware.rates)
    forecast = {"reshard": reshard, "broadcast": broadcast}[config.weights.transport]
    return server_of(rollout, recorded.server), (forecast.seconds, forecast.limit)


def _fitting_changes(config: ExperimentConfig, target: Target) -> Iterator[list[str]]:
    """Yields changes of one thing that make both sides fit, the smallest first, as words of `--set`."""
    trainers = [] if _trainers_fit(config, target) else list(_trainer_changes(config))
    engines = [] if not engines_of(config, target).problems else list(_engine_changes(config, target))
    for trainer_words, changed in trainers or [([], config)]:
        if not _trainers_fit(changed, target):
            continue
        for engine_words, rollout in engines or [([], config.rollout)]:
            both = changed.model_copy(update={"rollout": rollout})
            if not engines_of(both, target).problems:
                yield [*trainer_words, *engine_words]


def _trainers_fit(config: ExperimentConfig, target: Target) -> bool:
    if layout_problems(target.arch, config.actor):
        return False
    return not trainer_problems(target, trainers_of(config, target))


def _trainer_changes(config: ExperimentConfig) -> Iterator[tuple[list[str], ExperimentConfig]]:
    actor, longest = config.actor, longest_samples(config)["data"]
    p = actor.parallel
    options: list[tuple[dict, dict]] = []
    if actor.recompute != "full":
        options.append(({"recompute": "full"}, {}))
    if actor.micro_batch_tokens > longest:
        options.append(({"micro_batch_tokens": longest}, {}))
    options += [({}, {"ep": p.ep * 2}), ({}, {"cp": p.cp * 2}), ({}, {"tp": p.tp * 2}), ({}, {"ep": p.ep * 4})]
    if not p.first_stage_layers and not p.last_stage_layers:
        options.append(({}, {"pp": p.pp * 2}))
    options += [({"world_size": actor.world_size * 2}, {}), ({"world_size": actor.world_size * 2}, {"ep": p.ep * 2})]
    for own, layout in options:
        parallel = p.model_copy(update=layout)
        changed = actor.model_copy(update={**own, "parallel": parallel})
        if changed.world_size % math.lcm(
            parallel.tp * parallel.pp * parallel.cp, parallel.etp * parallel.ep * parallel.pp
        ):
            continue
        words = [f"actor.{key}={value}" for key, value in own.items()]
        words += [f"actor.parallel.{key}={value}" for key, value in layout.items()]
        yield words, config.model_copy(update={"actor": changed})


def _engine_changes(config: ExperimentConfig, target: Target) -> Iterator[tuple[list[str], object]]:
    rollout = config.rollout
    for fraction in (0.88, 0.9, 0.92):
        if fraction > rollout.mem_fraction:
            yield [f"rollout.mem_fraction={fraction}"], rollout.model_copy(update={"mem_fraction": fraction})
    for times in (2, 4, 8):
        tp, engines = rollout.tp * times, max(1, rollout.num_engines // times)
        change = {"tp": tp, "num_engines": engines, "nodes_per_engine": max(1, -(-tp // target.gpus_per_node))}
        if target.arch.num_heads % tp == 0:
            yield [f"rollout.{key}={value}" for key, value in change.items()], rollout.model_copy(update=change)
