"""Seconds, bytes and synchronizations of work on a device."""

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

import megagrpo

_AT_LEAST_S = 0.02  # of one timing: shorter work is repeated
_SYNCHRONIZING = (
    "called a synchronizing CUDA operation"  # torch's warning, c10/cuda/CUDAFunctions.cpp
)


def wait_for(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, rounds: int = 3) -> float:
    """Returns the seconds of one call: the median of `rounds` timings after a warm-up, by the clock
    of the host."""
    work()
    wait_for(device)
    start = time.perf_counter()
    work()
    wait_for(device)
    count = max(1, round(_AT_LEAST_S / max(time.perf_counter() - start, 1e-7)))
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            work()
        wait_for(device)
        found.append((time.perf_counter() - start) / count)
    return median(found)


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Returns what torch's allocator held at most during a call beyond what it held before; 0 on a
    CPU."""
    if device.type != "cuda":
        work()
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@contextmanager
def synchronizations(device: torch.device) -> Iterator[Counter[str]]:
    """Counts, by line of this program or of Megatron's, how often the host waited for the device
    inside.

    What autograd calls in a thread of its own is counted at the line that called backward. On a CPU
    nothing waits.
    """
    found: Counter[str] = Counter()

    def note(message, category, filename, lineno, file=None, line=None) -> None:
        if _SYNCHRONIZING in str(message):
            found[_place()] += 1

    def explicit(*args, **kwargs) -> None:
        found[f"{_place()} (torch.cuda.synchronize)"] += 1
        synchronize(*args, **kwargs)

    synchronize = torch.cuda.synchronize
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # put back by catch_warnings
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
            torch.cuda.synchronize = explicit
        try:
            yield found
        finally:
            if device.type == "cuda":
                torch.cuda.synchronize = synchronize
                torch.cuda.set_sync_debug_mode("default")


def _place() -> str:
    """Returns file:line of the innermost frame of ours or of Megatron's."""
    for frame in reversed(traceback.extract_stack()):
        for folder in _packages():
            if Path(frame.filename).is_relative_to(folder):
                return f"{Path(frame.filename).relative_to(folder.parent)}:{frame.lineno}"
    return "elsewhere"


@cache
def _packages() -> tuple[Path, ...]:
    """Returns the folders of this program and of Megatron."""
    megatron = find_spec("megatron.core")
    assert megatron is not None and megatron.origin is not None, "the actor needs it"
    return Path(megagrpo.__file__).parent, Path(megatron.origin).parents[1]
