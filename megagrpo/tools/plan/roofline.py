"""A roofline of one step: an upper bound on speed, no forecast. Products at the GPU's peak, bytes
at the links' rates.

Phases follow one another and nothing inside a phase overlaps. `--measured RUN` divides each phase
by the share of its own bound that a real run reached. docs/planning.md states the formulas.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np

from megagrpo.check.engine_memory import (
    EngineSide,
    Lengths,
    Server,
    assumed_lengths,
    expert_bytes,
    lengths_of_run,
    weight_bytes,
)
from megagrpo.check.fitting import step_memory
from megagrpo.check.hardware import HOST_GB_S, Hardware
from megagrpo.check.layer_costs import ITEM, ModelWork, model_work
from megagrpo.check.problems import described_architecture
from megagrpo.check.trainer_memory import RankMemory, StageCost, TrainerSide
from megagrpo.config.load import load_config
from megagrpo.config.schema import ExperimentConfig
from megagrpo.families.architecture import Architecture
from megagrpo.monitor.record import read_metrics
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.plan.turns import ONE_TURN, Turns, turns_of_run

_OPTIMIZER_BYTES = (
    40.0  # read and written for each float32 weight of a shard: gradient, two moments, the weight
)
# of a proposed token, if no run has measured it; DeepSeek-V3 reports 0.85 to 0.9 (arXiv 2412.19437)
ACCEPTANCE = 0.8
PHASES = (
    "rollout",
    "logprobs",
    "update",
    "publish",
)  # logprobs: of the old policy and of the reference


@dataclass(frozen=True)
class Target:
    """GPUs, model and lengths of a plan. efficiency: share of the bound that a run reached, by
    phase; else 1."""

    arch: Architecture
    hardware: Hardware
    gpus_per_node: int
    lengths: Lengths
    turns: Turns = ONE_TURN
    efficiency: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def work(self) -> ModelWork:
        """Returns the counts of the model, made once for many plans."""
        return model_work(self.arch)


@dataclass(frozen=True)
class Plan:
    """Memory of both sides and the seconds of a step.

    parts: of the bound, by phase and by what takes them. phases: of the fullest trainer GPU, with
    its engine.
    """

    config: ExperimentConfig
    target: Target
    trainers: TrainerSide
    engine: EngineSide
    parts: Mapping[str, Mapping[str, float]]
    phases: Mapping[str, RankMemory]
    problems: tuple[str, ...]

    @property
    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each of PHASES."""
        efficiency = self.target.efficiency
        return {
            phase: sum(parts.values()) / efficiency.get(phase, 1.0)
            for phase, parts in self.parts.items()
        }

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

    @property
    def limit(self) -> str:
        """Returns the longest phase and the largest part of it."""
        phase = max(PHASES, key=lambda name: self.seconds[name])
        return f"{phase}: {max(self.parts[phase], key=lambda name: self.parts[phase][name])}"


def plan_step(config: ExperimentConfig, target: Target) -> Plan:
    """Returns memory and bound of one step. Raises ValueError if the layers cannot be cut into
    stages."""
    memory = step_memory(config, target.work, target.lengths, target.hardware, target.gpus_per_node)
    trainers, engine = memory.trainers, memory.engine
    forward, update = train_seconds(config, target, trainers.stages)
    old = config.train.updates_of_step > 1 or config.algorithm.needs_old_logprobs
    parts = {
        "rollout": rollout_seconds(config, target, engine),
        "logprobs": {"forward": forward * (int(old) + int(config.algorithm.uses_reference))},
        "update": update,
        "publish": publish_seconds(config, target, engine),
    }
    if config.data.images_key is not None and target.arch.vision is not None:
        _add_tower(parts, config, target)
    if config.rollout.colocate:  # the optimiser's state leaves for the engines and comes back
        moved = trainers.phases["rollout"].parts.get("optimiser", 0.0) / HOST_GB_S / 1e9
        parts["publish"]["state to the host"] = parts["update"]["state from the host"] = moved
    return Plan(config, target, trainers, engine, parts, memory.phases, memory.problems)


