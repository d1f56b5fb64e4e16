"""INT4 as Kimi-K2.5 publishes its experts: compressed-tensors' pack-quantized format, symmetric.

X.weight_packed [n, m / 8] int32: column 8 j + i is in bits 4 i to 4 i + 3 of word j, plus 8
X.weight_scale [n, m / group]: one for each group of columns
weight = bfloat16((value - 8) * scale)
"""

import torch
from torch import Tensor

from megagrpo.models.stored.quantization import INT4_WORD


def unpacked(words: Tensor) -> Tensor:
    """Returns the integers [n, 8 m], from -8 to 7, of words [n, m] int32."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 15).flatten(1) - 8


def unpack_into(target: Tensor, words: Tensor, scales: Tensor, left: int) -> None:
    """Fills a box of a weight that begins at column `left`.

    words, scales: of the box's rows, and of all columns.
    """
    right = left + target.shape[1]
    group = words.shape[1] * INT4_WORD // scales.shape[1]
    near = words[:, left // INT4_WORD : -(-right // INT4_WORD)].to(target.device)
    values = unpacked(near)[:, left % INT4_WORD :][:, : right - left].float()
    column_group = torch.arange(left, right, device=target.device) // group
    values *= scales.to(target.device, torch.float32)[:, column_group]
    target.copy_(values.bfloat16())
