"""Costs of a decoder layer, an optimizer element and a token, from config.json: bytes, FLOPs, bytes
sent. No torch.

Layers are counted for CUDA, where attention keeps no scores.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megagrpo.config.actor import ActorConfig
from megagrpo.models.architecture import (
    Architecture,
    LatentAttention,
    LightningIndexer,
    LinearAttention,
)
from megagrpo.models.table import text_tensors

ITEM = 2  # bytes of a bf16 value
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}
_FP32 = 4
_CHUNK = 64  # tokens that a gated delta net's kernel computes at once
_SCORED_ROWS = 8192  # queries that Megatron's sparse attention scores at a time
_INDEX_BLOCK = 128  # numbers of an engine's indexer key with one scale
HOST_ADAM_BYTES = 16  # of an element on the host: float32 weight, gradient and both moments


@dataclass(frozen=True)
class LayerCost:
    """One layer on one rank, for one micro-batch."""

    kept: float  # bytes from its forward to its backward, without recomputation
    transient: float  # bytes in addition to those while its backward runs
    flops: float  # of a forward, without attention's scores
    pair_flops: float  # of a forward, for each query and key that it sees
    sent: Mapping[str, float]  # bytes in a forward, by "tp", "cp", "ep"
    chosen_flops: float = 0.0  # of a forward, for each query and key that an indexer chose for it


@dataclass(frozen=True)
class _Tokens:
    whole: float  # of a context rank
    part: float  # of a tensor-parallel rank under sequence parallelism
    width: int  # bytes a number


def layer_cost(
    arch: Architecture, actor: ActorConfig, tokens: float, layer: int, imbalance: float
) -> LayerCost:
    """Returns the cost of layer `layer`, counted from 0, of a micro-batch of `tokens`.

    imbalance: tokens that the fullest expert rank gets, over the mean.
    """
    p = actor.parallel
    at = _Tokens(tokens / p.cp, tokens / p.cp / p.tp, 2 if actor.dtype == "bfloat16" else 4)
    if arch.linear is not None and arch.is_linear(layer):
        attention = _linear_attention(arch, arch.linear, actor, at)
    else:
        attention = _attention(arch, actor, at)
    feed_forward = (
        _experts(arch, actor, at, imbalance)
        if arch.has_experts(layer)
        else _mlp(arch, actor, at, arch.ffn_size)
    )
    norms = 4 * arch.hidden_size * at.part * at.width  # input and output of both
    sent = {
        key: attention.sent.get(key, 0.0) + feed_forward.sent.get(key, 0.0)
        for key in ("tp", "cp", "ep")
    }
    return LayerCost(
        kept=attention.kept + feed_forward.kept + norms,
        transient=max(attention.transient, feed_forward.transient),
        flops=attention.flops + feed_forward.flops,
        pair_flops=attention.pair_flops,
        sent=sent,
        chosen_flops=attention.chosen_flops,
    )


def _attention(arch: Architecture, actor: ActorConfig, at: _Tokens) -> LayerCost:
    if arch.mla is not None:
        latent = _latent_attention(arch, arch.mla, actor, at)
        if arch.indexer is None:
            return latent
        return _sparse_attention(arch, arch.mla, arch.indexer, actor, at, latent)
    p = actor.parallel
    dim = arch.head_dim
    # then every rank gathers the whole projection, and has one key/value head
    shared = arch.num_kv_heads < p.tp
    heads = arch.num_heads / p.tp
    groups = max(arch.num_kv_heads / p.tp, 1)
    gates = arch.num_heads * arch.output_gate
    qkv = (arch.num_heads + gates + 2 * arch.num_kv_heads) / p.tp * dim
    held = qkv * p.tp if shared else qkv
    # the projection; queries before their norm; queries and keys turned; attention's output and its
    # log-sum-exp; with a gate its sigmoid and their product
    kept = (
        held
        + heads * dim * arch.qk_norm
        + (heads + groups) * dim
        + heads * dim * (1 + 2 * arch.output_gate)
    ) * at.width + heads * _FP32
    if arch.norm_over_heads:  # of plain torch: its input in float32, and divided by the root
        kept += (heads + groups) * dim * _FP32 * (1 + (at.width < _FP32))
    return LayerCost(
        kept=kept * at.whole,
        transient=2 * held * at.whole * at.width + _gathered(arch, actor, at),
        flops=2 * arch.hidden_size * (qkv + heads * dim) * at.whole,
        pair_flops=4 * heads * dim,
        sent={
            "tp": _gathers(arch, actor, at, 2),
            "cp": 2 * groups * dim * at.whole * at.width * (p.cp - 1),
        },
    )


def _linear_attention(
    arch: Architecture, linear: LinearAttention, actor: ActorConfig, at: _Tokens
) -> LayerCost:
    """Returns the cost of a gated delta net, as flash-linear-attention's kernels compute it."""
    p = actor.parallel
    heads = linear.value_heads / p.tp
    values = heads * linear.value_dim
    keys = heads * linear.key_dim  # each is repeated for the value heads that share it
    rows = linear.channels / p.tp + values + 2 * heads
    # input of the convolution; queries, keys and values, each in one piece; the system of a chunk;
    # the rule's output, gates and their product; decay and beta, and sums of them
    kept = (linear.channels / p.tp + 2 * keys + 4 * values + heads * _CHUNK) * at.width
    kept += 4 * heads * _FP32
    # of a token: products in its chunk; the state is read twice and written
    rule = 2 * _CHUNK * (3 * keys + 2 * values) + 6 * keys * linear.value_dim
    return LayerCost(
        kept=kept * at.whole,
        transient=(2 * rows * at.width + 5 * values * _FP32) * at.whole
        + _gathered(arch, actor, at),
        flops=(2 * arch.hidden_size * (rows + values) + rule) * at.whole,
        pair_flops=0.0,
        sent={
            "tp": _gathers(arch, actor, at, 2),
            "cp": (rows + values) * at.whole * at.width * (p.cp - 1) / p.cp,
        },
    )


