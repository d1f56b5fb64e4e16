"""Layers between residual streams (manifold-constrained hyper-connections; Xie et al., 2026).

A token has n streams in place of one. Around each part of a layer,

    part's input = sum_j pre_j stream_j,    stream_k' = post_k output + sum_j comb_jk stream_j

where pre, post and comb are functions of all streams, and comb is doubly stochastic. Between layers
and stages the streams of a sample stand beside each other as samples do: [s, b n, h].
"""

from collections.abc import Callable

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import functional as F

from megagrpo.models.kinds.hashed.layer import HashedRouter
from megagrpo.models.kinds.hyper_connections.describe import HyperConnections
from megagrpo.models.kinds.recurrent import again
from megagrpo.models.kinds.streams import ResidualStreams
from megagrpo.models.layers.whole_linear import whole_parameter


class Mixing(torch.nn.Module):
    """Computes numbers of a token from all its streams, in float32; held whole by every rank."""

    def __init__(self, config: TransformerConfig, own: HyperConnections, rows: int, scales: int):
        super().__init__()
        self.own = own
        self._epsilon = config.layernorm_epsilon
        self.fn = whole_parameter(config, (rows, own.streams * config.hidden_size))
        self.base = whole_parameter(config, (rows,))
        self.scale = whole_parameter(config, (scales,))

    def numbers(self, streams: Tensor, *sizes: int) -> list[Tensor]:
        """Returns [s, b, size] of streams [s, b, n, h], scaled and shifted, for each size."""
        flat = streams.flatten(2).float()
        products = F.linear(F.rms_norm(flat, flat.shape[-1:], None, self._epsilon), self.fn)
        parts = zip(products.split(sizes, -1), self.scale, self.base.split(sizes), strict=True)
        return [part * scale + base for part, scale, base in parts]

    def contracted(self, streams: Tensor, shares: Tensor) -> Tensor:
        """Returns the sum [s, b, h] of streams, by shares [s, b, n] before their sigmoid."""
        shares = torch.sigmoid(shares) + self.own.eps
        return (shares[..., None] * streams).sum(2).to(streams.dtype)


class HyperConnection(Mixing):
    """Is one place of a layer."""

    def __init__(self, config: TransformerConfig, own: HyperConnections):
        super().__init__(config, own, own.outputs, 3)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the part's input [s, b, h], its shares in the streams [s, b, n] and the mixing
        [s, b, n, n] from streams [s, b, n, h]; the backward computes all of it again."""
        return again(self._mixed, streams)

    def _mixed(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, eps = self.own.streams, self.own.eps
        pre, post, square = self.numbers(streams, n, n, n * n)
        comb = square.unflatten(-1, (n, n)).softmax(-1) + eps
        for iteration in range(self.own.iterations):
            if iteration:
                comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return self.contracted(streams, pre), 2 * torch.sigmoid(post), comb


def spread(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor | None) -> Tensor:
    """Returns the streams behind a part that gave output [s, b, h], beside each other [s, b n, h];
    without comb each keeps itself."""
    kept = streams if comb is None else comb.to(streams.dtype).mT @ streams
    added = post.to(streams.dtype)[..., None] * output[:, :, None]
    # a sum of views, no view: Megatron frees what a stage has sent
    return added.flatten(1, 2) + kept.flatten(1, 2)


def without_residual(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Takes the place of Megatron's sum with the residual, which streams are mixed for."""
    return lambda output_with_bias, residual, dropout: output_with_bias[0]


class StreamLayer(TransformerLayer):
    """Takes and returns streams, which `place` mixes; its own sums are without residual."""

    def __init__(
        self,
        config: TransformerConfig,
        *args,
        streams: ResidualStreams,
        place: type[torch.nn.Module],
        **options,
    ):
        super().__init__(config, *args, **options)
        self.streams = streams.streams
        self.hc_attn, self.hc_ffn = place(config, streams), place(config, streams)

    def forward(self, hidden_states: Tensor, **given) -> tuple[Tensor, None]:
        """Maps [s / tp, b n, h] to the same. given: as Megatron's; attention_bias are the
        micro-batch's tokens [b, s]."""
        tokens = given.pop("attention_bias")
        streams = hidden_states.unflatten(1, (-1, self.streams))
        hidden, post, comb = self.hc_attn(streams)
        output, _ = self._forward_attention(hidden, **given)
        streams = spread(streams, output, post, comb).unflatten(1, (-1, self.streams))
        hidden, post, comb = self.hc_ffn(streams)
        router = getattr(self.mlp, "router", None)
        if isinstance(router, HashedRouter):
            router.tokens = tokens
        return spread(streams, self._forward_mlp(hidden), post, comb), None


class StreamHead(Mixing):
    """Contracts the streams, and norms the sum: the model's last norm."""

    def __init__(
        self, config: TransformerConfig, own: HyperConnections, norm: type, **options: object
    ):
        """options: of the norm."""
        super().__init__(config, own, own.streams, 1)
        self.norm = norm(config=config, **options)

    @property
    def weight(self) -> Tensor:
        """Returns the norm's."""
        return self.norm.weight

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps [s / tp, b n, h] to [s / tp, b, h]."""
        streams = hidden_states.unflatten(1, (-1, self.own.streams))
        return self.norm(self.contracted(streams, *self.numbers(streams, self.own.streams)))


def norm_of_mean(own: ResidualStreams, norm: type, **options: object) -> torch.nn.Module:
    """Returns the model's last norm, which reads the mean of the streams. options: of the norm."""
    module = norm(**options)
    module.register_forward_pre_hook(
        lambda _, given: (given[0].unflatten(1, (-1, own.streams)).mean(2),)
    )
    return module
