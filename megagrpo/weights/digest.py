"""A digest of a slice of an HF tensor, which adds up over disjoint slices and notices every single changed element.

digest(slice) = sum over its elements of odd(mix64(linear index in the HF tensor)) * (bits + 1), modulo 2^64, where
bits is the element of the published dtype read as an unsigned integer. The multiplier is odd, so one changed element
always changes the sum; mix64 is the finaliser of splitmix64 (Steele, Lea, Flood 2014), so moved elements change it
too. int64 arithmetic wraps around alike on every device, and an all-reduce (sum) of partial digests is the digest of
the whole.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megagrpo.weights.views import Box, row_major

_CHUNK = 1 << 20  # elements: int64 temporaries of 8 MiB
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def slice_digest(values: Tensor, box: Box, hf_shape: tuple[int, ...]) -> Tensor:
    """Returns the digest of one slice, int64 [] on the values' device.

    `values`: of the published dtype, shaped like `box`, which lies in an HF tensor of shape `hf_shape`.
    """
    assert tuple(values.shape) == box.size, (values.shape, box)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    strides = row_major(hf_shape)
    for start, part in _chunks(values):
        index = torch.zeros((), dtype=torch.int64, device=values.device)
        for k, (n, stride) in enumerate(zip(part.shape, strides, strict=True)):
            first = (box.start[k] + start[k]) * stride
            along = torch.arange(first, first + n * stride, stride, dtype=torch.int64, device=values.device)
            index = index.unsqueeze(-1) + along  # [..., n]
        total += (_odd_mix(index).mul_(_bits(part).add_(1))).sum()
    return total


def _chunks(values: Tensor, start: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yields (start, view) of parts of at most _CHUNK elements, cut along leading dimensions."""
    start = start or (0,) * values.dim()
    if values.numel() <= _CHUNK:
        yield start, values
        return
    dim = next(d for d, n in enumerate(values.shape) if n > 1)
    step = max(1, _CHUNK * values.shape[dim] // values.numel())
    for low in range(0, values.shape[dim], step):
        part = values.narrow(dim, low, min(step, values.shape[dim] - low))
        yield from _chunks(part, (*start[:dim], start[dim] + low, *start[dim + 1 :]))


def _bits(values: Tensor) -> Tensor:
    width = values.element_size()
    bits = values.contiguous().view(_BITS[width]).to(torch.int64)
    return bits & ((1 << (8 * width)) - 1) if width < 8 else bits


def _odd_mix(index: Tensor) -> Tensor:
    x = index + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift(x, 31)).bitwise_or_(1)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shifts to the right and fills with zeros; the shift of int64 keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
