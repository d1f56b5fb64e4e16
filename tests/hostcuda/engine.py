"""SGLang on the device: the kernels that it imports as soon as CUDA is there, from the stand-ins of megagrpo/cpu.

site/sitecustomize.py calls `install` before the first import of sglang.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path

STAND_INS = Path(__file__).parents[2] / "megagrpo" / "cpu" / "engine"  # triton, sgl_kernel
ABSENT = ("flashinfer", "sgl_kernel.", "deep_gemm", "triton_kernels")
# of megagrpo/cpu/engine/sitecustomize.py
REPAIRS = ("torchvision.extension",)


class _Absent(types.ModuleType):
    """A module of kernels, or a name in it, which raises when it is called."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Absent(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self.__name__} is not on the pretended device")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if not any(name == absent or name.startswith(absent.rstrip(".") + ".") for absent in ABSENT):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Absent(spec.name)

    def exec_module(self, module):
        pass


def install() -> None:
    """Puts the stand-ins on the path of this process."""
    os.environ |= {
        "SGLANG_IS_FLASHINFER_AVAILABLE": "0",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    }
    sys.path.insert(0, str(STAND_INS))
    sys.meta_path.append(_Finder())
    from megagrpo.cpu.engine import sitecustomize as on_a_cpu

    for name in set(on_a_cpu.REPAIRS) - set(REPAIRS):
        del on_a_cpu.REPAIRS[name]
