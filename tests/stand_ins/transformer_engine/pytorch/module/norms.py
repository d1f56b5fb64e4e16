"""Norms that compute in float32 and mark their weights for Megatron's sum over sequence-parallel ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor


def rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight for inputs [..., n] and weight [n], in the inputs' type."""
    return torch.nn.functional.rms_norm(inputs.float(), (inputs.shape[-1],), weight.float(), eps).to(inputs.dtype)


def layer_norm(inputs: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Returns (x - mean(x)) / std(x) * weight + bias for inputs [..., n], in the inputs' type."""
    shape = (inputs.shape[-1],)
    out = torch.nn.functional.layer_norm(inputs.float(), shape, weight.float(), bias.float(), eps)
    return out.to(inputs.dtype)


class _Norm(torch.nn.Module):
    def __init__(self, size, eps: float, sequence_parallel: bool | None, zero_centered_gamma: bool, dtype, device):
        super().__init__()
        if zero_centered_gamma or not isinstance(size, int):
            raise NotImplementedError("the stand-in for Transformer Engine has norms of one dimension, around 1")
        self.eps, self.sequence_parallel, self.zero_centered_gamma = eps, sequence_parallel, zero_centered_gamma
        self._new("weight", torch.ones(size, dtype=dtype, device=device))

    def _new(self, name: str, values: Tensor) -> None:
        parameter = torch.nn.Parameter(values)
        if self.sequence_parallel is not None:
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]  # read by Megatron
        self.register_parameter(name, parameter)


class RMSNorm(_Norm):
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
        size, device = hidden_size if normalized_shape is None else normalized_shape, kwargs.get("device")
        super().__init__(size, eps, sequence_parallel, zero_centered_gamma, params_dtype, device)

    def forward(self, input: Tensor) -> Tensor:
        """Maps [..., n] to [..., n]."""
        return rms_norm(input, self.weight, self.eps)


class LayerNorm(_Norm):
    """Computes (x - mean(x)) / std(x) * weight + bias."""

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
        size, device = hidden_size if normalized_shape is None else normalized_shape, kwargs.get("device")
        super().__init__(size, eps, sequence_parallel, zero_centered_gamma, params_dtype, device)
        self._new("bias", torch.zeros_like(self.weight))

    def forward(self, input: Tensor) -> Tensor:
        """Maps [..., n] to [..., n]."""
        return layer_norm(input, self.weight, self.bias, self.eps)
