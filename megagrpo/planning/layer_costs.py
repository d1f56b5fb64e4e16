"""What one decoder layer costs a trainer rank: bytes kept for the backward, multiply-adds, bytes sent. Closed forms.

docs/planning_memory.md states each formula. Counted for CUDA, where attention keeps no scores. Loads no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megagrpo.config.actor import ActorConfig
from megagrpo.families.architecture import Architecture, LatentAttention

_FP32 = 4


@dataclass(frozen=True)
class LayerCost:
    """One layer on one rank, for one micro-batch."""

    kept: float  # bytes from its forward to its backward, without recomputation
    transient: float  # bytes beside those while its backward runs
    attention_kept: float  # of `kept`, what attention itself saves: q, k, v, its output
    flops: float  # of a forward, without attention's scores
    pair_flops: float  # of a forward, for each query and key that it sees
    sent: Mapping[str, float]  # bytes in a forward, by "tp", "cp", "ep"


@dataclass(frozen=True)
class _Tokens:
    whole: float  # of a context rank
    part: float  # of a tensor-parallel rank under sequence parallelism
    width: int  # bytes a number


def layer_cost(arch: Architecture, actor: ActorConfig, tokens: float, moe: bool, imbalance: float) -> LayerCost:
    """Returns the cost of one layer of a micro-batch of `tokens`.

    imbalance: tokens that the fullest expert rank gets, over the mean.
    """
    p = actor.parallel
    at = _Tokens(tokens / p.cp, tokens / p.cp / p.tp, 2 if actor.dtype == "bfloat16" else 4)
    attention = _attention(arch, actor, at)
    feed_forward = _experts(arch, actor, at, imbalance) if moe else _dense(arch, actor, at)
    norms = 2 * arch.hidden_size * at.part * at.width * 2  # of both norms input and output
    sent = {key: attention.sent.get(key, 0.0) + feed_forward.sent.get(key, 0.0) for key in ("tp", "cp", "ep")}
    return LayerCost(
        kept=attention.kept + feed_forward.kept + norms,
        transient=max(attention.transient, feed_forward.transient),
        attention_kept=attention.attention_kept,
        flops=attention.flops + feed_forward.flops,
        pair_flops=attention.pair_flops,
        sent=sent,
    )


def _attention(arch: Architecture, actor: ActorConfig, at: _Tokens) -> LayerCost:
    if arch.mla is not None:
        return _latent_attention(arch, arch.mla, actor, at)
    p = actor.parallel
    heads, groups = arch.num_heads / p.tp, arch.num_kv_heads / p.tp
    dim = arch.head_dim
    qkv = (heads + 2 * groups) * dim
    weights = arch.hidden_size * (qkv + heads * dim)
    saved = (qkv + heads * dim) * at.whole * at.width + heads * at.whole * _FP32  # and its log-sum-exp
    normed = (heads + groups) * dim * at.whole * at.width if arch.qk_norm else 0.0
    whole_input = arch.hidden_size * at.whole * at.width if p.tp > 1 else 0.0  # gathered anew in the backward
    keys = 2 * groups * dim * at.whole * at.width
    return LayerCost(
        kept=saved + normed,
        transient=2 * qkv * at.whole * at.width + whole_input,
        attention_kept=saved,
        flops=2 * weights * at.whole,
        pair_flops=4 * heads * dim,
        sent={"tp": _gathers(arch, actor, at, 2), "cp": keys * (p.cp - 1)},
    )


def _latent_attention(arch: Architecture, mla: LatentAttention, actor: ActorConfig, at: _Tokens) -> LayerCost:
    """Returns the cost of latent attention, which trainers multiply with keys and values of every head.

    The first halves of its projections are whole on every rank and work on its part of the sequence.
    """
    p, hidden = actor.parallel, arch.hidden_size
    heads, qk = arch.num_heads / p.tp, mla.nope_dim + mla.rope_dim
    latents = (mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.rope_dim
    queries = mla.q_lora_rank or hidden  # what queries are computed from
    up = heads * (queries * qk + mla.kv_lora_rank * (mla.nope_dim + mla.v_dim))
    saved = heads * (2 * qk + 2 * mla.v_dim) * at.whole * at.width + heads * at.whole * _FP32
    gathered = (latents if mla.q_lora_rank else latents + hidden) * at.whole * at.width if p.tp > 1 else 0.0
    keys = heads * (qk + mla.v_dim) * at.whole * at.width
    sent = (latents + (0 if mla.q_lora_rank else hidden) + hidden) * at.part * (p.tp - 1) * at.width
    return LayerCost(
        kept=saved + heads * 2 * qk * at.whole * at.width + 2 * latents * at.part * at.width,  # before rope, and norms
        transient=2 * heads * (2 * qk + mla.v_dim) * at.whole * at.width + gathered,
        attention_kept=saved,
        flops=2 * hidden * latents * at.part + 2 * (up + hidden * heads * mla.v_dim) * at.whole,
        pair_flops=2 * heads * (qk + mla.v_dim),
        sent={"tp": sent, "cp": keys * (p.cp - 1)},
    )


def _dense(arch: Architecture, actor: ActorConfig, at: _Tokens) -> LayerCost:
    return _mlp(arch, actor, at, arch.ffn_size / actor.parallel.tp)


def _mlp(arch: Architecture, actor: ActorConfig, at: _Tokens, width: float) -> LayerCost:
    """Returns the cost of a gated MLP that is cut like dense layers; `width` is this rank's."""
    whole_input = arch.hidden_size * at.whole * at.width if actor.parallel.tp > 1 else 0.0
    return LayerCost(
        kept=4 * width * at.whole * at.width,  # gate, up, silu(gate), product
        transient=3 * width * at.whole * at.width + whole_input,
        attention_kept=0.0,
        flops=6 * arch.hidden_size * width * at.whole,
        pair_flops=0.0,
        sent={"tp": _gathers(arch, actor, at, 2)},
    )


def _experts(arch: Architecture, actor: ActorConfig, at: _Tokens, imbalance: float) -> LayerCost:
    p = actor.parallel
    copies = at.part * arch.experts_per_token  # tokens that a rank sends to experts
    received = copies * p.etp * min(imbalance, arch.num_experts / arch.experts_per_token)
    width, hidden = arch.expert_ffn_size / p.etp, arch.hidden_size
    router = (hidden * (_FP32 - at.width) + 4 * arch.num_experts * _FP32) * at.part
    dispatched = hidden * received * at.width  # sorted by expert: the experts' input
    kept = router + dispatched + 4 * width * received * at.width + hidden * received * at.width
    flops = 6 * hidden * width * received + 2 * hidden * arch.num_experts * at.part
    far = (p.ep - 1) / p.ep
    shared = _mlp(arch, actor, at, arch.shared_ffn_size / p.tp) if arch.shared_ffn_size else None
    sent = {
        "ep": 2 * copies * hidden * at.width * far,
        "tp": 2 * copies * hidden * at.width * (p.etp - 1) + (shared.sent["tp"] if shared else 0.0),
    }
    transient = 3 * dispatched + 3 * width * received * at.width
    if shared is not None:
        kept, flops, transient = kept + shared.kept, flops + shared.flops, max(transient, shared.transient)
    return LayerCost(kept, transient, 0.0, flops, 0.0, sent)


def _gathers(arch: Architecture, actor: ActorConfig, at: _Tokens, count: int) -> float:
    """Returns the bytes a rank sends in `count` gathers or scatters of hidden states along the sequence."""
    return count * arch.hidden_size * at.part * (actor.parallel.tp - 1) * at.width
