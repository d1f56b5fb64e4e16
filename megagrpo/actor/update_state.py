"""State that only an update needs, optimizer state and gradients: on the device or offloaded to the
host.

Storages release and regain their memory in place, so all views remain valid: Megatron's buckets, a
parameter's main_grad, and the optimizer's shards.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor, UntypedStorage

from megagrpo.actor.host_buffer import HostBuffer
from megagrpo.actor.optimizer import optimizer_tensors
from megagrpo.models import internals_0_19


class UpdateState:
    """Moves the optimizer's state, its float32 weights included, and frees the gradients, which are
    0 before an update.

    What the optimizer shares with the model, the weights themselves where these are float32, stays.
    """

    def __init__(
        self,
        model: Sequence[DistributedDataParallel],
        optimizer: ChainedOptimizer,
        device: torch.device,
    ):
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._buffer = HostBuffer([], device)
        # bytes, by their storage's identity
        self._on_host: dict[int, tuple[UntypedStorage, Tensor]] = {}
        self.away = False

    def offload(self) -> None:
        """Copies the optimizer's state to the host, pinned, and gives its memory and that of the
        gradients back."""
        if self.away:
            return
        self._optimizer.zero_grad()  # what gradients there are beside Megatron's buffers
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self._tensors()
        }
        sizes = [storage.nbytes() for storage in storages.values()]
        if sizes != self._buffer.sizes:  # the first time, or the optimizer has made state
            self._on_host.clear()
            self._buffer = HostBuffer([], self._device)  # the old memory goes before the new comes
            self._buffer = HostBuffer(sizes, self._device)
        self._on_host = dict(
            zip(storages, zip(storages.values(), self._buffer.parts, strict=True), strict=True)
        )
        for storage, host in self._on_host.values():
            host.copy_(_bytes_of(storage), non_blocking=True)
        self._synchronize()
        for storage, _ in self._on_host.values():
            storage.resize_(0)
        for chunk in self._model:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
            internals_0_19.forget_fp8_weights(chunk)
        self.away = True
        torch.cuda.empty_cache()

    def bring_back(self) -> None:
        """Undoes `offload`: the same bits in the same places, and gradients of 0."""
        if not self.away:
            return
        for storage, host in self._on_host.values():
            storage.resize_(len(host))
            _bytes_of(storage).copy_(host, non_blocking=True)
        for chunk in self._model:
            chunk.restore_grad_buffers(synchronize=False)
        self._synchronize()
        self.away = False

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Lets the optimizer's tensors be those on the host inside, where they are away: for a
        checkpoint."""
        swapped = []
        if self.away:
            for tensor in {id(tensor): tensor for tensor in self._tensors()}.values():
                _, host = self._on_host[tensor.untyped_storage()._cdata]
                there = torch.empty(0, dtype=tensor.dtype)
                first = host.storage_offset() // tensor.itemsize + tensor.storage_offset()
                there.set_(host.untyped_storage(), first, tensor.size(), tensor.stride())
                swapped.append((tensor, tensor.data))
                tensor.data = there
        try:
            yield
        finally:
            for tensor, empty in swapped:
                tensor.data = empty

    def _tensors(self) -> Iterator[Tensor]:
        """Yields the optimizer's tensors on the device whose memory is not the model's."""
        model_storages = {
            tensor.untyped_storage()._cdata
            for chunk in self._model
            for tensors in (chunk.module.parameters(), chunk.module.buffers())
            for tensor in tensors
        }
        for tensor in optimizer_tensors(self._optimizer):
            if (
                tensor.device.type == self._device.type
                and tensor.untyped_storage()._cdata not in model_storages
            ):
                yield tensor

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