def rollout_seconds(
    config: ExperimentConfig, target: Target, engine: EngineSide
) -> dict[str, float]:
    """Returns the seconds of the fullest engine by part; infinite for an engine that cannot hold
    one sample.

    The engine decodes with all its slots full until its last wave, whose samples end one after the
    other. Each decode step reads weights and cache once; "compute" is what the products take beyond
    that.
    """
    if engine.concurrent < 1:
        return {"weights": math.inf}
    train, lengths, server = config.train, target.lengths, engine.server
    samples = math.ceil(train.num_prompts_per_step * train.group_size / config.rollout.num_engines)
    slots = min(samples, engine.concurrent)
    wave = lengths.spread(slots)
    steps = np.concatenate([[(samples - slots) * lengths.mean / slots], np.diff(wave, prepend=0.0)])
    running = np.concatenate([[slots], np.arange(slots, 0, -1)]).astype(np.float64)
    held = np.concatenate(
        [[lengths.running], lengths.prompt + wave - np.diff(wave, prepend=0.0) / 2]
    )
    turns = target.turns
    sampled = steps * (1 - turns.said)
    if config.rollout.draft_tokens is None:
        of_steps = decode_seconds(target, server, running, held)
    else:
        of_steps = drafted_seconds(target, server, running, held, config.rollout.draft_tokens)
    decode = {name: float(sampled @ each) for name, each in of_steps.items()}
    later = turns.tokens_read(lengths.prompt, lengths.mean)
    decode["communication"] += (
        samples
        * (lengths.prompt + later)
        * _all_reduced_bytes(target, server)
        / _engine_link(target, server)
    )
    pairs = lengths.prompt**2 / 2 + later * (lengths.prompt + lengths.mean / 2)
    prefill = samples * prefill_seconds(target, server, lengths.prompt + later, pairs)
    waited = (
        {"tools": turns.waited_s} if turns.waited_s else {}
    )  # of the last rollouts; others are sampled meanwhile
    return decode | {"prefill": prefill} | waited


def _add_tower(
    parts: Mapping[str, dict[str, float]], config: ExperimentConfig, target: Target
) -> None:
    """Adds the tower's seconds, as if all tokens of a prompt were of images: once a prompt on an
    engine and in each forward of a data-parallel rank, whose tensor- and context-parallel ranks all
    compute the whole tower.
    """
    vision, actor, train = target.arch.vision, config.actor, config.train
    assert vision is not None
    patches = target.lengths.prompt * vision.merge**2 * train.num_prompts_per_step
    seconds = 2 * patches * vision.products_of_a_patch / (target.hardware.bf16_tflops * 1e12)
    parts["rollout"]["tower"] = seconds / config.rollout.num_engines / config.rollout.tp
    forward = seconds / actor.dp
    parts["logprobs"]["tower"] = forward * (parts["logprobs"]["forward"] > 0)
    again = (
        0
        if actor.trained_vision == "none"
        else 2 + (actor.trained_vision == "all" and actor.recompute == "full")
    )
    parts["update"]["tower"] = forward * (1 + again) * train.num_epochs_per_step


def drafted_seconds(
    target: Target, server: Server, running: np.ndarray, held: np.ndarray, drafts: int
) -> dict[str, np.ndarray]:
    """Returns decode_seconds for one token of each sample if a draft proposes `drafts` tokens for
    each forward.

    The forward sees the last token and the proposed ones; before it the draft, one layer and the
    output layer, runs once for each. It gives 1 + a + ... + a^drafts tokens if each is accepted
    with probability a = ACCEPTANCE.
    """
    verify = decode_seconds(target, server, running, held, 1 + drafts)
    single = decode_seconds(target, server, running, held)
    head = target.work.vocabulary / server.tp * ITEM / (target.hardware.memory_tb_s * 1e12)
    tokens = sum(ACCEPTANCE**number for number in range(drafts + 1))
    proposed = {name: drafts / target.arch.num_layers * seconds for name, seconds in single.items()}
    proposed["weights"] = proposed["weights"] + drafts * head
    return {name: (seconds + proposed[name]) / tokens for name, seconds in verify.items()}


