"""Memory of an engine rank: weights, cache and its tokens; how many samples of which lengths run
concurrently."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

import numpy as np

from megagrpo.check.libraries import ON_CPU
from megagrpo.check.problems import described_architecture
from megagrpo.check.rules.engine_layout import Server, server_of
from megagrpo.check.rules.placement import needs_gpus
from megagrpo.check.rules.subject import longest_samples, model_description
from megagrpo.config.hardware import Hardware
from megagrpo.config.rollout import RolloutConfig
from megagrpo.config.schema import ExperimentConfig
from megagrpo.models.stored.quantization import FP8_BLOCK
from megagrpo.monitor.rollout_log import read_rollouts
from megagrpo.rollout.admission import tokens_in_cache
from megagrpo.rollout.service.engine_command import engine_settings
from megagrpo.system.run_folder import RunFolder
from megagrpo.tools.plan.hardware import CONTEXT_BYTES, hardware_of, usable_bytes
from megagrpo.tools.plan.libraries import resolve_all
from megagrpo.tools.plan.trainer_memory import RankMemory, TrainerSide
from megagrpo.tools.plan.work import ModelWork, model_work

FP8_ITEM = 1 + 4 / math.prod(FP8_BLOCK)  # bytes of an element: a block has one float32 scale
_POINTS = 4096  # of a distribution that is given by numbers
_MEDIAN = 0.3  # of the longest response, if nothing is known
# sigma of a log-normal with 1 % above the longest
_SPREAD = math.log(1 / _MEDIAN) / NormalDist().inv_cdf(0.99)
_STEPS = 20  # of a run, whose rollouts are read: all of a long one are gigabytes
_PROMPT_SHARE = 0.25  # of data.max_prompt_tokens that a prompt has
# An engine's activations and graphs beside trainers, estimated: a prefill of 8,192 tokens with 16
# values of the hidden size each, and 2 MB for each of 256 samples in graphs, as SGLang 0.5.21
# reserves (arg_groups/memory_hook.py)
_PREFILL_VALUES = 8192 * 16
_GRAPH_BYTES = 2 * 256 * 2**20


@dataclass(frozen=True)
class Lengths:
    """Tokens of responses, float64 [points], ascending, equally probable; of a prompt the mean."""

    prompt: float
    responses: np.ndarray
    origin: str

    @property
    def mean(self) -> float:
        """Returns the mean response in tokens."""
        return float(self.responses.mean())

    @property
    def running(self) -> float:
        """Returns the mean tokens of one running sample in a cache that is always full."""
        return self.prompt + tokens_in_cache(self.mean, float((self.responses**2).mean()))

    def spread(self, count: int) -> np.ndarray:
        """Returns `count` lengths with this distribution, ascending, float64 [count]: evenly spaced
        quantiles."""
        return np.quantile(self.responses, (np.arange(count) + 0.5) / count)


def assumed_lengths(config: ExperimentConfig, mean: float | None = None) -> Lengths:
    """Returns a log-normal distribution, cut at the limit; mean: in tokens, else 1 % of responses
    reach the limit."""
    longest = config.sampling.max_response_tokens
    median = _MEDIAN * longest if mean is None else mean / math.exp(_SPREAD**2 / 2)
    responses = np.clip(median * np.exp(_SPREAD * _normal_quantiles()), 1.0, longest)
    origin = f"assumed: log-normal, half of them up to {median:.0f}, 1 % at the limit"
    if mean is not None:
        origin = f"log-normal with mean {mean:g} before the cut at {longest}"
    return Lengths(assumed_prompt(config), responses, origin)


def assumed_prompt(config: ExperimentConfig) -> float:
    """Returns the tokens of a prompt, of which the record of rollouts has only the text."""
    return _PROMPT_SHARE * config.data.max_prompt_tokens


@cache
def _normal_quantiles() -> np.ndarray:
    return np.array([NormalDist().inv_cdf((point + 0.5) / _POINTS) for point in range(_POINTS)])


def lengths_of_run(folder: RunFolder, config: ExperimentConfig) -> Lengths:
    """Reads the lengths of the samples in the last _STEPS steps of a run folder. Raises ValueError if it has
    none."""
    responses = [
        sample["num_tokens"]
        for files in [*folder.rollout_files().values()][-_STEPS:]
        for group in read_rollouts(files.values())
        for sample in group["samples"]
    ]
    return Lengths(
        assumed_prompt(config),
        sorted_lengths(responses, str(folder.rollouts)),
        f"{len(responses):,} samples of {folder.path}",
    )


def sorted_lengths(numbers: Sequence[float], where: str) -> np.ndarray:
    """Returns numbers of tokens, ascending, at least 1. Raises ValueError if none is positive."""
    if not numbers or not all(0 <= number < math.inf for number in numbers) or not any(numbers):
        raise ValueError(f"{where}: no positive numbers of tokens")
    return np.maximum(np.sort(np.array(numbers, dtype=np.float64)), 1.0)


@dataclass(frozen=True)
class EngineSide:
    """Bytes of the fullest rank of an engine, and the tokens and samples that they hold."""

    server: Server
    parts: Mapping[str, float]  # weights, cache, context, graphs and activations
    capacity: float  # bytes of the GPU
    cache_tokens: int  # of one engine
    concurrent: int  # samples that run at the same time in an engine that always has work
    problems: tuple[str, ...]

    @property
    def weights(self) -> float:
        """Returns the bytes of weights that a publish sends."""
        return self.parts["weights"]

    @property
    def resident(self) -> float:
        """Returns the bytes of weights, and of those that the engine derives from them."""
        return self.weights + self.parts["absorbed weights"]

    @property
    def total(self) -> float:
        """Returns the bytes in use."""
        return sum(self.parts.values())


def weight_elements(work: ModelWork, server: Server) -> float:
    """Counts the weights that one rank of an engine holds.

    Heads that are fewer than ranks are repeated; norms, router and the first halves of low-rank
    projections are whole. With data-parallel attention the input embedding is divided as attention
    is (SGLang's layers/vocab_parallel_embedding.py); behind DeepEP shared experts are whole.
    """
    arch = work.arch
    layers = work.layers
    tp = server.tp
    attention_tp = server.attention_tp
    repeated = arch.attention.repeated_weights(arch.hidden_size, attention_tp)
    cut = work.dense - work.whole * layers
    attention = work.attention * layers  # perhaps divided over fewer ranks than the rest
    apart = attention / attention_tp + max(cut - attention, 0.0) / tp
    divided = cut / tp if attention_tp == tp else apart
    divided += work.shared * (1 / server.shared_tp - 1 / tp)
    if arch.experts is not None:  # the first layers' MLPs
        mlp = 3 * arch.experts.dense_layers * arch.hidden_size * arch.ffn_size
        divided += mlp * (1 / server.dense_tp - 1 / tp)
    expert = work.expert / tp  # over ep ranks whole, and cut over the tp / ep others
    return (
        divided
        + work.whole * layers
        + expert
        + vocabulary_elements(work, server)
        + repeated * layers / attention_tp
    )


def vocabulary_elements(work: ModelWork, server: Server) -> float:
    """Counts the weights of embedding and output layer on one rank; a tied model has one for
    both."""
    head = 0.0 if work.arch.tied else work.vocabulary / server.head_tp
    return work.vocabulary / server.attention_tp + head


def absorbed_bytes(work: ModelWork, server: Server) -> float:
    """Returns the bytes of the copies that an engine with latent attention makes of the second half
    of keys' and values' projection, w_kc and w_vc, never in FP8 (SGLang's
    models/deepseek_common/deepseek_weight_loader.py)."""
    weights = work.arch.attention.absorbed_weights / server.attention_tp
    return work.layers * weights * server.width


def expert_bytes(work: ModelWork, server: Server) -> float:
    """Returns the bytes of experts' weights on one rank of an engine."""
    return work.expert / server.tp * (FP8_ITEM if server.fp8 else server.width)


def weight_bytes(work: ModelWork, server: Server) -> float:
    """Returns the bytes of the text part's weights on one rank.

    FP8 leaves out embeddings, output layer and, here, all that is whole on every rank.
    """
    elements = weight_elements(work, server)
    if not server.fp8:
        return elements * server.width
    plain = vocabulary_elements(work, server) + work.whole * work.layers
    return plain * server.width + (elements - plain) * FP8_ITEM


def engine_side(
    work: ModelWork, server: Server, lengths: Lengths, longest: int, hardware: Hardware
) -> EngineSide:
    """Returns an engine rank's memory.

    Cache and weights together fill `memory_fraction` of the memory that was free at the start.
    longest: tokens of the longest sample, prompt included.
    """
    free = hardware.memory_bytes - CONTEXT_BYTES
    vision = work.arch.vision
    tower = vision.engine_weights(server.tp) * server.width if vision else 0.0
    weights = weight_bytes(work, server) + tower
    absorbed = absorbed_bytes(work, server)
    resident = weights + absorbed
    cell = work.cache_bytes(server.attention_tp, server.cache_width)
    replicas = server.tp // server.attention_tp  # each with a cache of its own
    states = (server.states + 1) * work.state_bytes(server.attention_tp, server.width)
    budget = free * server.memory_fraction - resident - states
    tokens = max(0, int(budget / cell))
    tokens = tokens if server.max_tokens is None else min(tokens, server.max_tokens)
    concurrent = min(server.running_requests, int(replicas * tokens / lengths.running))
    problems = []
    if budget < 0:
        and_states = f" and recurrent states {states / 1e9:.1f} GB" if states else ""
        problems.append(
            f"an engine rank's weights are {resident / 1e9:.1f} GB{and_states}, but "
            f"rollout.mem_fraction {server.memory_fraction:g} leaves "
            f"{free * server.memory_fraction / 1e9:.1f} GB for weights and cache"
        )
    elif tokens < longest:
        problems.append(
            f"an engine's cache holds {tokens:,} tokens, but a sample may have {longest:,}"
        )
    parts = {"weights": weights, "absorbed weights": absorbed, "cache": float(tokens * cell)}
    if states:
        parts["recurrent states"] = states
    parts["context"] = CONTEXT_BYTES
    parts["graphs and activations"] = free * (1 - server.memory_fraction)
    return EngineSide(
        server, parts, hardware.memory_bytes, tokens * replicas, concurrent, tuple(problems)
    )


def host_cache_bytes(rollout: RolloutConfig, engine: EngineSide) -> float:
    """Returns the host memory that a rank's hierarchical cache takes; 0 without one."""
    settings = rollout.sglang
    if not settings.get("enable_hierarchical_cache"):
        return 0.0
    if size := settings.get("hicache_size"):
        return size * 1e9
    return settings.get("hicache_ratio", 0.0) * engine.parts["cache"]


def host_peak(
    config: ExperimentConfig, trainers: TrainerSide, engine: EngineSide, gpus_per_node: int
) -> float:
    """Returns the bytes of host memory of the fullest node. A save and a resume do not meet; caches
    of engines are on other nodes than trainers, unless they share GPUs or the one node."""
    parts = trainers.host_bytes
    trained = sum(parts.values()) - min(parts["checkpoint"], parts["resume"])
    caches = host_cache_bytes(config.rollout, engine) * min(gpus_per_node, config.engine_ranks)
    return trained + caches if shares_nodes(config, gpus_per_node) else max(trained, caches)


def shares_nodes(config: ExperimentConfig, gpus_per_node: int) -> bool:
    """Returns whether engines and trainers are on the same nodes."""
    return config.rollout.colocate or config.num_gpus <= gpus_per_node


def gpu_phases(
    config: ExperimentConfig, trainers: TrainerSide, engine: EngineSide, hidden_size: int
) -> dict[str, RankMemory]:
    """Returns the bytes on the fullest trainer GPU by phase: with the engine's, where they share
    GPUs.

    The optimizer and gradients are on the host while engines are awake, and until the first
    backward of an update.
    """
    if not config.rollout.colocate:
        return dict(trainers.phases)
    asleep = {"engine's context": engine.parts["context"]}
    weights = {"engine's weights": engine.resident}
    workspace = _GRAPH_BYTES + _PREFILL_VALUES * engine.server.width * hidden_size
    cache = engine.parts["cache"] + engine.parts.get("recurrent states", 0.0)
    sampling = weights | {"engine's cache": cache, "engine's workspace": workspace}
    awake = {"rollout": sampling, "checkpoint": sampling, "publish": weights}
    phases = {}
    for name, rank in trainers.phases.items():
        stays = name in ("load", "resume", "update")
        away = () if stays else ("gradients", "optimizer")
        held = {part: size for part, size in rank.parts.items() if part not in away}
        phases[name] = replace(rank, parts=held | asleep | awake.get(name, {}))
    return phases


def memory_problems(
    phases: Mapping[str, RankMemory], engine: EngineSide, gpu: Hardware
) -> tuple[str, ...]:
    """Returns what does not fit into a GPU's memory: trainers, with colocated engines, and an
    engine's own settings."""
    name = max(phases, key=lambda phase: phases[phase].total)
    fullest = phases[name]
    room = usable_bytes(gpu)
    if fullest.total <= room:
        return engine.problems
    parts = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in fullest.parts.items())
    needs = f"rank {fullest.rank} ({fullest.kind}) needs {fullest.total / 1e9:.1f} GB ({parts})"
    remedy = ""
    free = gpu.memory_bytes - CONTEXT_BYTES
    fraction = (
        math.floor(100 * (engine.server.memory_fraction - (fullest.total - room) / free)) / 100
    )
    if "engine's cache" in fullest.parts and fraction * free > engine.resident:
        remedy = f"; with rollout.mem_fraction {fraction:g} they do"
    return (
        f"trainers do not fit: in {name} {needs}, and {gpu.device_name} has "
        f"{room / 1e9:.1f}{remedy}",
        *engine.problems,
    )


