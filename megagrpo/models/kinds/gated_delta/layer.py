"""Gated delta net: linear attention whose state is a matrix a head, in place of a layer's attention
(Yang et al., arXiv 2412.06464).

    S(t) = exp(g(t)) S(t-1) (1 - beta(t) k(t) k(t)^T) + beta(t) v(t) k(t)^T,    out(t) = S(t) q(t)

Queries, keys and values pass a short causal convolution first. Both are the kernels of
flash-linear-attention, as in Megatron's own layer; on a CPU megagrpo/cpu/recurrences.py stands in.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from megagrpo.models.kinds.gated_delta.describe import GatedDelta
from megagrpo.models.kinds.recurrent import RecurrentMixer, again, kernel
from megagrpo.models.layers.parts import Parts
from megagrpo.models.layers.whole_linear import whole_parameter


class GatedDeltaNet(RecurrentMixer):
    """Takes the place of Megatron's SelfAttention.

    Rows of `in_proj` and `conv1d` stand key head by key head: [query, key, values, and of in_proj
    alone gates, beta, alpha of the value heads that share it].
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        parts: Parts,
        sizes: GatedDelta,
        **_: object,
    ):
        heads = sizes.key_heads
        values = sizes.value_heads // heads
        width = values * sizes.value_dim
        super().__init__(config, layer_number, parts, heads, sizes.rows // heads, width)
        self.key_dim, self.value_dim = sizes.key_dim, sizes.value_dim
        self.values = values  # value heads of a key head
        if not sizes.sigmoid_gate:
            self._opening = F.silu
        self.channels = sizes.channels // heads
        self.conv1d = self.cut(self.channels, 1, sizes.kernel)
        self.A_log = self.cut(values, dtype=torch.float32)
        self.dt_bias = self.cut(values)
        # not zero-centered, unlike the model's other norms
        self.norm = whole_parameter(config, (self.value_dim,), config.params_dtype)

    def mix(self, mixed: Tensor, borders: Tensor | None) -> Tensor:
        heads = mixed.shape[2]
        values = self.values * self.value_dim
        value_widths = (values, self.values, self.values)
        qkv, gate, beta, alpha = mixed.split((self.channels, *value_widths), -1)
        conv1d, a_log, dt_bias = self.own_heads(self.conv1d, self.A_log, self.dt_bias)
        qkv = convolve(qkv.flatten(2), conv1d, borders)
        qkv = qkv.unflatten(2, (heads, -1))
        query, key, value = qkv.split((self.key_dim, self.key_dim, values), -1)
        query, key = (t.repeat_interleave(self.values, 2) for t in (query, key))
        value, gate = (t.unflatten(3, (self.values, -1)).flatten(2, 3) for t in (value, gate))
        decay = -a_log.exp() * F.softplus(alpha.flatten(2).float() + dt_bias.float())
        out = delta_rule(query, key, value, decay, beta.flatten(2).float().sigmoid(), borders)
        out = again(self._gated_norm, out, gate)
        return out.flatten(2).unflatten(2, (heads, -1))


def convolve(x: Tensor, weight: Tensor, borders: Tensor | None) -> Tensor:
    """Convolves each channel of x [b, s, channels] with its weight [channels, 1, kernel]; borders: of
    packed sequences."""
    causal_conv1d = kernel(x, "fla.modules.convolution", "causal_conv1d")
    return causal_conv1d(
        x=x.contiguous(), weight=weight.squeeze(1), activation="silu", cu_seqlens=borders
    )[0]


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, borders: Tensor | None
) -> Tensor:
    """Computes the rule for query, key [b, s, heads, d], value [b, s, heads, e], decay [b, s,
    heads] or of each channel of the keys [b, s, heads, d], and beta [b, s, heads] in float32: [b,
    s, heads, e]. borders: of packed sequences."""
    rule = ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    if decay.dim() == query.dim():  # of each channel
        rule = ("fla.ops.kda", "chunk_kda")
    query, key, value = (t.contiguous() for t in (query, key, value))
    return kernel(query, *rule)(
        query,
        key,
        value,
        g=decay,
        beta=beta,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=borders,
    )[0]
