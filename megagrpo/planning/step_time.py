"""One step of an experiment on its cluster: memory of both sides, the seconds of each phase, and what limits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megagrpo.check.problems import longest_samples
from megagrpo.config.schema import ExperimentConfig
from megagrpo.families.architecture import Architecture
from megagrpo.planning.checkpoint_cost import checkpoint_cost
from megagrpo.planning.engine_memory import EngineSide, Server, engine_side, server_of
from megagrpo.planning.hardware import Hardware, efficiency
from megagrpo.planning.lengths import Lengths
from megagrpo.planning.rollout_time import EngineSpeed, RolloutTime, rollout_time
from megagrpo.planning.train_time import Schedule, TrainSpeed, TrainTime, schedule_of, train_time
from megagrpo.planning.trainer_memory import Load, TrainerSide, trainer_side
from megagrpo.planning.work import ITEM, ModelWork, model_work

_ESTIMATED = ", by the fullest link; `megagrpo plan-weights` plans every piece"


@dataclass(frozen=True)
class Target:
    """What an experiment is planned on, and with which samples."""

    arch: Architecture
    work: ModelWork
    hardware: Hardware
    gpus_per_node: int
    lengths: Lengths


@dataclass(frozen=True)
class Plan:
    """What an experiment needs and how long a step takes, in bytes of one rank and in seconds."""

    config: ExperimentConfig
    target: Target
    trainers: TrainerSide
    engine: EngineSide
    rollout: RolloutTime
    train: TrainTime
    seconds: Mapping[str, float]  # by phase, of one step; a checkpoint's share of a step
    publish_limit: str
    problems: Sequence[str] = field(default=())

    @property
    def step(self) -> float:
        """Returns the seconds of a step whose phases follow one another."""
        return sum(self.seconds.values())

    @property
    def asynchronous(self) -> float:
        """Returns the seconds of a step while engines sample for the next one: the slower side, and the publish."""
        rest = self.seconds["publish"] + self.seconds["checkpoint"]
        trained = self.step - self.seconds["rollout"] - rest
        return max(self.seconds["rollout"], trained) + rest

    @property
    def idle(self) -> float:
        """Returns the share of all GPUs' time in which one side waits for the other."""
        trainers = self.config.actor.world_size
        engines = self.config.rollout.num_engines * self.config.rollout.tp
        trained = self.step - self.seconds["rollout"]
        return (trainers * self.seconds["rollout"] + engines * trained) / (trainers + engines) / self.step

    @property
    def limit(self) -> str:
        """Names the phase that takes longest, and what takes the most of it."""
        phase = max(self.seconds, key=lambda name: self.seconds[name])
        inner = {"rollout": self.rollout.limit, "update": self.train.limit, "publish": self.publish_limit}.get(phase)
        return phase if inner is None else f"{phase}: {inner}"


def make_target(arch: Architecture, hardware: Hardware, gpus_per_node: int, lengths: Lengths) -> Target:
    """Counts the model once, for many plans of it."""
    return Target(arch, model_work(arch), hardware, gpus_per_node, lengths)


def plan_step(
    config: ExperimentConfig,
    target: Target,
    server: Server | None = None,
    publish: tuple[float, str] | None = None,
    schedule: Schedule | None = None,
    rollout: RolloutTime | None = None,
    trainers: TrainerSide | None = None,
) -> Plan:
    """Plans one step.

    server: as SGLang resolved it, else as the experiment says. publish: seconds and what takes them, from the transfer
    that was planned; else from the bytes of the fullest link. schedule, rollout, trainers: where they are known.
    """
    trainers = trainers or trainers_of(config, target)
    engine = engines_of(config, target, server)
    rollout = rollout or sampling_of(config, target, engine)
    train = training_of(config, target, trainers, schedule)
    algorithm = config.algorithm
    old = config.train.updates_of_step > 1 or algorithm.needs_old_logprobs
    publish = publish or publish_seconds(config, target, engine)
    seconds = {
        "rollout": rollout.seconds,
        "logprobs": train.forward if old else 0.0,
        "reference": train.forward if algorithm.uses_reference else 0.0,
        "update": train.update,
        "publish": publish[0],
        "checkpoint": _checkpoint_seconds(config, target),
    }
    problems = [*trainer_problems(target, trainers), *engine.problems]
    return Plan(config, target, trainers, engine, rollout, train, seconds, publish[1], problems)


def load_of(config: ExperimentConfig, target: Target) -> Load:
    """Returns what a trainer rank is given to compute: full micro-batches of the longest samples."""
    imbalance = efficiency("expert imbalance") if target.arch.is_moe and config.actor.parallel.ep > 1 else 1.0
    return Load(config.actor.micro_batch_tokens, longest_samples(config)["data"], imbalance)


