"""Checks that an experiment fits into the memory of its GPUs: trainers, engines, and both if they
share GPUs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import megagrpo
from megagrpo.check.problems import layout_problems
from megagrpo.check.rules.engine_layout import server_of
from megagrpo.check.rules.placement import needs_gpus
from megagrpo.check.rules.subject import Subject, longest_samples, model_description
from megagrpo.config.hardware import Hardware
from megagrpo.config.schema import ExperimentConfig, ModelConfig
from megagrpo.config.wording import dotted
from megagrpo.models.architecture import Architecture
from megagrpo.models.table import (
    architecture_of,
    model_problems,
    parameter_counts,
    stored_otherwise,
)
from megagrpo.tools.plan.engine_memory import (
    EngineSide,
    Lengths,
    assumed_lengths,
    engine_side,
    gpu_phases,
    memory_problems,
)
from megagrpo.tools.plan.hardware import EXPERT_IMBALANCE, hardware_of
from megagrpo.tools.plan.trainer_memory import Load, RankMemory, TrainerSide, links, trainer_side
from megagrpo.tools.plan.work import ModelWork, model_work

_LARGE = 1e9  # parameters, from which float32 on any device is no choice but a default
_SHIPPED_MODELS = Path(megagrpo.__file__).parents[1] / "configs" / "models"


@dataclass(frozen=True)
class StepMemory:
    """Memory of both sides in a step. phases: of the fullest trainer GPU, with its engine."""

    trainers: TrainerSide
    engine: EngineSide
    phases: Mapping[str, RankMemory]
    problems: tuple[str, ...]


def step_memory(
    config: ExperimentConfig,
    work: ModelWork,
    lengths: Lengths,
    gpu: Hardware,
    gpus_per_node: int,
) -> StepMemory:
    """Returns the memory of one step. Raises ValueError if the layers cannot be cut into stages."""
    longest = max(longest_samples(config).values())
    rollout = config.rollout
    engine = engine_side(work, server_of(rollout), lengths, longest, gpu)
    sent = engine.weights * rollout.tp * rollout.num_engines
    samples = config.train.num_prompts_per_step * config.train.group_size
    load = load_of(config, work.arch)
    if config.algorithm.uses_reference and config.algorithm.kl.estimator == "full":
        load = replace(load, reference_positions=samples * lengths.mean)
    trainers = trainer_side(
        work.arch,
        config.actor,
        load,
        reference=config.algorithm.uses_reference,
        bucket_mb=config.weights.bucket_mb,
        ranks_per_node=gpus_per_node,
        sent_bytes=sent if config.weights.delta else 0.0,
    )
    phases = gpu_phases(config, trainers, engine, work.arch.hidden_size)
    return StepMemory(trainers, engine, phases, memory_problems(phases, engine, gpu))


def load_of(config: ExperimentConfig, arch: Architecture) -> Load:
    """Returns the work of a trainer rank: full micro-batches of the longest samples, of which one
    above the budget is a micro-batch of its own."""
    imbalance = EXPERT_IMBALANCE if arch.is_moe and config.actor.parallel.ep > 1 else 1.0
    return Load(
        max(config.actor.micro_batch_tokens, longest_samples(config)["data"]),
        imbalance,
        links(config),
        colocate=config.rollout.colocate,
        quantized=config.rollout.quantization is not None,
        exports=config.checkpoint.hf_every > 0,
    )


def with_model(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the experiment with a folder that has the model's config.json: its own, or the
    shipped one."""
    shipped = _SHIPPED_MODELS / Path(config.model.path).name
    if model_description(config) is None and (shipped / "config.json").is_file():
        return config.model_copy(update={"model": ModelConfig(path=str(shipped))})
    return config


def experiment_memory(
    config: ExperimentConfig, arch: Architecture, gpus_per_node: int | None = None
) -> StepMemory:
    """Returns the memory of one step on the cluster that the experiment is for."""
    gpus = gpus_per_node or config.cluster.gpus_per_node
    gpu = hardware_of(config.cluster.gpu)
    return step_memory(config, model_work(arch), assumed_lengths(config), gpu, gpus)


def served_memory(
    config: ExperimentConfig, lengths: Lengths | None = None, gpu: Hardware | None = None
) -> Iterator[tuple[str, EngineSide]]:
    """Yields the name of each served model whose engines the run starts, and the memory of a rank
    of them; none of models that nothing describes."""
    longest = longest_samples(config)["data"]
    lengths = lengths or assumed_lengths(config)
    gpu = gpu or hardware_of(config.cluster.gpu)
    for name in filter(None, config.engine_sizes):
        theirs = with_model(config.for_model(name))
        hf = model_description(theirs)
        if hf is None or model_problems(hf) or stored_otherwise(hf):
            continue
        work = model_work(architecture_of(hf))
        yield name, engine_side(work, server_of(theirs.rollout), lengths, longest, gpu)


def served_misfits(
    config: ExperimentConfig, lengths: Lengths | None = None, gpu: Hardware | None = None
) -> list[str]:
    """Returns why engines of served models do not fit into the memory of GPUs."""
    if not needs_gpus(config):
        return []
    found = served_memory(config, lengths, gpu)
    return [
        f"{dotted(config.keys_of(name))}: {text}" for name, side in found for text in side.problems
    ]


def fit_problems(config: ExperimentConfig, gpus_per_node: int | None = None) -> list[str]:
    """Returns why an experiment for GPUs does not fit into their memory, or that it does not say
    whether it is for GPUs; [] for a model that nothing describes."""
    arch = Subject.of(config, model_description(with_model(config))).arch
    if arch is None:
        return []
    problems = []
    if not needs_gpus(config):
        size = parameter_counts(arch).total
        if config.actor.device == "cpu" or size < _LARGE:
            return []
        problems = [
            f"actor.dtype is float32, for a model of {size / 1e9:.1f} B parameters: on GPUs say "
            "actor.dtype: bfloat16, which rollout.dtype follows; on a CPU say actor.device: cpu"
        ]
    if layout_problems(arch, config.actor):
        return problems
    problems += served_misfits(config)
    return problems + list(experiment_memory(config, arch, gpus_per_node).problems)
