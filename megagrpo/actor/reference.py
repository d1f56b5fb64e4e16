"""The reference model: initial weights in host memory, swapped in for a forward."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from megagrpo.actor.host_buffer import HostBuffer, view


class HostReference:
    """Holds a copy of this rank's parameters in host memory."""

    def __init__(self, parameters: Mapping[str, Tensor]):
        device = next(iter(parameters.values())).device
        self._parameters = parameters
        self._buffer = HostBuffer((p.nbytes for p in parameters.values()), device)
        self._weights = {
            name: view(part, p).copy_(p.detach())
            for (name, p), part in zip(parameters.items(), self._buffer.parts, strict=True)
        }

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Lets the model compute with the reference weights inside; the live ones come back whatever happens.

        In place, because Megatron's gradient and parameter buffers hold views of these very tensors.
        """
        live = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            self._write(self._weights)
            yield
        finally:
            self._write(live)

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