def concurrency_report(
    config: ExperimentConfig, hardware: str | None = None, everything: bool = True
) -> list[str]:
    """Returns the lines of `megagrpo check` about concurrent samples; [] for a model without
    config.json.

    hardware: kind of GPU on which SGLang resolves the engines' arguments, which takes some seconds.
    Without it the closed forms take the experiment's own. The arguments of engines on a CPU state
    their cache. everything: also of which lengths they are counted.
    """
    if model_description(config) is None:
        return []
    rollout = config.rollout
    lengths = assumed_lengths(config)
    with suppress(ValueError):  # no response yet, or none with a token
        lengths = lengths_of_run(config.run_folder, config)
    tokens, how = _cache_tokens(config, lengths, hardware)
    by_cache = int(tokens / lengths.running)
    concurrent = min(rollout.max_running_requests, by_cache)
    samples = config.train.num_prompts_per_step * config.train.group_size / rollout.num_engines
    limit = (
        "its cache" if by_cache < rollout.max_running_requests else "rollout.max_running_requests"
    )
    counted = (
        f"  responses  {lengths.origin}; a running sample holds "
        f"{lengths.running:,.0f} tokens on average"
    )
    lines = [
        f"cache      {tokens:,} tokens an engine, {how}",
        *([counted] if everything else []),
        f"  at once    {concurrent:,} samples an engine, by {limit}, of {samples:,.0f} a step; the "
        "others wait at the trainers",
    ]
    longest = longest_samples(config)["data"]
    if tokens < longest:
        lines.append(
            f"  ADVICE   a sample may have {longest:,} tokens, more than an engine's cache holds"
        )
    return lines


def _cache_tokens(
    config: ExperimentConfig, lengths: Lengths, hardware: str | None
) -> tuple[int, str]:
    if hardware is None and not needs_gpus(config):
        return engine_settings(config, ON_CPU)["max_total_tokens"], "as its arguments on a CPU say"
    kind = hardware or config.cluster.gpu
    gpu = hardware_of(kind)
    server = server_of(config.rollout)
    how = f"on an {kind} by the closed forms; `--hardware {kind}` asks SGLang for its arguments"
    if hardware is not None:
        server = server_of(
            config.rollout, resolve_all([config], (gpu, config.cluster.gpus_per_node))[0]
        )
        how = f"on an {kind}, as SGLang resolves its arguments"
    work = model_work(described_architecture(config))
    return engine_side(
        work, server, lengths, longest_samples(config)["data"], gpu
    ).cache_tokens, how
