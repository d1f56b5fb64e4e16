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
from torch.utils.checkpoint import checkpoint

from megagrpo.models.kinds.hashed.layer import HashedRouter
from megagrpo.models.kinds.hyper_connections.describe import HyperConnections


class Mixing(torch.nn.Module):
    """Computes numbers of a token from all its streams, in float32; held whole by every rank."""

    def __init__(self, config: TransformerConfig, own: HyperConnections, rows: int, scales: int):
        super().__init__()
        self.streams = own.streams
        self.own = own
        self._epsilon = config.layernorm_epsilon
        device = torch.cuda.current_device()
        shapes = {"fn": (rows, own.streams * config.hidden_size), "base": (rows,), "scale": (scales,)}
        for name, shape in shapes.items():
            parameter = torch.nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))
            # Megatron sums such gradients over tensor-parallel ranks, of which each sees a part of
            # the sequence
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by Megatron
            self.register_parameter(name, parameter)

    def keep_float32(self) -> None:
        """Restores float32 after a cast, as engines compute."""
        for parameter in self.parameters(recurse=False):
            parameter.data = parameter.data.float()

    def products(self, streams: Tensor) -> Tensor:
        """Returns [s, b, rows] of streams [s, b, n, h]."""
        flat = streams.flatten(2).float()
        normed = F.rms_norm(flat, flat.shape[-1:], None, self._epsilon)
        return F.linear(normed, self.get_parameter("fn"))

    def shares(self, products: Tensor) -> Tensor:
        """Returns the first n numbers as shares of the streams, [s, b, n]."""
        first = products[..., : self.streams] * self.get_parameter("scale")[0]
        return torch.sigmoid(first + self.get_parameter("base")[: self.streams]) + self.own.eps


class HyperConnection(Mixing):
    """Is one place of a layer."""

    def __init__(self, config: TransformerConfig, own: HyperConnections):
        super().__init__(config, own, own.outputs, 3)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the part's input [s, b, h], its shares in the streams [s, b, n] and the mixing
        [s, b, n, n] from streams [s, b, n, h]; the backward computes all of it again."""
        return checkpoint(self._mixed, streams, use_reentrant=False, preserve_rng_state=False)

    def _mixed(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, eps = self.streams, self.own.eps
        products = self.products(streams)
        _, scale, scale_of_square = self.get_parameter("scale").unbind()
        base = self.get_parameter("base")
        post = 2 * torch.sigmoid(products[..., n : 2 * n] * scale + base[n : 2 * n])
        square = products[..., 2 * n :] * scale_of_square + base[2 * n :]
        comb = square.unflatten(-1, (n, n)).softmax(-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(self.own.iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return contracted(streams, self.shares(products)), post, comb


def contracted(streams: Tensor, shares: Tensor) -> Tensor:
    """Returns the sum [s, b, h] of streams [s, b, n, h] times their shares [s, b, n]."""
    return (shares[..., None] * streams).sum(2).to(streams.dtype)


def spread(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Returns the streams behind a part that gave output [s, b, h]."""
    post, comb = post.to(streams.dtype), comb.to(streams.dtype)
    return post[..., None] * output[:, :, None] + comb.mT @ streams


def without_residual(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Takes the place of Megatron's sum with the residual, which streams are mixed for."""
    return lambda output_with_bias, residual, dropout: output_with_bias[0]


class StreamLayer(TransformerLayer):
    """Takes and returns streams; its own sums are without residual."""

    def __init__(self, config: TransformerConfig, *args, streams: HyperConnections, **options):
        super().__init__(config, *args, **options)
        self.streams = streams.streams
        self.hc_attn = HyperConnection(config, streams)
        self.hc_ffn = HyperConnection(config, streams)

    def forward(self, hidden_states: Tensor, **given) -> tuple[Tensor, None]:
        """Maps [s / tp, b n, h] to the same. given: as Megatron's; attention_bias are the
        micro-batch's tokens [b, s]."""
        tokens = given.pop("attention_bias")
        streams = hidden_states.unflatten(1, (-1, self.streams))
        hidden, post, comb = self.hc_attn(streams)
        output, _ = self._forward_attention(hidden, **given)
        streams = spread(streams, output, post, comb)
        hidden, post, comb = self.hc_ffn(streams)
        router = getattr(self.mlp, "router", None)
        if isinstance(router, HashedRouter):
            router.tokens = tokens
        streams = spread(streams, self._forward_mlp(hidden), post, comb)
        return streams.flatten(1, 2), None


class StreamHead(Mixing):
    """Contracts the streams, and norms the sum: the model's last norm."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float,
        own: HyperConnections,
        norm: type[torch.nn.Module],
    ):
        super().__init__(config, own, own.streams, 1)
        self.norm = norm(config=config, hidden_size=hidden_size, eps=eps)

    @property
    def weight(self) -> Tensor:
        """Returns the norm's."""
        return self.norm.get_parameter("weight")

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps [s / tp, b n, h] to [s / tp, b, h]."""
        streams = hidden_states.unflatten(1, (-1, self.streams))
        return self.norm(contracted(streams, self.shares(self.products(streams))))