def decode_seconds(
    target: Target, server: Server, running: np.ndarray, held: np.ndarray, together: int = 1
) -> dict[str, np.ndarray]:
    """Returns the seconds of decode steps by part, float64 [steps]: of `running` samples with
    `held` tokens each.

    together: tokens of a sample that one step reads.
    """
    work, layers = target.work, target.arch.num_layers
    memory, peak = target.hardware.memory_tb_s * 1e12, target.hardware.bf16_tflops * 1e12
    experts = expert_bytes(work, server)
    dense = weight_bytes(work, server) - experts
    dense -= work.vocabulary / server.tp * ITEM  # only few of its rows are read
    weights = (dense + experts * (1.0 - (1.0 - work.share) ** (running * together))) / memory
    context = running * held * server.attention_tp / server.tp  # of one attention replica
    cache = context * work.cache_bytes(server.attention_tp, server.cache_width) / memory
    scores = context * work.decode_attention_flops * layers / server.attention_tp
    products = together * (running * work.token_flops / server.tp + scores) / peak
    return {
        "weights": weights,
        "cache": cache,
        "compute": np.maximum(0.0, products - weights - cache),
        "communication": together
        * running
        * _all_reduced_bytes(target, server)
        / _engine_link(target, server),
    }


def prefill_seconds(target: Target, server: Server, tokens: float, pairs: float) -> float:
    """Returns the seconds of the products of tokens that are read. pairs: of one of them and a
    token before it."""
    attention = pairs * target.work.attention_flops * target.arch.num_layers
    return (
        (tokens * target.work.token_flops + attention)
        / server.tp
        / (target.hardware.bf16_tflops * 1e12)
    )


def _all_reduced_bytes(target: Target, server: Server) -> float:
    """Returns the bytes that an engine rank sends for each token: two all-reduces a layer."""
    return (
        2
        * target.arch.num_layers
        * 2
        * (server.tp - 1)
        / server.tp
        * target.arch.hidden_size
        * ITEM
    )


def _engine_link(target: Target, server: Server) -> float:
    rates = target.hardware.rates
    return (rates.inside_gb_s if server.tp <= target.gpus_per_node else rates.between_gb_s) * 1e9


def train_seconds(
    config: ExperimentConfig, target: Target, stages: tuple[StageCost, ...]
) -> tuple[float, dict[str, float]]:
    """Returns the seconds of a forward over all samples of a step, and those of its updates by
    part.

    Samples are spread evenly over data-parallel ranks and fill as few micro-batches as their tokens
    allow.
    """
    actor, train, p, lengths = config.actor, config.train, config.actor.parallel, target.lengths
    samples = train.num_prompts_per_step * train.group_size / train.num_updates_per_step
    sizes = lengths.prompt + lengths.responses
    tokens, pairs = (
        samples / actor.dp * float(sizes.mean()),
        samples / actor.dp * float((sizes**2).mean()) / 2,
    )
    count = max(1, math.ceil(tokens / actor.micro_batch_tokens))
    times = [
        _stage_seconds(config, target, stage, tokens / count, pairs / count) for stage in stages
    ]
    backward = [1 + stage.recomputed for stage in stages]  # in forwards, besides its own products
    whole = [
        sum(parts.values()) * (1 + more) + parts["compute"]
        for parts, more in zip(times, backward, strict=True)
    ]
    slowest = int(np.argmax(whole))
    depth, updates = (p.pp - 1) / p.vpp, train.updates_of_step
    again = 1 + backward[slowest]
    parts = {
        name: seconds * again * count * updates
        for name, seconds in times[slowest].items()
        if seconds
    }
    parts["compute"] += times[slowest]["compute"] * count * updates
    parts["pipeline bubble"] = depth * updates * whole[slowest]
    rest = [_after_backward(config, target, stage) for stage in stages]
    parts |= {
        name: s * updates for name, s in max(rest, key=lambda found: sum(found.values())).items()
    }
    forward = (
        (count + depth) * max(sum(found.values()) for found in times) * train.num_updates_per_step
    )
    return forward, parts


def _stage_seconds(
    config: ExperimentConfig, target: Target, cost: StageCost, tokens: float, pairs: float
) -> dict[str, float]:
    """Returns the seconds of one stage's forward of one micro-batch, by part."""
    scale, peak = tokens / cost.tokens, target.hardware.bf16_tflops * 1e12
    compute = (cost.flops * scale + cost.pair_flops * pairs / config.actor.parallel.cp) / peak
    sent = {
        f"{group} communication": _link_seconds(config, target, group, num_bytes * scale)
        for group, num_bytes in cost.sent.items()
    }
    return {"compute": compute, **sent}


