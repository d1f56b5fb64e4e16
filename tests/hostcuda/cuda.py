"""The names that torch._C has in a build for CUDA: torch's own Python code above them runs as it is."""

import importlib.util
import os
import sys
import threading
import time
import uuid
from functools import cache
from pathlib import Path

import torch

TOTAL = 80 << 30


@cache
def host():
    """Returns the compiled module, which site/sitecustomize.py has loaded."""
    spec = importlib.util.spec_from_file_location("hostcuda", os.environ["HOSTCUDA_LIBRARY"])
    module = importlib.util.module_from_spec(spec)
    sys.modules["hostcuda"] = module
    spec.loader.exec_module(module)
    return module


def visible() -> list[int]:
    """Returns the numbers of the devices that CUDA_VISIBLE_DEVICES leaves."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(range(host().device_count))
    return [int(name) for name in named.split(",") if name.strip() not in ("", "-1")]


class Properties:
    """Of an H100, as torch.cuda.get_device_properties returns them."""

    name = "NVIDIA H100 80GB HBM3"
    major, minor = 9, 0
    total_memory = TOTAL
    multi_processor_count = 132
    warp_size = 32
    max_threads_per_multi_processor = 2048
    max_threads_per_block = 1024
    regs_per_multiprocessor = 65536
    shared_memory_per_block = 49152
    shared_memory_per_block_optin = 232448
    shared_memory_per_multiprocessor = 233472
    L2_cache_size = 50 << 20
    is_integrated = 0
    gcnArchName = ""  # noqa: N815  torch's name

    def __init__(self, index: int):
        number = visible()[index]  # the same in every process
        self.uuid = uuid.UUID(int=number + 1)
        self.pci_bus_id = number


class Stream(torch.Stream):
    """torch.Stream does everything, by the device's guard."""

    def __new__(cls, priority=0, stream_id=None, device_index=None, device_type=None, stream_ptr=0):
        device_index = host().get_device() if device_index is None else device_index
        stream_id = host().new_stream() if stream_id is None else stream_id
        return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=1)

    @property
    def cuda_stream(self) -> int:
        return 0x1000 + self.stream_id if self.stream_id else 0

    @property
    def priority(self) -> int:
        return 0


class Event(torch.Event):
    """torch.Event does everything, by the device's guard."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        return super().__new__(cls, "cuda", enable_timing=enable_timing)

    def __init__(self, enable_timing=False, **_):
        self._timing = enable_timing
        self._at: float | None = None

    def record(self, stream=None) -> None:
        self._at = time.perf_counter()
        super().record(stream or torch.cuda.current_stream())

    def elapsed_time(self, end: "Event") -> float:
        if not (self._timing and end._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end.query()):
            raise RuntimeError("CUDA error: device not ready")
        return 1e3 * (end._at - self._at)


class Runtime:
    """The functions of libcudart that are called by name."""

    class cudaError(int):  # noqa: N801  CUDA's name
        success = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        return 0 if host().register_host(address, num_bytes) else 712

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0 if host().unregister_host(address) else 713

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:  # noqa: N802
        return TOTAL - host().memory(device)[0], TOTAL

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"error {error}"

    def cudaProfilerStart(self) -> int:  # noqa: N802
        return 0

    cudaProfilerStop = cudaProfilerStart  # noqa: N815


class MemPool:
    """Memory that is allocated inside lies in segments of its own, which other processes can map."""

    _made = 0

    def __init__(self, *_):
        MemPool._made += 1
        self._number = MemPool._made

    @property
    def id(self) -> tuple[int, int]:
        return 0, self._number

    def use_count(self) -> int:
        return 1


class Allocator:
    """torch's settings of its allocator, and the pool of each thread."""

    def __init__(self):
        names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        self.settings = next((os.environ[name] for name in names if name in os.environ), "")
        self._pools = threading.local()

    def set(self, settings: str) -> None:
        self.settings = settings

    def begin(self, device: int, pool: tuple[int, int]) -> None:
        assert getattr(self._pools, "open", None) is None, "a pool inside of another"
        self._pools.open = pool
        # CUDA's handles name memory of cudaMalloc, not what is mapped piece by piece
        host().in_pool("expandable_segments:True" not in self.settings)

    def end(self, device: int, pool: tuple[int, int]) -> None:
        assert getattr(self._pools, "open", None) == pool, "another pool is open"
        self._pools.open = None
        host().in_pool(False)


def _exchange(index: int) -> int:
    before = host().get_device()
    if index < 0:
        return -1
    host().set_device(index)
    return before


