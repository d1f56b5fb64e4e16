"""MiniMax-M2's RMSNorm of queries or keys: over all heads of a token together, on whichever ranks
they are."""

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megagrpo.models.layers.whole_linear import whole_parameter


class NormOverHeads(torch.nn.Module):
    """Every tensor-parallel rank holds the weight [heads d] whole and uses its own heads' part.

    Megatron sums gradients over these ranks for each name with q_layernorm or k_layernorm: a weight
    that is cut would get the gradients of other heads added, while logits and loss are right.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int):
        """hidden_size: of a head; heads: of the whole model."""
        super().__init__()
        self.eps, self.heads = eps, heads
        self.tp = config.tensor_model_parallel_size
        self.first = mpu.get_tensor_model_parallel_rank() * heads // self.tp  # of this rank's heads
        self.weight = whole_parameter(config, (heads * hidden_size,), config.params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., local heads, d] to the same shape; sums in float32.

        With fewer heads than ranks, some ranks hold the same head, all of them equally often.
        """
        values = x.float()
        squares = values.square().mean((-2, -1), keepdim=True)
        if self.tp > 1:  # the sum over ranks, forward and backward
            squares = reduce_from_tensor_model_parallel_region(squares)
            squares = copy_to_tensor_model_parallel_region(squares) / self.tp
        weight = self.weight.view(self.heads, -1)[self.first : self.first + x.shape[-2]]
        return (values * torch.rsqrt(squares + self.eps) * weight.float()).to(x.dtype)
