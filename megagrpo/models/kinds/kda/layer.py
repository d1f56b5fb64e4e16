"""Kimi Delta Attention: a gated delta net whose state decays by a number for each channel of the
keys, in place of a layer's attention (arXiv 2510.26692).

    S(t) = S(t-1) diag(exp(g(t))) (1 - beta(t) k(t) k(t)^T) + beta(t) v(t) k(t)^T,    out(t) = S(t) q(t)

g = -exp(A_log) softplus(f + dt_bias), or with a lower bound bound sigmoid(exp(A_log) (f + dt_bias)),
A_log one a head. Decays f and the gates of the output come through a narrow projection that the
heads share. Convolution and rule are those of gated delta nets.
"""

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from megagrpo.models.kinds.gated_delta.layer import convolve, delta_rule
from megagrpo.models.kinds.kda.describe import Kda
from megagrpo.models.kinds.recurrent import RecurrentMixer, again
from megagrpo.models.layers.parts import Parts
from megagrpo.models.layers.whole_linear import WHOLE, linear_options, whole_parameter


class KimiDeltaAttention(RecurrentMixer):
    """Takes the place of Megatron's SelfAttention.

    Rows of `in_proj` stand head by head: [query, key, value, beta]; those of `conv1d` [query, key,
    value]. What is mixed has the head's decays and gates behind them.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, parts: Parts, sizes: Kda, **_: object
    ):
        dim = sizes.dim
        super().__init__(config, layer_number, parts, sizes.heads, 3 * dim + 1, dim)
        self.dim = dim
        self._bound = sizes.bound
        linear = linear_options(config)
        for name in ("decay", "gate"):
            down = build_module(parts.whole_linear, config.hidden_size, dim, **linear, **WHOLE)
            up = build_module(parts.column, dim, sizes.values, gather_output=False, **linear)
            self.add_module(f"{name}_down", down)
            self.add_module(f"{name}_up", up)
        self.conv1d = self.cut(3 * dim, 1, sizes.kernel)
        self.A_log = self.cut(1, dtype=torch.float32)
        self.dt_bias = self.cut(dim, dtype=torch.float32)
        self.norm = whole_parameter(config, (dim,), config.params_dtype)

    @property
    def first_projections(self) -> list[MegatronModule]:
        return [self.in_proj, self.decay_down, self.gate_down]

    def project(self, hidden_states: Tensor) -> Tensor:
        decay, gate = (
            up(down(hidden_states)[0])[0].unflatten(-1, (-1, self.dim))
            for down, up in (
                (self.decay_down, self.decay_up),
                (self.gate_down, self.gate_up),
            )
        )
        return torch.cat((super().project(hidden_states), decay, gate), -1)

    def mix(self, mixed: Tensor, borders: Tensor | None) -> Tensor:
        dim, heads = self.dim, mixed.shape[2]
        qkv, beta, decay, gate = mixed.split((3 * dim, 1, dim, dim), -1)
        conv1d, a_log, dt_bias = self.own_heads(self.conv1d, self.A_log, self.dt_bias)
        qkv = convolve(qkv.flatten(2), conv1d, borders).unflatten(2, (heads, -1))
        decay = decay.float() + dt_bias.float().view(heads, dim)
        decay = self._decays(decay, a_log.exp()[:, None])
        beta = beta[..., 0].float().sigmoid()
        queries, keys, values = qkv.split(dim, -1)
        out = delta_rule(queries, keys, values, decay, beta, borders)
        return again(self._gated_norm, out, gate)

    def _decays(self, decay: Tensor, rate: Tensor) -> Tensor:
        if self._bound is None:
            return -rate * F.softplus(decay)
        return self._bound * torch.sigmoid(rate * decay)
