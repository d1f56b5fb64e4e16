"""MXFP4 as gpt-oss publishes its experts (OCP Microscaling 1.0): X [experts, inputs, outputs] is in

X_blocks [experts, outputs, inputs / 32, 16] uint8: input 2 j of a block is in bits 0 to 3 of byte j
X_scales [experts, outputs, inputs / 32] uint8: a power of two for each block, plus 127
weight = bfloat16(value * 2 ** (scale - 127)), which is exact

DeepSeek-V4 has the same of each expert's matrix X [outputs, inputs], with the bytes of a row's blocks
behind each other, int8, and scales as E8M0.
"""

import torch
from torch import Tensor

from megagrpo.models.stored.quantization import MXFP4_BLOCK

# of the first eight codes; the others are these with a minus
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def unpack_into(target: Tensor, blocks: Tensor, scales: Tensor, start: tuple[int, ...]) -> None:
    """Fills a box of X that begins at `start` from the whole tensors."""
    if blocks.dim() == 2:
        blocks = blocks.view(torch.uint8).unflatten(1, (-1, MXFP4_BLOCK // 2))[None]
        scales = scales.view(torch.uint8)[None]
        target = target.mT[None]
        start = (0, *reversed(start))
    first, column, row = (
        slice(low, low + size) for low, size in zip(start, target.shape, strict=True)
    )
    near = slice(column.start // MXFP4_BLOCK, -(-column.stop // MXFP4_BLOCK))
    codes = blocks[first, row, near].to(target.device)
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    values = torch.tensor(_MAGNITUDES, device=target.device)
    values = torch.cat((values, -values))[codes]
    exponents = scales[first, row, near].to(target.device).int() - _BIAS
    weight = torch.ldexp(values, exponents[..., None]).flatten(2)
    left = column.start - near.start * MXFP4_BLOCK
    target.copy_(weight[..., left : left + target.shape[1]].mT)