def _latent_attention(
    arch: Architecture, mla: LatentAttention, actor: ActorConfig, at: _Tokens
) -> LayerCost:
    p = actor.parallel
    heads = arch.num_heads / p.tp
    dim = mla.nope_dim + mla.rope_dim
    queries = mla.q_lora_rank or 0
    values = mla.kv_lora_rank
    low = 2 * queries + 2 * values + mla.rope_dim  # down projections and their norms' outputs
    # queries, keys' and values' projection, queries and keys with their turned parts, values and
    # output as wide as keys: the kernel takes no narrower ones
    high = heads * (dim + mla.nope_dim + mla.v_dim + 4 * dim)
    # whole on every tensor-parallel rank
    down = arch.hidden_size * (queries + values + mla.rope_dim)
    up = heads * ((queries or arch.hidden_size) * dim + values * (mla.nope_dim + mla.v_dim))
    out = heads * mla.v_dim * arch.hidden_size
    return LayerCost(
        kept=low * at.part * at.width + high * at.whole * at.width + heads * at.whole * _FP32,
        transient=3 * heads * dim * at.whole * at.width + _gathered(arch, actor, at),
        flops=2 * (down * at.part + (up + out) * at.whole),
        pair_flops=2 * heads * (dim + mla.v_dim),
        sent={
            "tp": (
                _gathers(arch, actor, at, 1) + (queries + values) * at.part * (p.tp - 1) * at.width
            ),
            "cp": heads * (dim + mla.v_dim) * at.whole * at.width * (p.cp - 1),
        },
    )


def _sparse_attention(
    arch: Architecture,
    mla: LatentAttention,
    indexer: LightningIndexer,
    actor: ActorConfig,
    at: _Tokens,
    dense: LayerCost,
) -> LayerCost:
    """Returns the cost with an indexer, which every tensor-parallel rank has whole, and of absorbed
    attention: with one key of all heads, the latent, whose first part is the value."""
    p = actor.parallel
    heads = arch.num_heads / p.tp
    key = mla.kv_lora_rank + mla.rope_dim
    queries = mla.q_lora_rank or 0
    expanded = mla.nope_dim + mla.v_dim + 4 * (mla.nope_dim + mla.rope_dim)
    # queries before and after their turn, latent output, values; without keys and values of heads
    absorbed = heads * (2 * key + mla.kv_lora_rank + mla.v_dim - expanded) * at.width
    scores = min(at.whole, _SCORED_ROWS) * at.whole * p.cp * _FP32
    index = indexer.heads * indexer.head_dim
    projections = queries * index + arch.hidden_size * (indexer.head_dim + indexer.heads)
    return LayerCost(
        kept=dense.kept + (absorbed + indexer.topk * _FP32) * at.whole,  # numbers of keys: int32
        transient=dense.transient + scores,
        flops=dense.flops + 2 * projections * at.part / indexer.freq,
        pair_flops=2 * index / indexer.freq,  # the mean of layers that share a choice
        sent={
            "tp": dense.sent["tp"] + index * at.part * (p.tp - 1) * at.width,
            "cp": (key + indexer.head_dim) * at.whole * at.width * (p.cp - 1),
        },
        chosen_flops=2 * heads * (key + mla.kv_lora_rank),
    )


