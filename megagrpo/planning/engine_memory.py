"""What one rank of an engine holds: weights, the cache and how many tokens are in it, and what is left."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megagrpo.config.rollout import RolloutConfig
from megagrpo.planning.hardware import Hardware, efficiency
from megagrpo.planning.lengths import Lengths
from megagrpo.planning.work import ITEM, ModelWork

_CACHE_WIDTHS = {"auto": None, "bfloat16": 2, "bf16": 2, "fp8_e5m2": 1, "fp8_e4m3": 1}  # bytes of a value


@dataclass(frozen=True)
class Server:
    """The settings of an engine that decide about its memory, as SGLang resolved them."""

    tp: int
    ep: int
    attention_tp: int  # ranks that share the heads: tp / dp with data-parallel attention
    memory_fraction: float  # of weights and cache together
    running_requests: int  # of one engine
    prefill_tokens: int  # in one forward pass
    cache_width: int  # bytes of a value
    max_tokens: int | None
    backend: str
    resolved: bool  # by SGLang, rather than read off the experiment


@dataclass(frozen=True)
class EngineSide:
    """Bytes of the fullest rank of an engine, and what they hold."""

    server: Server
    parts: Mapping[str, float]  # "weights", "cache", "context", "graphs and activations"
    capacity: float  # bytes of the GPU
    cache_tokens: int  # of one engine
    at_once: int  # samples that run at the same time in an engine that always has work
    problems: tuple[str, ...]

    @property
    def weights(self) -> float:
        """Returns the bytes of weights."""
        return self.parts["weights"]

    @property
    def total(self) -> float:
        """Returns the bytes that are in use."""
        return sum(self.parts.values())


def server_of(rollout: RolloutConfig, found: Mapping[str, Any] | None = None) -> Server:
    """Returns the settings of an experiment's engines; found: what SGLang resolved, else what the experiment says."""
    width = 2 if rollout.dtype == "bfloat16" else 4
    if found is None:
        dp = _data_parallel(rollout)
        return Server(
            rollout.tp, rollout.ep, rollout.tp // dp, rollout.mem_fraction, rollout.max_running_requests, 8192, width,
            rollout.max_total_tokens, "not resolved", resolved=False,
        )  # fmt: skip
    dp = found["dp_size"] if found["enable_dp_attention"] else 1
    return Server(
        tp=found["tp_size"],
        ep=found["ep_size"],
        attention_tp=found["tp_size"] // dp,
        memory_fraction=found["mem_fraction_static"],
        running_requests=found["max_running_requests"],
        prefill_tokens=found["chunked_prefill_size"],
        cache_width=_CACHE_WIDTHS.get(found["kv_cache_dtype"]) or width,
        max_tokens=found["max_total_tokens"],
        backend=found["attention_backend"],
        resolved=True,
    )


def _data_parallel(rollout: RolloutConfig) -> int:
    if rollout.sglang.get("enable_dp_attention"):
        return int(rollout.sglang.get("dp_size", 1))
    words = rollout.extra_args
    if "--enable-dp-attention" not in words:
        return 1
    for name in ("--dp-size", "--dp"):
        if name in words[:-1]:
            return int(words[words.index(name) + 1])
    return 1


def weight_elements(work: ModelWork, tp: int, attention_tp: int) -> float:
    """Counts the weights that one rank of an engine holds.

    Heads that are fewer than ranks are repeated; norms, router and the first halves of low-rank projections are whole.
    """
    repeated = 0
    if not work.latent and work.num_kv_heads < attention_tp:
        repeated = 2 * work.hidden * work.qk_dim * (attention_tp - work.num_kv_heads)
    dense = sum(layer.dense for layer in work.layers)
    cut = dense - work.whole * len(work.layers)
    attention = cut / tp if attention_tp == tp else _with_whole_attention(work, cut, tp, attention_tp)
    expert = sum(layer.expert for layer in work.layers) / tp  # over ep ranks whole, and cut over the tp / ep others
    vocabulary = (work.embedding + (0 if work.tied else work.head)) / tp
    return attention + work.whole * len(work.layers) + expert + vocabulary + repeated * len(work.layers) / attention_tp


def _with_whole_attention(work: ModelWork, cut: float, tp: int, attention_tp: int) -> float:
    """Counts the cut dense weights where attention is divided over fewer ranks than the rest."""
    attention = work.attention * len(work.layers)
    return attention / attention_tp + max(cut - attention, 0.0) / tp


def engine_side(work: ModelWork, server: Server, lengths: Lengths, longest: int, hardware: Hardware) -> EngineSide:
    """Returns an engine rank's memory.

    SGLang gives the cache what `memory_fraction` of the memory that was free at the start leaves beside the weights.
    longest: tokens of the longest sample, prompt included.
    """
    context = efficiency("context bytes")
    free = hardware.memory_bytes - context
    width = ITEM if server.cache_width == 1 else server.cache_width
    weights = weight_elements(work, server.tp, server.attention_tp) * width
    cell = work.cache_bytes(server.attention_tp, server.cache_width)
    replicas = server.tp // server.attention_tp  # each with a cache of its own
    budget = free * server.memory_fraction - weights
    tokens = max(0, int(budget / cell))
    if server.max_tokens is not None:
        tokens = min(tokens, server.max_tokens)
    rest = free * (1 - server.memory_fraction)
    at_once = min(server.running_requests, int(replicas * tokens / lengths.held))
    problems = []
    if weights > free * server.memory_fraction:
        problems.append(
            f"an engine rank's weights are {weights / 1e9:.1f} GB, but rollout.mem_fraction {server.memory_fraction:g} "
            f"leaves {free * server.memory_fraction / 1e9:.1f} GB for weights and cache"
        )
    elif tokens < longest:
        problems.append(f"an engine's cache holds {tokens:,} tokens, but a sample may have {longest:,}")
    parts = {"weights": weights, "cache": float(tokens * cell), "context": context, "graphs and activations": rest}
    return EngineSide(server, parts, hardware.memory_bytes, tokens * replicas, at_once, tuple(problems))
