"""Gated delta net: linear attention whose state is a matrix a head, in place of a layer's attention
(Yang et al., arXiv 2412.06464).

    S(t) = exp(g(t)) S(t-1) (1 - beta(t) k(t) k(t)^T) + beta(t) v(t) k(t)^T,    out(t) = S(t) q(t)

Queries, keys and values pass a short causal convolution first. On a GPU both are the kernels of
flash-linear-attention, as in Megatron's own layer, which computes nothing without them; on a CPU
torch.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from megagrpo.models.kinds.gated_delta.describe import GatedDelta
from megagrpo.models.kinds.recurrent import CHUNK, RecurrentMixer, again, convolve, in_chunks
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
        mixing, rule = (convolve_fla, rule_fla) if mixed.is_cuda else (convolve, delta_rule)
        conv1d, a_log, dt_bias = self.own_heads(self.conv1d, self.A_log, self.dt_bias)
        qkv = mixing(qkv.flatten(2), conv1d, None, borders)
        qkv = qkv.unflatten(2, (heads, -1))
        query, key, value = qkv.split((self.key_dim, self.key_dim, values), -1)
        query, key = (t.repeat_interleave(self.values, 2) for t in (query, key))
        value, gate = (t.unflatten(3, (self.values, -1)).flatten(2, 3) for t in (value, gate))
        decay = -a_log.exp() * F.softplus(alpha.flatten(2).float() + dt_bias.float())
        out = rule(query, key, value, decay, beta.flatten(2).float().sigmoid(), borders)
        out = again(self._gated_norm, out, gate)
        return out.flatten(2).unflatten(2, (heads, -1))


def convolve_fla(x: Tensor, weight: Tensor, _: None, borders: Tensor | None) -> Tensor:
    from fla.modules.convolution import causal_conv1d

    return causal_conv1d(
        x=x.contiguous(), weight=weight.squeeze(1), activation="silu", cu_seqlens=borders
    )[0]


def rule_fla(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, borders: Tensor | None
) -> Tensor:
    """Computes delta_rule by a GPU's kernels. borders: of packed sequences."""
    if decay.dim() == query.dim():  # of each channel
        from fla.ops.kda import chunk_kda as kernel
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel
    query, key, value = (t.contiguous() for t in (query, key, value))
    return kernel(
        query,
        key,
        value,
        g=decay,
        beta=beta,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=borders,
    )[0]


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, borders: Tensor | None
) -> Tensor:
    """Computes the rule for query, key [b, s, heads, d], value [b, s, heads, e], decay [b, s,
    heads] or of each channel of the keys [b, s, heads, d], and beta [b, s, heads] in float32: [b,
    s, heads, e]."""
    assert borders is None, "sequences are rows here"
    if decay.dim() < key.dim():
        decay = decay[..., None]
    length = query.shape[1]
    query, key, value, decay, beta = (in_chunks(t) for t in (query, key, value, decay, beta))
    query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
    total = decay.double().cumsum(-2)  # rounded, it would be a rounded exponent
    new, erased, inside = _inside_chunks(query, key, value, total, beta)
    from_start, to_end = total.exp().float(), (total[..., -1:, :] - total).exp().float()
    from_state, to_state = query * from_start, key * to_end
    state = query.new_zeros(*query.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    for i in range(query.shape[2]):
        values = new[:, :, i] - erased[:, :, i] @ state
        outputs.append(from_state[:, :, i] @ state + inside[:, :, i] @ values)
        state = state * from_start[:, :, i, -1, :, None] + to_state[:, :, i].mT @ values
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2)


def _unit(t: Tensor) -> Tensor:
    return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)


def _inside_chunks(
    query: Tensor, key: Tensor, value: Tensor, total: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns of each chunk the values that it writes if its first state is 0, the keys at which
    that state is erased, and the weights of its queries on values.

    Its recurrence is one triangular system (Yang et al., arXiv 2406.06484, 3). total: sums of decays
    from the chunk's start.
    """
    past = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    between = total[..., :, None, :] - total[..., None, :, :]
    between = between.masked_fill(~past[..., None], -torch.inf).exp().float()
    written = key * beta[..., None]
    system = _products(written, key, between).tril(-1) + torch.eye(CHUNK)
    right = torch.cat((value * beta[..., None], written * total.exp().float()), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, erased = solved.split((value.shape[-1], key.shape[-1]), -1)
    return new, erased, _products(query, key, between)


def _products(rows: Tensor, key: Tensor, between: Tensor) -> Tensor:
    """Returns each row's product with each key, times what decays from it to the row [..., rows,
    keys, 1 or d]."""
    if between.shape[-1] == 1:
        return rows @ key.mT * between[..., 0]
    return (rows[..., :, None, :] * key[..., None, :, :] * between).sum(-1)
