"""Mamba-2: a state that every head decays by one number a token, in place of a layer's attention
(state space duality; Dao and Gu, arXiv 2405.21060).

    S(t) = exp(dt(t) A) S(t-1) + dt(t) x(t) B(t)^T,    y(t) = S(t) C(t) + D x(t)

dt is softplus(its row + a bias) and A = -exp(A_log), both one a head; B and C are shared by the
heads of a group. x, B and C pass a short causal convolution first, y times silu(z) an RMSNorm over
each group. Convolution and scan are the kernels of causal-conv1d and mamba-ssm, as in Megatron's own
mixer, which is not built without them; on a CPU megagrpo/cpu/recurrences.py stands in.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from megagrpo.models.kinds.mamba2.describe import KERNEL_CHUNK, Mamba2
from megagrpo.models.kinds.recurrent import RecurrentMixer, again, kernel
from megagrpo.models.layers.parts import Parts


class Mamba2Mixer(RecurrentMixer):
    """Takes the place of Megatron's SelfAttention.

    Rows of `in_proj` stand group by group: [z, x, B, C, dt]; those of `conv1d` [x, B, C].
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, parts: Parts, sizes: Mamba2, **_: object
    ):
        heads = sizes.heads // sizes.groups
        width = heads * sizes.head_dim
        channels = width + 2 * sizes.state
        rows = width + channels + heads
        super().__init__(config, layer_number, parts, sizes.groups, rows, width)
        self.heads = heads
        self.width = width
        self.state = sizes.state
        self.conv1d = self.cut(channels, 1, sizes.kernel)
        self.conv_bias = self.cut(channels)
        self.A_log = self.cut(heads, dtype=torch.float32)
        self.D = self.cut(heads)
        self.dt_bias = self.cut(heads)
        self.norm = self.cut(width)

    def mix(self, mixed: Tensor, borders: Tensor | None) -> Tensor:
        groups = mixed.shape[2]
        gate, channels, steps = mixed.split(
            (self.width, self.width + 2 * self.state, self.heads), -1
        )
        conv1d, bias, a_log, skip, dt_bias, weight = self.own_heads(
            self.conv1d, self.conv_bias, self.A_log, self.D, self.dt_bias, self.norm
        )
        channels = _convolved(channels.flatten(2), conv1d, bias, borders).unflatten(2, (groups, -1))
        x, into, out_of = channels.split((self.width, self.state, self.state), -1)
        x = x.unflatten(3, (self.heads, -1)).flatten(2, 3)
        steps = F.softplus(steps.flatten(2).float() + dt_bias.float())
        y = scan(x, steps, -a_log.exp(), into, out_of, skip, borders)
        y = y.flatten(2).unflatten(2, (groups, -1))
        return again(self._normed, y, gate, weight)

    def _normed(self, y: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        gated = y.float() * F.silu(gate.float())
        normed = F.rms_norm(gated, (self.width,), None, self.config.layernorm_epsilon)
        return (normed * weight.float().view(-1, self.width)).to(gate.dtype)


def _sequence_of_each(borders: Tensor | None, count: int) -> Tensor | None:
    """Returns the number of the sequence of each packed token, [1, count] int32."""
    if borders is None:
        return None
    numbers = torch.arange(len(borders) - 1, dtype=torch.int32, device=borders.device)
    # without a size it waits for the device
    return numbers.repeat_interleave(borders.diff(), output_size=count)[None]


def _convolved(x: Tensor, weight: Tensor, bias: Tensor, borders: Tensor | None) -> Tensor:
    causal_conv1d_fn = kernel(x, "causal_conv1d", "causal_conv1d_fn")
    # with numbers of sequences the kernel wants channels beside each other
    return causal_conv1d_fn(
        x.contiguous().transpose(1, 2),
        weight.squeeze(1),
        bias,
        seq_idx=_sequence_of_each(borders, x.shape[1]),
        activation="silu",
    ).transpose(1, 2)


def scan(
    x: Tensor,
    steps: Tensor,
    decay: Tensor,
    into: Tensor,
    out_of: Tensor,
    skip: Tensor,
    borders: Tensor | None,
) -> Tensor:
    """Computes the recurrence for x [b, s, heads, d], steps [b, s, heads], decay, skip [heads], into
    and out_of (B and C) [b, s, groups, n]: [b, s, heads, d]. borders: of packed sequences."""
    combined = kernel(x, "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    return combined(
        x.contiguous(),
        steps,
        decay,
        into.contiguous(),
        out_of.contiguous(),
        KERNEL_CHUNK,
        D=skip.float(),
        seq_idx=_sequence_of_each(borders, x.shape[1]),
    )
