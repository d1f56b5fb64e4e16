"""One buffer on the host for many tensors, pinned as a whole."""

from collections.abc import Iterable

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes, of every part


class HostBuffer:
    """Has a part [sizes[i]] of bytes for each i; memory for copies from and to the device without a stop.

    torch's own pinned memory is rounded up to a power of two, part by part: up to twice the bytes.
    """

    def __init__(self, sizes: Iterable[int], device: torch.device):
        self.sizes = list(sizes)
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in self.sizes]
        whole = torch.empty(sum(padded), dtype=torch.uint8)
        self.parts = [part[:size] for part, size in zip(whole.split(padded), self.sizes, strict=True)]
        self._pinned = whole.data_ptr() if device.type == "cuda" and len(whole) else None
        if self._pinned is not None:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(self._pinned, len(whole), 0)))

    def __del__(self) -> None:
        if getattr(self, "_pinned", None) is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)


def view(part: Tensor, like: Tensor) -> Tensor:
    """Returns bytes [n] of a buffer as a contiguous tensor of the shape and type of `like`."""
    return part.view(like.dtype).view(like.shape)
