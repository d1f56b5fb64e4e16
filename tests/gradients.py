"""Gradients beside those of the same function in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor


def assert_gradients_agree(found: Tensor, inputs: Sequence[Tensor], expected: Tensor, exact: Sequence[Tensor]) -> None:
    """Of a random sum of the values: each input's, against its largest."""
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip(inputs, exact, strict=True):
        assert one.grad is not None and other.grad is not None
        off = (one.grad - other.grad).abs().max() / other.grad.abs().max()
        assert off < 1e-5, float(off)
