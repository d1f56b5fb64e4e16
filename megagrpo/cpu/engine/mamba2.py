"""Stands in for SGLang's kernels of Mamba-2 layers, and of what stands beside them in Nemotron-H, in
plain torch.

A state [heads, d, n] takes one token after the other (Dao and Gu, arXiv 2405.21060):
S <- exp(dt A) S + dt x B^T, output S C + D x. All sequences of a batch take their t-th token
together. Products are sums of elements, and exponentials rounded from float64: their bits do not
depend on the rest of the batch. Names and arguments are those with which SGLang 0.5.21 calls its
kernels. The convolution is that of gated delta nets.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from megagrpo.cpu.engine.gated_delta import causal_conv1d_fn_cpu, causal_conv1d_update_cpu, keep


def mamba_chunk_scan_combined(
    x, dt, A, B, C, *, D, dt_bias, cu_seqlens, initial_states, out, state_dtype,  # noqa: N803
    **settings,
) -> tuple[None, Tensor, None]:  # fmt: skip
    """Writes the outputs [1, tokens, heads, d] of whole sequences, and returns their last states.

    initial_states [sequences, heads, d, n]; None: they begin.
    """
    starts = cu_seqlens[:-1].long()
    ends = cu_seqlens[1:].long()
    sizes = len(starts), *x.shape[2:], B.shape[-1]
    states = torch.zeros(sizes) if initial_states is None else initial_states.float()
    for step in range(int((ends - starts).max())):
        rows = (starts + step < ends).nonzero()[:, 0]
        at = starts[rows] + step
        token = (x[0, at], dt[0, at], A, B[0, at], C[0, at], D, dt_bias)
        states[rows], out[0, at] = _advanced(states[rows], *token)
    return None, states.to(state_dtype), None


def selective_state_update(
    state, x, dt, A, B, C, D, *, dt_bias, state_batch_indices, out, **settings  # noqa: N803
) -> None:  # fmt: skip
    """Writes the outputs [batch, heads, d] of one more token of each sequence, whose states go on in
    place. A, D and steps are repeated for every element of a head."""
    if settings.get("disable_state_update"):
        raise NotImplementedError("drafts for a model with recurrent layers on a CPU")
    states = state[state_batch_indices].float()
    heads = (A[:, 0, 0], B, C, D[:, 0], dt_bias[:, 0])
    states, out[:] = _advanced(states, x, dt[..., 0], *heads)
    keep(state, state_batch_indices, states)


def _advanced(
    states: Tensor,
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    into: Tensor,
    out_of: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns states [m, heads, d, n] after one token of each sequence, and its outputs [m, heads,
    d]."""
    repeats = x.shape[1] // into.shape[1]  # heads of a group
    into, out_of = (t.float().repeat_interleave(repeats, 1)[:, :, None] for t in (into, out_of))
    steps = F.softplus(dt.double() + dt_bias.double())
    states = states * (steps * decay.double()).exp().float()[..., None, None]
    states = states + (x.float() * steps.float()[..., None])[..., None] * into
    return states, ((states * out_of).sum(-1) + x.float() * skip.float()[:, None]).to(x.dtype)


def scan(module) -> None:
    """Patches sglang.srt.layers.attention.mamba.mamba, which defines no convolutions on a CPU."""
    module.mamba_chunk_scan_combined = mamba_chunk_scan_combined
    module.selective_state_update = selective_state_update
    module.causal_conv1d_fn_triton = causal_conv1d_fn_cpu
    module.causal_conv1d_update_triton = causal_conv1d_update_cpu


def router_in_float32(module) -> None:
    """Patches sglang.srt.models.nemotron_h: torch's product of other dtypes with a float32 result is
    for GPUs."""

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return torch.mm(a.to(out_dtype), b.to(out_dtype))

    module.torch = SimpleNamespace(**{**vars(torch), "mm": mm})


def squared_relu_experts(module) -> None:
    """Patches sglang.srt.layers.moe.fused_moe_native, which knows gated experts only and leaves out
    the factor by which the runners of GPUs scale their sum."""
    gated = module.moe_forward_native

    def moe_forward_native(layer, x, topk_output, moe_runner_config):
        if moe_runner_config.activation != "relu2":
            return gated(layer, x, topk_output, moe_runner_config)
        weights, ids = topk_output.topk_weights, topk_output.topk_ids
        out = torch.zeros(x.shape)
        for expert in ids[ids >= 0].unique().tolist():  # -1: of another rank
            tokens, places = (ids == expert).nonzero(as_tuple=True)
            inside = F.relu(F.linear(x[tokens], layer.w13_weight[expert])).square()
            chosen = F.linear(inside, layer.w2_weight[expert]).float()
            out.index_add_(0, tokens, chosen * weights[tokens, places, None].float())
        return (out * (moe_runner_config.routed_scaling_factor or 1.0)).to(x.dtype)

    module.moe_forward_native = moe_forward_native