def _statistics(device: int) -> dict:
    held, peak, blocks = host().memory(device)

    def one(current: int, peak: int) -> dict:
        values = {"current": current, "peak": peak, "allocated": current, "freed": 0}
        return dict.fromkeys(("all", "small_pool", "large_pool"), values)

    of_blocks = ("allocation", "segment", "active", "inactive_split")
    of_bytes = ("allocated", "reserved", "active", "inactive_split", "requested")
    zero = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
    found = {name: one(blocks, blocks) for name in of_blocks}
    found |= {f"{name}_bytes": one(held, peak) for name in of_bytes}
    none = {"oversize_allocations": {}, "oversize_segments": {}, "max_split_size": -1}
    return found | none | dict.fromkeys(zero, 0)


def _init() -> None:
    if not visible():
        raise RuntimeError("No CUDA GPUs are available")
    torch.cuda.default_generators = tuple(host().generator(i) for i in range(host().device_count))
    torch.cuda._get_device_properties = Properties


def install() -> None:
    """Gives torch._C its names; to be called before torch.cuda is imported."""
    device, allocator, debug = host(), Allocator(), [0]
    ready: list[bool] = []

    def init() -> None:
        _init()
        ready.append(True)

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        device.set_device(device_index)
        device.set_stream(device_index, stream_id)

    def set_debug(mode: int) -> None:
        debug[0] = mode
        device.warn_of_waits(mode != 0)

    def nothing(*_):
        return None

    functions = {
        "cuda_init": init,
        "cuda_getDeviceCount": lambda: len(visible()),
        "cuda_setDevice": device.set_device,
        "cuda_getDevice": device.get_device,
        "cuda_exchangeDevice": _exchange,
        "cuda_maybeExchangeDevice": _exchange,
        "cuda_isInBadFork": lambda: False,
        "cuda_hasPrimaryContext": lambda index: bool(ready),
        "cuda_synchronize": device.synchronize,
        "cuda_getCurrentStream": lambda i: (device.get_stream(i), i, 1),
        "cuda_getCurrentRawStream": lambda i: device.get_stream(i),
        "cuda_getDefaultStream": lambda i: (0, i, 1),
        "cuda_setStream": set_stream,
        "cuda_set_sync_debug_mode": set_debug,
        "cuda_get_sync_debug_mode": lambda: debug[0],
        "cuda_memoryStats": _statistics,
        "cuda_resetPeakMemoryStats": device.reset_peak,
        "cuda_memorySnapshot": lambda *_: {"segments": []},
        "cuda_getAllocatorBackend": lambda: "native",
        "cuda_beginAllocateToPool": allocator.begin,
        "cuda_beginAllocateCurrentThreadToPool": allocator.begin,
        "cuda_endAllocateToPool": allocator.end,
        "accelerator_setAllocatorSettings": allocator.set,
        "cuda_canDeviceAccessPeer": lambda a, b: a != b,
        "cuda_getArchFlags": lambda: "sm_80 sm_90 sm_100",
        "cuda_getCompiledVersion": lambda: 13000,
        "cuda_getCurrentBlasHandle": lambda: 1,
        "cuda_isCurrentStreamCapturing": lambda: False,
        "nccl_version": lambda: (2 << 32) | (29 << 16) | 7,
        "nccl_version_suffix": lambda: b"",
    }
    ignored = (
        "emptyCache releasePool ipc_collect resetAccumulatedMemoryStats setMemoryFraction sleep "
        "lock_mutex unlock_mutex clearCublasWorkspaces"
    )
    functions |= {f"cuda_{name}": nothing for name in ignored.split()}
    for name, function in functions.items():
        setattr(torch._C, f"_{name}", function)
    classes = {"_CudaStreamBase": Stream, "_CudaEventBase": Event, "_CudaDeviceProperties": Properties}
    plain = ("_cuda_CUDAAllocator", "_CUDAGraph", "_graph_pool_handle")
    classes |= {name: type(name, (), {}) for name in plain} | {"_MemPool": MemPool, "_cudart": Runtime()}
    for name, value in classes.items():
        setattr(torch._C, name, value)
    torch._C._has_cuda = True


def complete() -> None:
    """Does what needs a whole torch."""
    from tests.hostcuda import kernels, nccl, storages

    torch.version.cuda = "13.0"
    host().check_by_iterator(_checked_by_iterator())
    for part in (storages, nccl, kernels):
        part.install()


def _checked_by_iterator() -> list[str]:
    """Returns the operators whose devices TensorIterator compares, which takes numbers on the host."""
    import torchgen
    import yaml

    file = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    by_name = {entry["func"].split("(")[0]: entry for entry in entries}

    def unchecked(entry: dict) -> bool:
        delegate = by_name.get(entry.get("structured_delegate"), {})
        return "NoCheck" in (entry.get("device_check"), delegate.get("device_check"))

    return [f"aten::{name}" for name, entry in by_name.items() if unchecked(entry)]
