"""A linear layer replicated on all tensor-parallel ranks: latent attention's down projections.

Megatron's local layers cut them by columns and gather the outputs; the gradient of the rotary part
of keys, which all heads share, is then split over the ranks where it has to be summed, silently.
Imports no Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

# besides, what a layer is built with that every rank holds whole
WHOLE = {"skip_weight_param_allocation": False, "parallel_mode": "duplicated"}


def whole_parameter(
    config: TransformerConfig, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.nn.Parameter:
    """Returns a parameter that every rank has whole, whose gradients Megatron sums over
    tensor-parallel ranks: each has that of a part of the sequence, or of some heads. Float32 stays
    float32 in a bfloat16 model, as engines compute."""
    device = torch.cuda.current_device()
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by Megatron
    parameter.stays_float32 = dtype == torch.float32  # type: ignore[attr-defined]  # read by build.py
    return parameter


def linear_options(config: TransformerConfig) -> dict[str, Any]:
    """Returns what Megatron's linear layers are built with."""
    off = dict.fromkeys(("bias", "is_expert", "skip_bias_add"), False)
    return {"config": config, "init_method": config.init_method, **off}


class WholeLinear(torch.nn.Module):
    """Applies a whole weight [outputs, inputs] to a rank's part of the sequence; takes what
    Megatron's layers take."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **_):
        super().__init__()
        self.weight = whole_parameter(config, (output_size, input_size), config.params_dtype)

    def forward(self, inputs: Tensor) -> tuple[Tensor, None]:
        """Maps [s / tp, b, inputs] to [s / tp, b, outputs]; as Megatron's layers, with the bias
        that is left to add."""
        return torch.nn.functional.linear(inputs, self.weight), None
