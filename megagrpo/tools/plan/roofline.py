"""A roofline of one step: an upper bound on speed, no forecast. Products at the GPU's peak, bytes
at the links' rates.

Phases follow one another and nothing inside a phase overlaps. docs/planning.md states what counts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from megagrpo.check.problems import described_architecture
from megagrpo.check.rules.engine_layout import Server
from megagrpo.config.hardware import Hardware
from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.architecture import Architecture
from megagrpo.system.errors import translated
from megagrpo.tools.plan.engine_memory import (
    EngineSide,
    Lengths,
    assumed_lengths,
    assumed_prompt,
    expert_bytes,
    sorted_lengths,
    weight_bytes,
)
from megagrpo.tools.plan.fitting import StepMemory, step_memory
from megagrpo.tools.plan.hardware import HOST_GB_S, HOST_MEMORY_GB_S, hardware_of
from megagrpo.tools.plan.trainer_memory import Stage
from megagrpo.tools.plan.work import (
    HOST_ADAM_BYTES,
    ModelWork,
    model_work,
    optimizer_bytes,
)

# read and written for each float32 weight of a shard: gradient, two moments, the weight
_OPTIMIZER_BYTES = 40.0


@dataclass(frozen=True)
class Target:
    """GPUs, model and lengths of a plan."""

    arch: Architecture
    hardware: Hardware
    gpus_per_node: int
    lengths: Lengths

    @cached_property
    def work(self) -> ModelWork:
        """Returns the counts of the model, made once for many plans."""
        return model_work(self.arch)

    @property
    def memory(self) -> float:
        """Bytes a second of a GPU's memory."""
        return self.hardware.memory_tb_s * 1e12

    def link(self, ranks: int) -> float:
        """Returns the bytes a second of a rank towards a group of as many consecutive ranks."""
        rates = self.hardware.rates
        return (rates.inside_gb_s if ranks <= self.gpus_per_node else rates.between_gb_s) * 1e9


def target_of(
    config: ExperimentConfig,
    hardware: str | None = None,
    gpus_per_node: int | None = None,
    lengths: str | None = None,
) -> Target:
    """Returns the target of a plan; what is None is as section `cluster` says, or assumed.

    lengths: see `given_lengths`. Raises ValueError for an unknown GPU, model or length.
    """
    return Target(
        described_architecture(config),
        hardware_of(hardware or config.cluster.gpu),
        gpus_per_node or config.cluster.gpus_per_node,
        assumed_lengths(config) if lengths is None else given_lengths(lengths, config),
    )


def given_lengths(text: str, config: ExperimentConfig) -> Lengths:
    """Reads `--lengths`: a mean, or a file with one number of tokens a line. Raises ValueError for
    other text."""
    if Path(text).is_file():
        with translated(f"--lengths {text}", ValueError):
            numbers = [float(word) for word in Path(text).read_text().split()]
        return Lengths(assumed_prompt(config), sorted_lengths(numbers, text), f"file {text}")
    longest = config.sampling.max_response_tokens
    if not text.replace(".", "", 1).isdecimal() or not 0 < float(text) <= longest:
        raise ValueError(
            f"--lengths {text}: no such file, and no mean between 0 and "
            f"sampling.max_response_tokens {longest}"
        )
    return assumed_lengths(config, float(text))


