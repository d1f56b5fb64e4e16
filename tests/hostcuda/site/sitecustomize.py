"""Loads the device before torch, and gives torch built for CPUs the names of one built for CUDA, when torch is
imported in this process."""

import ctypes
import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path


class _BeforeTorch(importlib.abc.MetaPathFinder):
    """The device has to be there before torch looks for one, its names before torch.cuda does."""

    def find_spec(self, name, path=None, target=None):
        if name not in ("torch", "torch.cuda"):
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        run = spec.loader.exec_module

        def exec_module(module) -> None:
            if name == "torch":
                lib = Path(spec.origin).parent / "lib"
                library = os.environ["HOSTCUDA_LIBRARY"]
                for file in (lib / "libtorch_global_deps.so", lib / "libtorch_python.so", library):
                    ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
                run(module)
                from tests.hostcuda import cuda

                cuda.complete()
            else:
                from tests.hostcuda import cuda

                cuda.install()
                run(module)

        spec.loader.exec_module = exec_module
        return spec


if "HOSTCUDA_LIBRARY" in os.environ:
    sys.meta_path.insert(0, _BeforeTorch())
