"""The reference model: the initial weights of this rank, kept on the host and swapped into the live parameters for a forward."""

from collections.abc import Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class HostReference:
    def __init__(self, parameters: Mapping[str, Tensor]):
        pin = torch.cuda.is_available()
        self._parameters = parameters
        self._weights = {
            name: torch.empty_like(p, device="cpu", pin_memory=pin).copy_(p.detach()) for name, p in parameters.items()
        }

    @contextmanager
    def swapped_in(self):
        """Inside, the model computes with the reference weights; the live ones come back whatever happens.

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
