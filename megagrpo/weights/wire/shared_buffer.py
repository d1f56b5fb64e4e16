"""Memory shared by two processes of one machine: on a GPU by a CUDA IPC handle, on the host by a file.

The file has no name (memfd): the kernel frees it when the last process that maps it ends, in whatever way.
"""

import base64
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megagrpo.system import environment

_PROBLEM = "weights.transport ipc needs every engine rank on the machine of the trainer rank beside it"


class SharedBuffer:
    """Memory of this process that another can open by `handle`, a JSON object. values: uint8 [num_bytes]."""

    def __init__(self, num_bytes: int, device: torch.device):
        self.handle: dict[str, Any] = {"bytes": num_bytes, "machine": _machine()}
        self._counter: tuple[bytes, int] | None = None  # torch's reference counter of the CUDA handle
        self._file = -1
        if device.type == "cuda":
            self._pool = torch.cuda.MemPool()  # no cached block of other segments
            with _plain_segments(), torch.cuda.use_mem_pool(self._pool, device=device):
                self.values = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            _, arguments = reduce_tensor(self.values)
            (*_, memory, size, offset, _, counter, place, event, event_needed) = arguments
            self._counter = counter, place
            self.handle["cuda"] = [_text(memory), size, offset, _text(counter), place, _text(event), event_needed]
        else:
            self._file = os.memfd_create("megagrpo-weights")
            os.ftruncate(self._file, num_bytes)
            self.values = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)
            self.handle["host"] = [os.getpid(), self._file]

    def close(self, closed_there: bool) -> None:
        """Frees the memory. closed_there: whether the other process has closed its end; else it is gone."""
        del self.values
        if self._counter is not None:
            if not closed_there:  # torch keeps the memory until every holder of the handle releases it
                with suppress(RuntimeError):
                    torch.UntypedStorage._release_ipc_counter_cuda(*self._counter)
            torch.cuda.ipc_collect()
            del self._pool
            torch.cuda.empty_cache()  # the engine's cache needs the memory
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@contextmanager
def open_shared(handle: dict[str, Any], device: torch.device) -> Iterator[Tensor]:
    """Yields the bytes behind a handle, uint8 [num_bytes]; no view of them may be kept. Raises ValueError."""
    if handle["machine"] != _machine():
        raise ValueError(f"{_PROBLEM}: this process does not see that one's memory")
    if "cuda" in handle:
        memory, size, offset, counter, place, event, event_needed = handle["cuda"]
        storage = torch.storage.TypedStorage
        index = torch.cuda.current_device() if device.index is None else device.index
        shape = (handle["bytes"],), (1,), 0
        there = index, _bytes(memory), size, offset, False, _bytes(counter), place, _bytes(event), event_needed
        values = rebuild_cuda_tensor(Tensor, *shape, storage, torch.uint8, *there)
    else:
        pid, number = handle["host"]
        path = f"/proc/{pid}/fd/{number}"
        if not os.access(path, os.R_OK | os.W_OK):
            raise ValueError(f"{_PROBLEM}: process {pid} of the trainers cannot be reached: no access to {path}")
        with open(path, "r+b", buffering=0) as file:
            values = torch.frombuffer(mmap.mmap(file.fileno(), handle["bytes"]), dtype=torch.uint8)
    yield values


@contextmanager
def _plain_segments() -> Iterator[None]:
    """Makes torch allocate by cudaMalloc inside. Expandable segments are shared by descriptors, which a process may
    take from its children only (ptrace_scope 1).
    """
    with ExitStack() as restore:
        for name, plain in environment.without_expandable_segments().items():
            restore.callback(torch.cuda.memory._set_allocator_settings, environment.get(name, ""))
            torch.cuda.memory._set_allocator_settings(plain)
        yield


def _machine() -> str:
    """Returns the boot id and the PID namespace: processes with equal ones can share memory."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