def _link_seconds(config: ExperimentConfig, target: Target, group: str, num_bytes: float) -> float:
    actor, p, gpus = config.actor, config.actor.parallel, target.gpus_per_node
    inside, between = (
        rate * 1e9
        for rate in (target.hardware.rates.inside_gb_s, target.hardware.rates.between_gb_s)
    )
    if group == "ep":  # both links at once
        near = min(1.0, max(0.0, gpus / p.etp - 1) / max(p.ep - 1, 1))
        return max(num_bytes * near / inside, num_bytes * (1 - near) / between)
    span = {"tp": p.tp, "cp": p.tp * p.cp, "pp": actor.world_size}[
        group
    ]  # consecutive ranks with the group in them
    return num_bytes / (inside if span <= gpus else between)


def _after_backward(config: ExperimentConfig, target: Target, cost: StageCost) -> dict[str, float]:
    """Returns the seconds of an update besides its passes: gradient sums, Adam, and the new weights
    to all."""
    actor, p, rates = config.actor, config.actor.parallel, target.hardware.rates
    stage = actor.world_size // p.pp
    parts = {"gradients": 0.0, "optimizer": 0.0, "weights to all": 0.0}
    for group, size, apart in (
        ("dp", stage // p.tp, p.tp),
        ("edp", stage // (p.etp * p.ep), p.etp * p.ep),
    ):
        num_bytes, shared = cost.gradient_bytes[group], actor.optimizer.distributed
        near = size * apart <= target.gpus_per_node
        seconds = (
            num_bytes
            * (size - 1)
            / size
            / ((rates.inside_gb_s if near else rates.between_gb_s) * 1e9)
        )
        parts["gradients"] += seconds * (1 if shared else 2)
        parts["weights to all"] += seconds / 2 if shared else 0.0
        moved = num_bytes / 4 / (size if shared else 1) * _OPTIMIZER_BYTES
        parts["optimizer"] += moved / (target.hardware.memory_tb_s * 1e12)
    return parts


def publish_seconds(
    config: ExperimentConfig, target: Target, engine: EngineSide
) -> dict[str, float]:
    """Returns the seconds of the fullest link if every trainer rank sends equally much, whatever
    the transport."""
    rollout, rates, world = config.rollout, target.hardware.rates, config.actor.world_size
    ranks = rollout.tp * rollout.num_engines
    near = world + (0 if rollout.colocate else ranks) <= target.gpus_per_node
    link = (rates.inside_gb_s if near else rates.between_gb_s) * 1e9
    received, sent = engine.weights, engine.weights * ranks / world
    return {
        "sending from the trainers" if sent > received else "receiving on an engine": max(
            sent, received
        )
        / link
    }


def measured_efficiency(
    folder: Path, hardware: Hardware, gpus_per_node: int
) -> tuple[dict[str, float], Lengths, Turns]:
    """Returns the share of its own bound that each phase of a run reached on these GPUs, and the
    run's lengths and turns.

    The first step, which warms up, does not count if there are others. A run that samples ahead has
    no seconds of its rollout, only the time that training waited. Raises ValueError for a folder
    without measured steps.
    """
    run = RunFolder(folder)
    if not (run.config.exists() and run.metrics.exists()):
        raise ValueError(
            f"--measured {folder}: no run folder, config.yaml or metrics.jsonl is missing"
        )
    config = load_config(run.config)
    entries = [entry for entry in read_metrics(run) if entry.get("time/update_s")]
    if not entries:
        raise ValueError(f"--measured {folder}: {run.metrics} has no step with time/update_s")
    entries = entries[1:] or entries
    lengths = assumed_lengths(config, fmean(entry["response/length_mean"] for entry in entries))
    if run.rollout_files():
        lengths = lengths_of_run(run, config)
    turns = turns_of_run(entries, f"means of {folder}")
    target = Target(described_architecture(config), hardware, gpus_per_node, lengths, turns)
    plan = plan_step(config, target)
    seconds = {
        name: fmean(entry.get(f"time/{name}_s") or 0.0 for entry in entries) for name in PHASES
    }
    ahead = {"rollout"} if config.rollout.max_staleness else set()
    efficiency = {
        name: plan.seconds[name] / seconds[name]
        for name in PHASES
        if name not in ahead and seconds[name] > 0 and 0 < plan.seconds[name] < math.inf
    }
    return efficiency, lengths, turns
