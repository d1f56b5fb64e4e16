"""A machine with eight GPUs that is not there: torch's own functions over pretended drivers, values on the CPU.

Only what torch calls in C++ is replaced, so torch.cuda's Python code refuses what it refuses on a GPU: set_device and
use_mem_pool a device without an index, and a new thread starts on device 0.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from megagrpo.cpu.trainer import without_triton

NUM_GPUS = 8
_thread = threading.local()


class OnGpu(TorchFunctionMode):
    """Makes tensors of CUDA devices on the CPU; those of another device than this thread's current one are refused."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            index = torch.device(device).index
            if index is not None and index != current():
                raise RuntimeError(f"Expected all tensors to be on the same device: cuda:{index}, cuda:{current()}")
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any):
        self.device_index = current()

    def wait_stream(self, other: "_Stream") -> None:
        assert other.device_index == self.device_index, "waits for a stream of another device"

    def synchronize(self) -> None:
        pass


def current() -> int:
    """Returns the current device of this thread."""
    return getattr(_thread, "index", 0)


def _set(index: int) -> None:
    _thread.index = index


def _exchange(index: int) -> int:
    before = current()
    if index >= 0:
        _set(index)
    return before


@contextmanager
def pretended() -> Iterator[None]:
    """Makes torch.cuda find NUM_GPUS devices in this process; forget no thread that still computes at the end."""
    without_triton()
    in_c = {"_cuda_setDevice": _set, "_cuda_getDevice": current}
    names = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: NUM_GPUS,
        "_exchange_device": _exchange,
        "_maybe_exchange_device": _exchange,
        "_lazy_init": lambda: None,
        "Stream": _Stream,
        "default_stream": lambda *args: _Stream(),
        "current_stream": lambda *args: _Stream(),
        "stream": lambda stream: nullcontext(),
        "MemPool": lambda: mock.Mock(id=(0, 1)),
    }
    pools = ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool")
    with (
        mock.patch.multiple(torch._C, create=True, **in_c),
        mock.patch.multiple(torch.cuda, create=True, **names),
        mock.patch.multiple(torch.cuda.memory, create=True, **dict.fromkeys(pools, lambda *args: None)),
        OnGpu(),
    ):
        yield