@dataclass(frozen=True)
class Plan(StepMemory):
    """Memory of both sides and the seconds of a step. parts: of the bound, by phase and by what
    takes them."""

    config: ExperimentConfig
    target: Target
    parts: Mapping[str, Mapping[str, float]]

    @property
    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each phase: rollout, logprobs, update, publish."""
        return {phase: sum(parts.values()) for phase, parts in self.parts.items()}

    @property
    def synchronous(self) -> float:
        """Returns the seconds of a step whose phases follow one another."""
        return sum(self.seconds.values())

    @property
    def off_policy(self) -> float:
        """Returns the seconds of a step while engines sample for the next one: the slower side, and
        the publish."""
        at = self.seconds
        return max(at["rollout"], at["logprobs"] + at["update"]) + at["publish"]

    @property
    def step(self) -> float:
        """Returns the seconds of a step as the experiment runs it: off-policy with
        rollout.max_staleness."""
        return self.off_policy if self.config.rollout.max_staleness else self.synchronous


def plan_step(config: ExperimentConfig, target: Target) -> Plan:
    """Returns memory and bound of one step. Raises ValueError if the layers cannot be cut into
    stages."""
    memory = step_memory(config, target.work, target.lengths, target.hardware, target.gpus_per_node)
    forward, update = train_seconds(config, target, memory.trainers.stages)
    algorithm = config.algorithm
    forwards = int(algorithm.computes_old_logprobs(config.train.updates_of_step))
    forwards += algorithm.uses_reference
    parts = {
        "rollout": rollout_seconds(config, target, memory.engine),
        "logprobs": {"forward": forward * forwards},
        "update": update,
        "publish": publish_seconds(config, target, memory.engine),
    }
    if config.rollout.colocate:  # the optimizer's state leaves for the engines and comes back
        state = memory.trainers.phases["rollout"].parts.get("optimizer", 0.0)
        parts["publish"]["state to the host"] = state / HOST_GB_S / 1e9
        parts["update"]["state from the host"] = state / HOST_GB_S / 1e9
    return Plan(**vars(memory), config=config, target=target, parts=parts)


def rollout_seconds(
    config: ExperimentConfig, target: Target, engine: EngineSide
) -> dict[str, float]:
    """Returns the seconds of the fullest engine by part; infinite for an engine that cannot hold
    one sample.

    The engine decodes with all its slots full until its last wave, whose samples end one after the
    other.
    """
    if engine.concurrent < 1:
        return {"weights": math.inf}
    lengths = target.lengths
    server = engine.server
    groups = config.train.num_prompts_per_step * config.train.group_size
    samples = math.ceil(groups / config.rollout.num_engines)
    slots = min(samples, engine.concurrent)
    last = lengths.spread(slots)
    between = np.diff(last, prepend=0.0)  # decode steps from one end to the next
    steps = np.concatenate([[(samples - slots) * lengths.mean / slots], between])
    running = np.concatenate([[slots], np.arange(slots, 0, -1)]).astype(np.float64)
    held = np.concatenate([[lengths.running], lengths.prompt + last - between / 2])
    decode = decode_seconds(target, server, running, held)
    parts = {name: float(steps @ seconds) for name, seconds in decode.items()}
    parts["communication"] += samples * lengths.prompt * _all_reduce_seconds(target, server)
    work = target.work
    attention = target.arch.attention
    pairs = float(_chosen_pairs(target, np.array(lengths.prompt))) * attention.pair_flops
    pairs += lengths.prompt**2 / 2 * attention.index_flops * server.tp
    flops = (lengths.prompt * work.token_flops + pairs * target.arch.attention_layers) / server.tp
    prefill = flops / target.hardware.peak(server.width)
    return {**parts, "prefill": samples * prefill}


def decode_seconds(
    target: Target, server: Server, running: np.ndarray, held: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns the seconds of decode steps by part, float64 [steps]: of `running` samples with
    `held` tokens each.

    Weights and cache are read once, and recurrent states also written; "compute" is what the products take beyond that.
    """
    work = target.work
    experts = expert_bytes(work, server)
    dense = weight_bytes(work, server) - experts
    if not work.arch.tied:  # only few rows of the embedding are read
        dense -= work.vocabulary / server.attention_tp * server.width
    weights = (dense + experts * (1.0 - (1.0 - work.share) ** running)) / target.memory
    samples = running * server.attention_tp / server.tp  # of one attention replica
    context = samples * held
    chosen = samples * work.seen(held)
    states = 2 * samples * work.state_bytes(server.attention_tp, server.width)
    latents = work.cache_bytes(server.attention_tp, server.cache_width) - work.index_bytes
    cache = (chosen * latents + context * work.index_bytes + states) / target.memory
    attention = target.arch.attention
    read = chosen * attention.decode_pair_flops / server.attention_tp
    scores = (read + context * attention.index_flops) * target.arch.attention_layers
    flops = running * work.token_flops / server.tp + scores
    products = flops / target.hardware.peak(server.width)
    return {
        "weights": weights,
        "cache": cache,
        "compute": np.maximum(0.0, products - weights - cache),
        "communication": running * _all_reduce_seconds(target, server),
    }


def _chosen_pairs(target: Target, sizes: np.ndarray) -> np.ndarray:
    """Returns, for sequences of these lengths, how many pairs of a query and a key attention
    computes."""
    attention = target.arch.attention
    seen = np.minimum(sizes, attention.most_keys)
    limited = seen * sizes - seen**2 / 2
    return attention.limited_share * limited + (1.0 - attention.limited_share) * sizes**2 / 2


def _all_reduce_seconds(target: Target, server: Server) -> float:
    """Returns the seconds of a token's two all-reduces a layer."""
    sent = 2 * (server.tp - 1) / server.tp * target.arch.hidden_size * server.width
    return 2 * target.arch.num_layers * sent / target.link(server.tp)


