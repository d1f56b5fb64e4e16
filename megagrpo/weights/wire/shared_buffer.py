"""Memory shared by two processes of one machine, through a CUDA IPC handle or a file on the host.

The file has no name (memfd), so the kernel frees it when the last process that maps it ends, even
if it is killed.
"""

import base64
import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megagrpo.system import environment
from megagrpo.system.processes import namespaces

_PROBLEM = (
    "weights.transport ipc needs every engine rank on the machine of its colocated trainer rank"
)


# The bytes, the machine (boot id and PID namespace), and how to open the memory: a CUDA handle, or a
# process and a file number. JSON can express it.
Handle = tuple[int, str, list]


class Place(NamedTuple):
    """Where a rank runs. Ranks with equal places can share memory."""

    node: str  # host name, boot id, namespaces of processes and of the network
    device: str  # UUID of its GPU; "cpu"


def place_of(device: torch.device) -> Place:
    """Returns the place of this process, which computes on `device`."""
    node = f"{socket.gethostname()} {namespaces('pid', 'net')}"
    if device.type == "cuda":
        return Place(node, str(torch.cuda.get_device_properties(device).uuid))
    return Place(node, "cpu")


class SharedBuffer:
    """Memory of this process that another can open by `handle`. values: uint8 [num_bytes]."""

    def __init__(self, num_bytes: int, device: torch.device):
        # torch's reference counter of the CUDA handle
        self._counter: tuple[bytes, int] | None = None
        self._file = -1
        if device.type == "cuda":
            self._pool = torch.cuda.MemPool()  # no cached block of other segments
            with _plain_segments(), torch.cuda.use_mem_pool(self._pool, device=device):
                self.values = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            _, arguments = reduce_tensor(self.values)
            (*_, memory, size, offset, _, counter, counter_slot, event, event_needed) = arguments
            self._counter = counter, counter_slot
            texts = (base64.b64encode(data).decode() for data in (memory, counter, event))
            how = [*texts, size, offset, counter_slot, event_needed]
        else:
            self._file = os.memfd_create("megagrpo-weights")
            os.ftruncate(self._file, num_bytes)
            self.values = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)
            how = [os.getpid(), self._file]
        self.handle: Handle = num_bytes, namespaces("pid"), how

    def close(self, closed_there: bool) -> None:
        """Frees the memory. closed_there: whether the other process has closed its end; if not, it
        has ended."""
        del self.values
        if self._counter is not None:
            # torch keeps the memory until every holder of the handle releases it
            if not closed_there:
                with suppress(RuntimeError):
                    torch.UntypedStorage._release_ipc_counter_cuda(*self._counter)
            torch.cuda.ipc_collect()
            del self._pool
            torch.cuda.empty_cache()  # the engine's cache needs the memory
        if self._file >= 0:
            os.close(self._file)


@contextmanager
def open_shared(handle: Handle, device: torch.device) -> Iterator[Tensor]:
    """Yields the bytes of a SharedBuffer, uint8 [num_bytes]. No view of them may outlive the block.
    Raises ValueError."""
    num_bytes, machine, how = handle
    if machine != namespaces("pid"):
        raise ValueError(f"{_PROBLEM}: this process does not see that one's memory")
    if device.type == "cuda":
        *texts, size, offset, counter_slot, event_needed = how
        memory, counter, event = map(base64.b64decode, texts)
        index = torch.cuda.current_device() if device.index is None else device.index
        kind = Tensor, (num_bytes,), (1,), 0, torch.storage.TypedStorage, torch.uint8
        values = rebuild_cuda_tensor(
            *kind, index, memory, size, offset, False, counter, counter_slot, event, event_needed
        )
    else:
        pid, number = how
        path = f"/proc/{pid}/fd/{number}"
        if not os.access(path, os.R_OK | os.W_OK):
            raise ValueError(
                f"{_PROBLEM}: process {pid} of the trainers cannot be reached: no access to {path}"
            )
        with open(path, "r+b", buffering=0) as file:
            values = torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
    yield values


@contextmanager
def _plain_segments() -> Iterator[None]:
    """Makes torch allocate by cudaMalloc, because only children may open expandable segments
    (ptrace_scope 1)."""
    with ExitStack() as restore:
        for name, plain in environment.without_expandable_segments().items():
            restore.callback(torch.cuda.memory._set_allocator_settings, environment.get(name, ""))
            torch.cuda.memory._set_allocator_settings(plain)
        yield
