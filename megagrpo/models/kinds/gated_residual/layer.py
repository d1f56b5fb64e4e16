"""Gates of low rank between residual streams (SGLang's layers/hyperconnection.py, GatedResidual).

With x the streams of a token, each normed, beside each other, and n their number, a part's input and
the streams behind it are

    mean_j gate_j x_j,    stream_k' = stream_k + inject_k output
    gate = sigmoid(up silu(down x / n)),    inject = 2 sigmoid(in x / n)
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from megagrpo.models.kinds.gated_residual.describe import GatedResidual
from megagrpo.models.kinds.recurrent import again
from megagrpo.models.layers.whole_linear import whole_parameter


def normed(streams: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Norms each stream of [..., n, h] by its own part of weight [n h], which is centered at 0."""
    rows = F.rms_norm(streams.float(), streams.shape[-1:], None, epsilon)
    return (rows * (1 + weight.float()).view(streams.shape[-2:])).to(streams.dtype)


class Gates(torch.nn.Module):
    """Holds the gates of one place, whole on every rank, under the files' names."""

    hc_norm: Tensor
    input_mix_weight_down: Tensor
    input_mix_weight_up: Tensor

    def __init__(self, config: TransformerConfig, own: GatedResidual, injects: bool = True):
        super().__init__()
        self._streams = own.streams
        self._epsilon = config.layernorm_epsilon
        for name, shape in own.shapes(config.hidden_size, injects).items():
            self.register_parameter(name, whole_parameter(config, shape, config.params_dtype))

    def _mixed(self, streams: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows = normed(streams, self.hc_norm, self._epsilon)
        flat = rows.flatten(2)
        narrow = F.silu(F.linear(flat, self.input_mix_weight_down) / self._streams)
        gates = F.linear(narrow, self.input_mix_weight_up).sigmoid()
        hidden = (gates.view_as(rows) * rows).mean(2)
        weight = getattr(self, "block_inject_weight", None)
        if weight is None:
            return hidden, None, None
        return hidden, 2 * torch.sigmoid(F.linear(flat, weight) / self._streams), None


class GatedPlace(Gates):
    """Is one place of a layer."""

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Returns the part's input [s, b, h] and its shares in the streams [s, b, n], which keep
        themselves, from streams [s, b, n, h]; the backward computes all of it again."""
        return again(self._mixed, streams)


class GatedHead(Gates):
    """Contracts the streams: the model's last norm is in it."""

    def __init__(self, config: TransformerConfig, own: GatedResidual, **_: object):
        super().__init__(config, own, injects=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps [s / tp, b n, h] to [s / tp, b, h]."""
        return again(self._mixed, hidden_states.unflatten(1, (-1, self._streams)))[0]