def _mlp(arch: Architecture, actor: ActorConfig, at: _Tokens, width: int) -> LayerCost:
    """Returns the cost of a gated MLP of `width` over all tensor-parallel ranks."""
    own = width / actor.parallel.tp * at.whole
    return LayerCost(
        kept=5 * own * at.width,  # gate and up, silu(gate), up + 0, their product
        transient=1.5 * own * at.width + 2 * _gathered(arch, actor, at),
        flops=6 * arch.hidden_size * own,
        pair_flops=0.0,
        sent={"tp": _gathers(arch, actor, at, 2)},
    )


def _experts(arch: Architecture, actor: ActorConfig, at: _Tokens, imbalance: float) -> LayerCost:
    p = actor.parallel
    hidden = arch.hidden_size
    each = arch.experts_per_token
    copies = at.part * each  # tokens that a rank sends to experts
    most = min(imbalance, p.ep, arch.num_experts / each)  # all tokens at most
    received = copies * p.etp * most
    inside = arch.expert_ffn_size / p.etp * received
    shared = _mlp(arch, actor, at, arch.shared_ffn_size)
    scores = 6 * arch.num_experts * at.part * _FP32
    # experts' input; gate and up, silu(gate), up + 0, their product, and that times the router's
    # weight
    kept = (hidden * received + 6 * inside) * at.width + scores
    # before and after both exchanges, sorted by expert and not
    transient = 2 * hidden * (copies + received) * at.width + _gathered(arch, actor, at)
    sent = {
        "ep": 2 * copies * hidden * at.width * (p.ep - 1) / p.ep,
        "tp": 2 * copies * hidden * at.width * (p.etp - 1)
        + shared.sent["tp"] * bool(arch.shared_ffn_size),
    }
    flops = 6 * hidden * inside + 2 * hidden * arch.num_experts * at.part
    return LayerCost(kept + shared.kept, transient, flops + shared.flops, 0.0, sent)


def _gathers(arch: Architecture, actor: ActorConfig, at: _Tokens, count: int) -> float:
    """Returns the bytes a rank sends in `count` gathers or scatters of hidden states along the
    sequence."""
    return count * arch.hidden_size * at.part * (actor.parallel.tp - 1) * at.width