def train_seconds(
    config: ExperimentConfig, target: Target, stages: Sequence[Stage]
) -> tuple[float, dict[str, float]]:
    """Returns the seconds of a forward over all samples of a step, and those of its updates by
    part.

    Samples are spread evenly over data-parallel ranks and fill as few micro-batches as their tokens
    allow.
    """
    train = config.train
    parallel = config.actor.parallel
    sizes = target.lengths.prompt + target.lengths.responses
    samples = train.num_prompts_per_step * train.group_size / train.num_updates_per_step
    samples /= config.actor.dp
    tokens = samples * float(sizes.mean())
    pairs = samples * float((sizes**2).mean()) / 2
    chosen = samples * float(_chosen_pairs(target, sizes).mean())
    count = max(1, math.ceil(tokens / config.actor.micro_batch_tokens))
    forwards = [
        _forward(config, target, each, tokens / count, pairs / count, chosen / count)
        for each in stages
    ]
    # a backward sends as much as a forward, and has twice the products: frozen weights have no
    # gradients, so of adapters alone once
    passes = 2 + (config.actor.recompute == "full")
    products = passes + (config.actor.lora is None)
    whole = _longest(
        {name: at * (products if name == "compute" else passes) for name, at in parts.items()}
        for parts in forwards
    )
    bubble = (parallel.pp - 1) / parallel.vpp  # micro-batches
    parts = {name: seconds * count for name, seconds in whole.items()}
    parts["pipeline bubble"] = bubble * sum(whole.values())
    parts |= _longest(_after_backward(config, target, stage) for stage in stages)
    forward = (count + bubble) * sum(_longest(forwards).values())
    updates = {name: seconds * train.updates_of_step for name, seconds in parts.items()}
    return forward * train.num_updates_per_step, updates


def _longest(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    return max(parts, key=lambda each: sum(each.values()))


def _forward(
    config: ExperimentConfig,
    target: Target,
    stage: Stage,
    tokens: float,
    pairs: float,
    chosen: float,
) -> dict[str, float]:
    """Returns the seconds of one stage's forward of one micro-batch, by part."""
    parallel = config.actor.parallel
    cost = stage.cost
    scale = tokens / stage.load.tokens
    attention = cost.pair_flops * pairs + cost.chosen_flops * chosen
    flops = cost.flops * scale + attention / parallel.cp
    parts = {"compute": flops / target.hardware.peak(stage.width)}
    # consecutive ranks with the group in them
    spans = {
        "tp": parallel.tp,
        "cp": parallel.tp * parallel.cp,
        "pp": config.actor.world_size,
    }
    for group, num_bytes in cost.sent.items():
        if group == "ep":  # over both links at once
            rates = target.hardware.rates
            inside = max(0.0, target.gpus_per_node / parallel.etp - 1) / max(parallel.ep - 1, 1)
            near = min(1.0, inside)
            seconds = max(near / rates.inside_gb_s, (1 - near) / rates.between_gb_s) / 1e9
        else:
            seconds = 1 / target.link(spans[group])
        parts[f"{group} communication"] = num_bytes * scale * seconds
    return parts


def _after_backward(config: ExperimentConfig, target: Target, stage: Stage) -> dict[str, float]:
    """Returns the seconds of an update besides its passes: gradient sums, Adam, and the new weights
    to all."""
    parallel = config.actor.parallel
    shared = config.actor.optimizer.distributed
    ranks = config.actor.world_size // parallel.pp
    parts = {"gradients": 0.0, "optimizer": 0.0, "weights to all": 0.0}
    # apart: the neighbors of a group
    for group, apart in (("dp", parallel.tp), ("edp", parallel.etp * parallel.ep)):
        size = ranks // apart
        num_bytes = stage.gradient_bytes[group]
        seconds = num_bytes * (size - 1) / size / target.link(size * apart)
        parts["gradients"] += seconds * (1 if shared else 2)
        parts["weights to all"] += seconds / 2 if shared else 0.0
        elements = num_bytes / 4 / (size if shared else 1)
        parts["optimizer"] += elements * _optimizer_seconds(config, target, stage.width)
    return parts


def _optimizer_seconds(config: ExperimentConfig, target: Target, width: int) -> float:
    """Returns the seconds of one trained element of a rank: Adam reads and writes its state where
    it lies, and the host's share crosses to it and back."""
    each = optimizer_bytes(config.actor)
    on_host = each.host / HOST_ADAM_BYTES
    ranks = min(target.gpus_per_node, config.actor.world_size)
    crossing = (each.gradient + width) / HOST_GB_S / 1e9
    host = _OPTIMIZER_BYTES * ranks / HOST_MEMORY_GB_S / 1e9 + crossing
    return (1 - on_host) * _OPTIMIZER_BYTES / target.memory + on_host * host


def publish_seconds(
    config: ExperimentConfig, target: Target, engine: EngineSide
) -> dict[str, float]:
    """Returns the seconds of the fullest link if every trainer rank sends equally much, whatever
    the transport."""
    ranks = config.rollout.tp * config.rollout.num_engines
    world = config.actor.world_size
    link = target.link(world + (0 if config.rollout.colocate else ranks))
    received = engine.weights
    sent = received * ranks / world
    fullest = "sending from the trainers" if sent > received else "receiving on an engine"
    return {fullest: max(sent, received) / link}
