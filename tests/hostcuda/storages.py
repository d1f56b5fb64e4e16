"""Storages on the device: their resizing, and their handles for other processes (CUDA IPC, played by a file)."""

import mmap
import os

import torch
from torch import UntypedStorage
from torch.storage import _StorageBase

from tests.hostcuda.cuda import host


def _bytes(storage: UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _share(storage: UntypedStorage) -> tuple:
    """Returns what torch's own method does: device, handle, bytes, offset, counter, its slot,
    event, whether to wait."""
    file = host().file_of(storage.data_ptr())
    if file < 0:
        raise RuntimeError("hostcuda: only memory made in a pool, of plain segments, has a handle")
    handle = f"{os.getpid()}/{file}".encode()
    return storage.device.index, handle, storage.nbytes(), 0, b"counter", 0, b"event", False


def _opened(device: int, handle: bytes, num_bytes: int, *_) -> UntypedStorage:
    if device != host().get_device():
        raise RuntimeError(f"hostcuda: a handle of cuda:{device} is opened on cuda:{host().get_device()}")
    process, number = handle.decode().split("/")
    with open(f"/proc/{process}/fd/{number}", "r+b", buffering=0) as file:
        mapped = torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
    return host().as_device(mapped, device).untyped_storage()


def install() -> None:
    """Replaces the methods that are empty in a torch without CUDA."""
    plain_resize, plain_to = UntypedStorage.resize_, _StorageBase.to

    def resize_(self, size: int):
        if self.device.type != "cuda":
            return plain_resize(self, size)
        host().resize(_bytes(self), size)
        return self

    def to(self, *, device, non_blocking=False):
        device = torch.device(device)
        if device.type != "cuda" or self.device.type == "cuda":
            return plain_to(self, device=device, non_blocking=non_blocking)
        there = torch.empty(self.nbytes(), dtype=torch.uint8, device=device)
        return there.copy_(_bytes(self)).untyped_storage()

    UntypedStorage.resize_ = resize_
    _StorageBase.to = UntypedStorage.to = to
    UntypedStorage._share_cuda_ = _share
    UntypedStorage._new_shared_cuda = staticmethod(_opened)
    UntypedStorage._release_ipc_counter_cuda = staticmethod(lambda *_: None)
