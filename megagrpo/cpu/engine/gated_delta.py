"""Stands in for SGLang's kernels of gated delta nets, of the gated attention beside them (Qwen3.5)
and of Kimi Delta Attention (Kimi-Linear), in plain torch.

A state [heads, v, k] takes one token after the other (Yang et al., arXiv:2412.06464, equation 10):
S <- exp(g) S + beta (v - exp(g) S k) k^T, output S q / sqrt(k), with q and k of length 1. In Kimi
Delta Attention g is of each channel of the keys (arXiv:2510.26692, equation 1). All sequences of a
batch take their t-th token together. Products are sums of elements, and exponentials rounded from
float64: their bits do not depend on the rest of the batch. Names and arguments are those with which
SGLang 0.5.21 calls its kernels.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

_EPS = 1e-6  # of the length of queries and keys


def causal_conv1d_fn_cpu(
    x, weight, bias, *, activation, conv_states, has_initial_state, cache_indices,
    query_start_loc, seq_lens_cpu,
) -> Tensor:  # fmt: skip
    """Returns the convolution of each sequence with itself, and keeps its last inputs.

    x [dim, tokens]; weight [dim, width]; conv_states [slots, dim, width - 1], written in place.
    """
    out = torch.empty_like(x)
    starts = query_start_loc.tolist()
    # other slots hold what earlier requests left
    past = conv_states[cache_indices].where(has_initial_state[:, None, None], 0)
    kept = past.clone()
    for i, (start, stop) in enumerate(pairwise(starts)):
        inputs = torch.cat([past[i].to(x.dtype), x[:, start:stop]], 1)
        out[:, start:stop] = _convolved(inputs, weight, bias, activation)
        kept[i] = inputs[:, inputs.shape[1] - past.shape[2] :]
    keep(conv_states, cache_indices, kept)
    return out


def causal_conv1d_update_cpu(
    x, conv_states, weight, bias, activation, *, conv_state_indices
) -> Tensor:
    """Returns the convolution of one more token of each sequence; x [batch, dim]."""
    past = conv_states[conv_state_indices].to(x.dtype)
    inputs = torch.cat([past, x[..., None]], -1)
    keep(conv_states, conv_state_indices, inputs[..., 1:])
    return _convolved(inputs, weight, bias, activation)[..., 0]


def _convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Returns [..., dim, tokens] of inputs [..., dim, width - 1 + tokens]."""
    assert activation in ("silu", "swish"), activation
    taps = weight.shape[1]
    tokens = inputs.shape[-1] - taps + 1
    parts = (inputs[..., i : i + tokens].float() * weight[:, i, None] for i in range(taps))
    out = sum(parts, torch.zeros(()) if bias is None else bias[:, None].float())
    return _silu(out).to(inputs.dtype)


def _silu(x: Tensor) -> Tensor:
    return F.silu(x.double()).float()


def fused_gdn_gating_cpu(a_log, a, b, dt_bias) -> tuple[Tensor, Tensor]:
    """Returns the logarithm of the decay, float32, and the step beta, both [1, tokens, heads]."""
    decay = -a_log.double().exp() * F.softplus(a.double() + dt_bias.double())
    return decay.float()[None], _sigmoid(b).to(b.dtype)[None]


def _sigmoid(x: Tensor) -> Tensor:
    return x.double().sigmoid().float()


def chunk_gated_delta_rule_cpu(
    q, k, v, g, beta, *, initial_state, cu_seqlens, head_first, use_qk_l2norm_in_kernel,
    initial_state_indices,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """Returns the outputs [1, tokens, heads, v] of whole sequences, whose states go on in place.

    initial_state [slots, heads, v, k]: SGLang clears a slot before a sequence begins in it.
    """
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    states = initial_state[initial_state_indices].float()
    out = torch.empty_like(v)
    for step in range(int((ends - starts).max())):
        rows = (starts + step < ends).nonzero()[:, 0]
        at = starts[rows] + step
        states[rows], out[0, at] = _advanced(
            states[rows], q[0, at], k[0, at], v[0, at], g[0, at], beta[0, at]
        )
    keep(initial_state, initial_state_indices, states)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log,  # noqa: N803  # SGLang's name
    dt_bias,
    q,
    k,
    v,
    a,
    b,
    *,
    initial_state_source,
    initial_state_indices,
    **settings,
) -> Tensor:
    """Returns the outputs [1, batch, heads, v] of one more token of each sequence."""
    if settings.get("disable_state_update"):
        raise NotImplementedError("drafts for a model with recurrent layers on a CPU")
    g, _ = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    states = initial_state_source[initial_state_indices].float()
    states, out = _advanced(states, q[0], k[0], v[0], g[0], _sigmoid(b))
    keep(initial_state_source, initial_state_indices, states)
    return out[None]


def chunk_kda(
    q, k, v, g, beta, *, initial_state, initial_state_indices, cu_seqlens, A_log, dt_bias,  # noqa: N803
    **settings,
) -> Tensor:  # fmt: skip
    """Likewise, of Kimi Delta Attention. g [1, tokens, heads, k]: before dt_bias and softplus."""
    assert settings["lower_bound"] is None and not settings["beta_is_raw"], "as in Kimi-Linear"
    assert not settings["output_intermediate_states"], "of the other strategy of prefixes"
    decay, _ = fused_gdn_gating_cpu(A_log.view(-1, 1), g[0], beta[0], dt_bias.view(g.shape[2:]))
    return chunk_gated_delta_rule_cpu(
        q, k, v, decay, beta, initial_state=initial_state, cu_seqlens=cu_seqlens, head_first=False,
        use_qk_l2norm_in_kernel=True, initial_state_indices=initial_state_indices,
    )[0]  # fmt: skip


