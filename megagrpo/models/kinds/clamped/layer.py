"""The clamped SwiGLU in Megatron's experts."""

from collections.abc import Callable
from functools import partial

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

_ALPHA = 1.702  # of the sigmoid that approximates GELU's


class ClampedSwiglu(torch.nn.Module):
    """Maps [..., 2 width], in which a value of the gate precedes each of up, to [..., width]."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self._limit = config.activation_func_clamp_value

    def forward(self, both: Tensor) -> Tensor:
        gate = both[..., ::2].clamp(max=self._limit)
        up = both[..., 1::2].clamp(-self._limit, self._limit)
        return (up + 1) * gate * torch.sigmoid(_ALPHA * gate)


def _copying(build: Callable[..., torch.nn.Module], *sizes: int, **options: object):
    """Builds an expert's last layer, to whose output Megatron adds the bias in place: alone on its
    rank it would hand out a view, which autograd refuses to change."""
    linear = build(*sizes, **options)
    linear.register_forward_hook(lambda _, inputs, output: (output[0].clone(), output[1]))
    return linear


def clamped_spec(backend: BackendSpecProvider, grouped: bool) -> partial[MoELayer]:
    """Returns Megatron's layer of experts with this activation."""
    experts = backend.grouped_mlp_modules(grouped)
    parts = experts.keywords["submodules"]
    parts.activation_func = ClampedSwiglu
    if not grouped:
        parts.linear_fc2 = partial(_copying, parts.linear_fc2)
    return partial(MoELayer, submodules=MoESubmodules(experts=experts))
