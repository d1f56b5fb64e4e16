"""Norms that compute in float32 and mark their weights for Megatron's sum over sequence-parallel ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor


def rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight for inputs [..., n] and weight [n], in the inputs' type."""
    return torch.nn.functional.rms_norm(inputs.float(), (inputs.shape[-1],), weight.float(), eps).to(inputs.dtype)


class RMSNorm(torch.nn.Module):
    """Computes x / rms(x) * weight."""

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs,
    ) -> None:
        super().__init__()
        size = hidden_size if normalized_shape is None else normalized_shape
        if zero_centered_gamma or not isinstance(size, int):
            raise NotImplementedError("the stand-in for Transformer Engine has norms of one dimension, around 1")
        self.eps, self.sequence_parallel, self.zero_centered_gamma = (eps, sequence_parallel, zero_centered_gamma)
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=params_dtype, device=kwargs.get("device")))
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]  # read by Megatron

    def forward(self, input: Tensor) -> Tensor:
        """Maps [..., n] to [..., n]."""
        return rms_norm(input, self.weight, self.eps)
