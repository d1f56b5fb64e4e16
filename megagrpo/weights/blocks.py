"""FP8 as DeepSeek-V3 publishes it: E4M3 values with one float32 scale for each block of 128 x 128
of a matrix, or of each matrix of a stack [experts, n, m].

    scale(block) = max(|x| over the block, 1e-12) / 448        value = e4m3(x / scale(block))

in float32; e4m3 rounds to the nearest, ties to even. 448 is the largest value of E4M3, 1e-12 keeps
a block of zeros from 0 / 0. Blocks at a matrix's end may be partial.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megagrpo.models.stored.quantization import FP8_BLOCK
from megagrpo.weights.copies.views import Box

FP8 = torch.float8_e4m3fn
_LARGEST, _SMALLEST = 448.0, 1e-12


def grid_of(start: Sequence[int], size: Sequence[int]) -> Box:
    """Returns the blocks that a part of a matrix touches, as a box of the grid of blocks."""
    block = _block(len(start))
    first = tuple(a // n for a, n in zip(start, block, strict=True))
    stop = (-(-(a + n) // by) for a, n, by in zip(start, size, block, strict=True))
    return Box(first, tuple(b - a for a, b in zip(first, stop, strict=True)))


def whole_grid(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of blocks of a tensor of this shape, for each of its dimensions."""
    return grid_of((0,) * len(shape), shape).size


def block_maxima(values: Tensor, start: tuple[int, ...]) -> Tensor:
    """Returns the largest |element| of each block, float32 [..., blocks, blocks].

    values: a part [..., n, m] of a matrix or a stack, which begins at `start`.
    """
    *stack, rows, columns = grid_of(start, tuple(values.shape)).size
    height, width = FP8_BLOCK
    padded = torch.zeros([*stack, rows * height, columns * width], device=values.device)
    top, left = (first % block for first, block in zip(start[-2:], FP8_BLOCK, strict=True))
    padded[..., top : top + values.shape[-2], left : left + values.shape[-1]] = values
    blocks = padded.abs_().unflatten(-1, (columns, width)).unflatten(-3, (rows, height))
    return blocks.amax((-3, -1))


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
    for dim, (first, block) in enumerate(zip(start, _block(len(start)), strict=True)):
        scales = scales.repeat_interleave(block, dim).narrow(dim, first % block, shape[dim])
    return scales


def _block(dims: int) -> tuple[int, ...]:
    return (*(1,) * (dims - 2), *FP8_BLOCK)