def _gathered(arch: Architecture, actor: ActorConfig, at: _Tokens) -> float:
    """Returns the bytes of hidden states gathered along the sequence, where it is cut."""
    return arch.hidden_size * at.whole * at.width if actor.parallel.tp > 1 else 0.0


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of one trained element."""

    gradient: float  # of the buffer that every rank holds
    state: float  # on the GPU, of the ranks that share it
    host: float  # on the host, of the ranks that share it


def optimizer_bytes(actor: ActorConfig) -> OptimizerBytes:
    """Returns the bytes of main gradients, float32 copies of bfloat16 weights, and both moments.

    The host has float32 weights, gradients and moments, whatever the types on the GPU. By default
    the optimizer keeps remainders (the 16 bits that bfloat16 leaves out) instead of float32
    weights.
    """
    given = actor.optimizer.megatron
    if actor.dtype == "float32":
        return OptimizerBytes(gradient=4, state=8, host=0)
    aware = bool(given.get("use_precision_aware_optimizer"))
    gradient = _BYTES[given.get("main_grads_dtype", "float32")]
    master = 2 if aware and given.get("store_param_remainders", True) else 4
    if given.get("optimizer_cpu_offload"):
        share = given.get("optimizer_offload_fraction", 1.0)
        return OptimizerBytes(gradient, state=12 * (1 - share), host=HOST_ADAM_BYTES * share)
    return OptimizerBytes(gradient, state=master + 8, host=0)


@dataclass(frozen=True)
class ModelWork:
    """Counts what the forward pass of one token needs; FLOPs are two a multiply-add."""

    arch: Architecture
    # weights of all layers that every token meets: attention, norms, router, shared experts or the
    # MLP
    dense: int
    expert: int  # weights of all routed experts
    attention: float  # of a layer's weights, the mean of those that attention's heads divide
    whole: int  # of the last layer's weights, those that every tensor-parallel rank holds whole
    shared: int  # weights of the experts that every token meets, of all layers

    @property
    def vocabulary(self) -> int:
        """Counts the weights of the embedding, and of the output layer, which a tied model shares
        with it."""
        return self.arch.vocab_size * self.arch.hidden_size

    @property
    def share(self) -> float:
        """Returns the part of the routed experts that a token meets."""
        return self.arch.experts_per_token / self.arch.num_experts if self.arch.num_experts else 0.0

    @property
    def layers(self) -> int:
        """Counts the layers, a draft's among them."""
        return self.arch.num_layers + self.arch.draft

    @property
    def token_flops(self) -> float:
        """Returns the FLOPs of one token without attention's own products, head included."""
        return 2.0 * self.dense + 2.0 * self.expert * self.share + 2.0 * self.vocabulary

    @property
    def attention_flops(self) -> float:
        """Returns the FLOPs of one token with one earlier token, of one layer: scores and their
        sum."""
        arch = self.arch
        mla = self.arch.mla
        dims = mla.nope_dim + mla.rope_dim + mla.v_dim if mla else 2 * arch.head_dim
        return 2.0 * arch.num_heads * dims

    @property
    def decode_attention_flops(self) -> float:
        """Returns the same in an engine, which multiplies with the latent itself if the cache holds
        latents."""
        mla = self.arch.mla
        return (
            2.0 * self.arch.num_heads * (2 * mla.kv_lora_rank + mla.rope_dim)
            if mla
            else self.attention_flops
        )

    def seen(self, tokens: np.ndarray | float) -> np.ndarray | float:
        """Returns how many of so many earlier tokens attention reads: all, or what an indexer
        chooses."""
        return tokens if self.arch.indexer is None else np.minimum(tokens, self.arch.indexer.topk)

    @property
    def index_flops(self) -> float:
        """Returns the FLOPs of the indexer for one token with one earlier token, of one layer; each
        rank does all of them."""
        indexer = self.arch.indexer
        return 2.0 * indexer.heads * indexer.head_dim / indexer.freq if indexer else 0.0

    @property
    def index_bytes(self) -> int:
        """Returns the bytes of one token in one rank's cache that an indexer reads: a key in FP8
        with its scales, of each layer that chooses (SGLang's mem_cache/memory_pool.py,
        DSATokenToKVPool)."""
        indexer = self.arch.indexer
        if indexer is None:
            return 0
        choosing = sum(indexer.source(i) == i for i in range(self.arch.num_layers))
        return choosing * (indexer.head_dim + indexer.head_dim // _INDEX_BLOCK * _FP32)

    def cache_bytes(self, attention_tp: int, width: int = ITEM) -> int:
        """Returns the bytes of one token in one rank's cache.

        Heads are divided over the ranks and repeated if there are fewer than ranks; a latent is on
        every rank, and an indexer's key.
        """
        arch = self.arch
        mla = self.arch.mla
        heads = 2 * max(1, arch.num_kv_heads // attention_tp) * arch.head_dim
        layers = arch.attention_layers + arch.draft
        of_layer = mla.kv_lora_rank + mla.rope_dim if mla else heads
        return layers * of_layer * width + self.index_bytes

    def state_bytes(self, attention_tp: int, width: int = ITEM) -> int:
        """Returns the bytes of one request's recurrent state in one rank: the last inputs of each
        convolution, and the state in float32."""
        linear = self.arch.linear
        if linear is None:
            return 0
        inputs = linear.channels * (linear.kernel - 1) * width
        state = linear.value_heads * linear.value_dim * linear.key_dim * _FP32
        return sum(linear.layers) * (inputs + state) // attention_tp


def model_work(arch: Architecture) -> ModelWork:
    """Counts the tensors of a model's text part; tokens of text do not meet a vision tower."""
    dense = expert = whole = attention = shared = 0
    for spec in text_tensors(arch):
        words = spec.name.split(".")
        if words[:2] != ["model", "layers"]:
            continue
        if spec.expert:
            expert += spec.size
            continue
        dense += spec.size
        shared += spec.size * (words[4].startswith("shared_expert") and not spec.whole)
        attention += spec.size * (words[3].endswith("_attn") and not spec.whole)
        if int(words[2]) == arch.num_layers - 1:
            whole += spec.size * spec.whole
    layers = arch.num_layers + arch.draft
    return ModelWork(arch, dense, expert, attention / layers, whole, shared)