def kda_update(A_log, dt_bias, q, k, v, a, b, **settings) -> Tensor:  # noqa: N803
    """Likewise, of one more token of each sequence; a [batch, heads * k], b [1, batch, heads]."""
    assert settings["lower_bound"] is None and settings["is_kda"], "as in Kimi-Linear"
    by_head = q.shape[2:]
    return fused_sigmoid_gating_delta_rule_update_cpu(
        A_log.view(-1, 1), dt_bias.view(by_head), q, k, v, a.view(-1, *by_head), b[0], **settings
    )


def keep(pool: Tensor, slots: Tensor, values: Tensor) -> None:
    """Writes the states of a batch into their slots; a request that only pads the batch has slot
    -1."""
    real = slots >= 0
    pool[slots[real]] = values[real].to(pool.dtype)


def _advanced(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns states [n, heads, v, k] after one token of each sequence, and its outputs [n, heads,
    v]."""
    repeats = v.shape[1] // k.shape[1]  # heads of values over heads of keys
    q, k = (_unit(x).repeat_interleave(repeats, 1)[:, :, None] for x in (q, k))
    states = states * g.double().exp().float().view(*g.shape[:2], 1, -1)
    error = (v.float() - (states * k).sum(-1)) * beta.float()[..., None]
    states = states + error[..., None] * k
    return states, ((states * q).sum(-1) * q.shape[-1] ** -0.5).to(v.dtype)


def _unit(x: Tensor) -> Tensor:
    return x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + _EPS)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz, ba, k_heads, v_heads, k_dim, v_dim
) -> tuple[Tensor, ...]:
    """Returns queries, keys and values together, the gate z [tokens, v_heads, v_dim], b and a."""
    qkv, z = qkvz.split([2 * k_heads * k_dim + v_heads * v_dim, v_heads * v_dim], -1)
    b, a = ba.split(v_heads, -1)
    return qkv.contiguous(), z.unflatten(-1, (v_heads, v_dim)), b.contiguous(), a.contiguous()


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate, k, q_weight, k_weight, eps, head_dim, num_heads
) -> tuple[Tensor, ...]:
    """Returns normalized queries and keys and the attention's gate, each [tokens * heads, dim]."""
    q, gate = q_gate.unflatten(-1, (num_heads, 2, head_dim)).unbind(-2)
    q, gate, k = (x.contiguous().view(-1, head_dim) for x in (q, gate, k))
    return _norm(q, 1.0 + q_weight.float(), eps), _norm(k, 1.0 + k_weight.float(), eps), gate


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (scaled * weight).to(x.dtype)


def fused_sigmoid_mul_cpu(x, gate) -> None:
    """Multiplies attention's output by its gate, in place."""
    x.mul_(_sigmoid(gate.reshape(x.shape)).to(x.dtype))


def norm_then_gate(module) -> None:
    """Patches a module of sglang.kernels.ops.attention.fla: the norm of a delta net's output is a
    Triton kernel, Qwen3.5's in layernorm_gated, Qwen3-Next's in fused_norm_gate."""
    norm = getattr(module, "FusedRMSNormGated", None) or module.RMSNorm

    def forward(self, x, z):
        assert getattr(self, "norm_before_gate", True), "as in both"
        gate = _sigmoid(z) if self.activation == "sigmoid" else _silu(z)
        return (_norm(x.float(), self.weight.float(), self.eps) * gate).to(x.dtype)

    norm.forward = forward


def kimi_delta_rule(module) -> None:
    """Patches sglang.srt.layers.attention.linear.kernels.kda_triton, which has no kernels on a
    CPU."""
    module.chunk_kda = chunk_kda
    module.fused_sigmoid_gating_delta_rule_update = kda_update


def kimi_convolution(module) -> None:
    """Patches sglang.srt.layers.attention.linear.kda_backend: of whole sequences it takes a Triton
    kernel everywhere."""
    module.causal_conv1d_fn = causal_conv1d_fn_cpu


def scaled_experts(module) -> None:
    """Patches sglang.srt.models.kimi_linear, which leaves the factor of routed experts to the
    runners of GPUs; torch's does not multiply by it."""
    init = module.KimiMoE.__init__

    def init_and_scale(self, *arguments, **options):
        init(self, *arguments, **options)
        factor = self.routed_scaling_factor
        self.experts.register_forward_hook(lambda experts, inputs, out: out * factor)

    module.KimiMoE.__init__ = init_and_scale


def gate_shared_experts(module) -> None:
    """Patches sglang.kernels.ops.elementwise.elementwise: a Triton kernel adds shared experts times
    their gate."""

    def add(hidden, gate, shared, out):
        out += _sigmoid((hidden.float() * gate.float()).sum(-1, keepdim=True)) * shared

    module.fused_gate_sigmoid_mul_add = add
