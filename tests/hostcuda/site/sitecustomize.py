"""Loads the device before torch, and gives torch built for CPUs the names of one built for CUDA, when torch is
imported in this process. Tells Ray of the device, and gives SGLang the stand-ins of its kernels."""

import ctypes
import functools
import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path


def _torch(module, run) -> None:
    lib = Path(module.__spec__.origin).parent / "lib"
    library = os.environ["HOSTCUDA_LIBRARY"]
    for file in (lib / "libtorch_global_deps.so", lib / "libtorch_python.so", library):
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    run(module)
    from tests.hostcuda import cuda

    cuda.complete()
    from megagrpo.cpu.trainer import without_triton

    without_triton()


def _torch_cuda(module, run) -> None:
    from tests.hostcuda import cuda

    cuda.install()
    run(module)


def _ray(module, run) -> None:
    run(module)  # it would ask NVML
    module.NvidiaGPUAcceleratorManager.get_current_node_num_accelerators = lambda: 8


def _digests(module, run) -> None:
    run(module)  # an engine's stand-in for Triton runs nothing
    module._has_triton = functools.cache(lambda: False)


def _sglang(module, run) -> None:
    from tests.hostcuda import engine

    engine.install()
    run(module)


# the device has to be there before torch looks for one, its names before torch.cuda does
RUNS = {
    "torch": _torch,
    "torch.cuda": _torch_cuda,
    "ray._private.accelerators.nvidia_gpu": _ray,
    "sglang": _sglang,
    "megagrpo.weights.digests.digest": _digests,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in RUNS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: RUNS[name](module, run)
        return spec


if "HOSTCUDA_LIBRARY" in os.environ:
    sys.meta_path.insert(0, _Finder())
