"""One buffer on the host for many tensors, pinned as a whole; the reference's weights lie in
one."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes, of every part


class HostBuffer:
    """Has a part [sizes[i]] of bytes for each i; memory for copies from and to the device without a
    stop.

    torch's own pinned memory is rounded up to a power of two, part by part: up to twice the bytes.
    """

    def __init__(self, sizes: Iterable[int], device: torch.device):
        self.sizes = list(sizes)
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in self.sizes]
        whole = torch.empty(sum(padded), dtype=torch.uint8)
        self.parts = [
            part[:size] for part, size in zip(whole.split(padded), self.sizes, strict=True)
        ]
        self._pinned = whole.data_ptr() if device.type == "cuda" and len(whole) else None
        if self._pinned is not None:
            torch.cuda.check_error(
                int(torch.cuda.cudart().cudaHostRegister(self._pinned, len(whole), 0))
            )

    def __del__(self) -> None:
        if getattr(self, "_pinned", None) is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)


class HostReference:
    """Holds a copy of this rank's parameters in host memory: the reference model, swapped in for a
    forward."""

    def __init__(self, parameters: Mapping[str, Tensor]):
        self._parameters = list(parameters.values())
        self._buffer = HostBuffer((p.nbytes for p in self._parameters), self._parameters[0].device)
        self._weights = [
            part.view(p.dtype).view(p.shape)
            for p, part in zip(self._parameters, self._buffer.parts, strict=True)
        ]
        self.take()

    def take(self) -> None:
        """Makes the parameters of now the reference."""
        _copy(self._weights, self._parameters)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Lets the model compute with the reference weights inside; the live ones come back
        whatever happens.

        In place, because Megatron's gradient and parameter buffers hold views of these very
        tensors.
        """
        live = [p.detach().clone() for p in self._parameters]
        try:
            _copy(self._parameters, self._weights)
            yield
        finally:
            _copy(self._parameters, live)


@torch.no_grad()
def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