def trainers_of(config: ExperimentConfig, target: Target) -> TrainerSide:
    """Returns the trainers' memory and work."""
    return trainer_side(
        target.arch,
        config.actor,
        load_of(config, target),
        reference=config.algorithm.uses_reference,
        bucket_mb=config.weights.bucket_mb,
        ranks_per_node=target.gpus_per_node,
    )


def trainer_problems(target: Target, trainers: TrainerSide) -> list[str]:
    """Returns where the fullest trainer rank has not the memory it needs."""
    phase, fullest = trainers.peak
    room = usable_bytes(target)
    if fullest.total <= room:
        return []
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in fullest.parts.items())
    return [
        f"trainers do not fit: in {phase} rank {fullest.rank} ({fullest.kind}) needs {fullest.total / 1e9:.1f} GB "
        f"({parts}), and has {room / 1e9:.1f}"
    ]


def usable_bytes(target: Target) -> float:
    """Returns the bytes of a GPU that a trainer rank can fill: without its CUDA context and what is lost in pieces."""
    return (target.hardware.memory_bytes - efficiency("context bytes")) * (1 - efficiency("fragmentation"))


def engines_of(config: ExperimentConfig, target: Target, server: Server | None = None) -> EngineSide:
    """Returns an engine rank's memory."""
    longest = max(longest_samples(config).values())
    return engine_side(target.work, server or server_of(config.rollout), target.lengths, longest, target.hardware)


def sampling_of(config: ExperimentConfig, target: Target, engine: EngineSide) -> RolloutTime:
    """Returns the time of the rollout; endless for engines that cannot hold one sample."""
    if engine.problems:
        nothing = dict.fromkeys(("weights",), math.inf)
        return RolloutTime(math.inf, nothing, math.inf, math.inf, 0.0, 0.0, 0, 0, 0.0)
    speed = EngineSpeed(target.work, engine, target.hardware, target.gpus_per_node)
    samples = config.train.num_prompts_per_step * config.train.group_size
    return rollout_time(speed, engine, target.lengths, samples, config.rollout.num_engines)


def training_of(
    config: ExperimentConfig, target: Target, trainers: TrainerSide, schedule: Schedule | None = None
) -> TrainTime:
    """Returns the time of the trainers' passes."""
    speed = TrainSpeed(target.work, config.actor, target.hardware, target.gpus_per_node)
    schedule = schedule or update_schedule(config, target)
    train = config.train
    return train_time(speed, trainers.stages, schedule, config.actor, train.updates_of_step, train.num_epochs_per_step)


def update_schedule(config: ExperimentConfig, target: Target) -> Schedule:
    """Returns the micro-batches of one update."""
    samples = config.train.num_prompts_per_step * config.train.group_size // config.train.num_updates_per_step
    lengths = target.lengths.spread(max(1, samples)) + target.lengths.prompt
    return schedule_of(lengths, target.arch, config.actor)


def publish_seconds(config: ExperimentConfig, target: Target, engine: EngineSide) -> tuple[float, str]:
    """Returns the seconds of a publish by the fullest link, were every trainer rank to send as much as the others."""
    rollout, rates = config.rollout, target.hardware.rates
    width = ITEM if rollout.dtype == "bfloat16" else 4
    speed = rates.between_gb_s * 1e9 * rates.efficiency
    if config.weights.transport == "broadcast":
        return target.work.total * width * rollout.num_engines / speed, f"sending from trainer 0{_ESTIMATED}"
    if config.weights.transport == "disk":
        engines = rollout.num_engines
        return target.work.total * width * (1 + engines) / (config.checkpoint.disk_gb_s * 1e9), "the shared disk"
    received = engine.weights / speed
    sent = engine.weights * rollout.tp * rollout.num_engines / config.actor.world_size / speed
    seconds = max(received, sent) + rates.call_ms / 1e3
    return seconds, ("sending from the trainers" if sent > received else "receiving on an engine") + _ESTIMATED


def _checkpoint_seconds(config: ExperimentConfig, target: Target) -> float:
    """Returns a step's share of the saves: copied to host memory, and written where training waits for it."""
    checkpoint, actor = config.checkpoint, config.actor
    if not checkpoint.every:
        return 0.0
    node = min(target.gpus_per_node, actor.world_size)
    cost = checkpoint_cost(target.arch, actor, node)
    background = checkpoint.asynchronous is True or (
        checkpoint.asynchronous == "auto" and actor.world_size > target.gpus_per_node
    )
    copied = cost.file_bytes / actor.world_size / (efficiency("host copy GB/s") * 1e9)
    written = cost.file_bytes / (checkpoint.disk_gb_s * 1e9)
    return (copied if background else copied + written) / checkpoint.every
