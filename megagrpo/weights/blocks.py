"""FP8 as DeepSeek-V3 publishes it: E4M3 values with one float32 scale for each block of 128 x 128
of a matrix.

    scale(block) = max(|x| over the block, 1e-12) / 448        value = e4m3(x / scale(block))

in float32; e4m3 rounds to the nearest, ties to even. 448 is the largest value of E4M3, 1e-12 keeps
a block of zeros from 0 / 0. Blocks at a matrix's end may be partial.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megagrpo.families.quantization import FP8_BLOCK
from megagrpo.weights.copies.views import Box

FP8 = torch.float8_e4m3fn
_LARGEST, _SMALLEST = 448.0, 1e-12


def grid_of(start: Sequence[int], size: Sequence[int]) -> Box:
    """Returns the blocks that a part of a matrix touches, as a box of the grid of blocks."""
    first = tuple(a // block for a, block in zip(start, FP8_BLOCK, strict=True))
    stop = (-(-(a + n) // block) for a, n, block in zip(start, size, FP8_BLOCK, strict=True))
    return Box(first, tuple(b - a for a, b in zip(first, stop, strict=True)))


def block_maxima(values: Tensor, start: tuple[int, ...]) -> Tensor:
    """Returns the largest |element| of each block, float32 [blocks, blocks].

    values: a part [n, m] of a matrix, which begins at `start`.
    """
    grid = grid_of(start, tuple(values.shape))
    padded = torch.zeros(
        [n * b for n, b in zip(grid.size, FP8_BLOCK, strict=True)], device=values.device
    )
    top, left = (first % block for first, block in zip(start, FP8_BLOCK, strict=True))
    padded[top : top + values.shape[0], left : left + values.shape[1]] = values
    rows, columns = grid.size
    return padded.abs_().view(rows, FP8_BLOCK[0], columns, FP8_BLOCK[1]).amax((1, 3))


def block_scales(maxima: Tensor) -> Tensor:
    """Returns the scales of blocks with these maxima, float32 of the same shape."""
    return maxima.clamp(min=_SMALLEST) / _LARGEST


def quantise(values: Tensor, start: tuple[int, ...], scales: Tensor) -> Tensor:
    """Returns values / scale of their block in E4M3, [n, m]. start: see block_maxima; scales
    [blocks, blocks]."""
    return (values.float() / _of_elements(scales, start, values.shape)).to(FP8)


def dequantise(values: Tensor, start: tuple[int, ...], scales: Tensor) -> Tensor:
    """Returns values in E4M3 * scale of their block, float32 [n, m]; arguments as those of
    `quantise`."""
    return values.float() * _of_elements(scales, start, values.shape)


def _of_elements(scales: Tensor, start: tuple[int, ...], shape: Sequence[int]) -> Tensor:
    """Returns the scale of each element of a part that begins at `start`; scales of the blocks that
    it touches."""
    for dim, (first, block) in enumerate(zip(start, FP8_BLOCK, strict=True)):
        scales = scales.repeat_interleave(block, dim).narrow(dim, first % block, shape[dim])
    return scales
